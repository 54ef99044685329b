"""Links in the log: only what is known, in milliseconds and Mbit/s."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import cast

import pytest

from shoal.control.counter_report import counters_logged, log_links
from shoal.events.links import RoleLinks, RoundLinks
from shoal.ids import PeerId
from shoal.telemetry.registry import MetricRegistry
from shoal.transport.base import Endpoint
from shoal.transport.link_meter import LinkEstimate

LINKS = {
    PeerId("near"): LinkEstimate(round_trip_s=0.0001234),
    PeerId("far"): LinkEstimate(round_trip_s=0.15, receive_bytes_per_s=2.5e6),
    PeerId("unknown"): LinkEstimate(),
}
SHOWN = {"near": {"round_trip_ms": 0.123}, "far": {"round_trip_ms": 150.0, "receive_mbit_per_s": 20.0}}


class FakeEndpoint:
    def __init__(self, links: Mapping[PeerId, LinkEstimate]) -> None:
        self._links = links
        self.metrics = MetricRegistry()

    def links(self) -> Mapping[PeerId, LinkEstimate]:
        return self._links


def endpoint(links: Mapping[PeerId, LinkEstimate]) -> Endpoint:
    return cast("Endpoint", FakeEndpoint(links))


def test_what_is_known_of_links_is_logged_in_the_units_of_links(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="shoal")
    log_links(endpoint(LINKS), partial(RoundLinks, round=3))
    [line] = [vars(record) for record in caplog.records]
    assert (line["msg"], line["levelno"], line["round"], line["links"]) == ("round.links", logging.DEBUG, 3, SHOWN)


def test_nothing_is_logged_while_nothing_is_known(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="shoal")
    log_links(endpoint({PeerId("unknown"): LinkEstimate()}), RoleLinks)
    assert not caplog.records


async def test_every_role_leaves_its_links_in_its_log_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="shoal")
    async with counters_logged(endpoint(LINKS)):
        assert not caplog.records
    [line] = [vars(record) for record in caplog.records if record.getMessage() == "role.links"]
    assert line["links"] == SHOWN
