"""What endpoints find out about the links with their peers."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest
from tests.integration.transport.samples import ALICE, BOB, CAROL, port_of, step, take, tensor

from shoal.transport.base import PeerUp, Received
from shoal.transport.limits import TransportLimits
from shoal.transport.link_meter import LinkEstimate
from shoal.wire.messages import Hop
from shoal.wire.messages.step import Forward, Opened
from shoal_lab.faults.link_grammar import parse_link
from shoal_lab.faults.link_proxy import LinkProxy

MAX_MEASUREMENTS = 60
"""A machine that stalls makes a link slower than its conditions: then it is measured again."""


@pytest.mark.parametrize(
    ("text", "rate_bytes_per_s", "round_trip_s"), [("20mbit,150ms", 2.5e6, 0.15), ("100mbit,30ms", 12.5e6, 0.03)]
)
async def test_both_ends_measure_round_trip_and_rate_of_a_link(
    host: Any, text: str, rate_bytes_per_s: float, round_trip_s: float
) -> None:
    limits = TransportLimits(heartbeat_s=0.05, deadline_s=2.0)
    a, b = await host(ALICE, limits=limits, tcp=None), await host(BOB, limits=limits)
    a.introduce(Hop(CAROL.peer_id, ()))
    async with LinkProxy(("127.0.0.1", port_of(b)), parse_link(text)) as proxy:
        a.introduce(Hop(b.peer_id, (proxy.address,)))
        a.post(b.peer_id, Opened(step()))
        assert len(await take(a, 1)) == 1
        assert await take(b, 2) == [PeerUp(a.peer_id), Received(a.peer_id, Opened(step()))]
        while a.links()[b.peer_id].round_trip_s is None or b.links()[a.peer_id].round_trip_s is None:
            await anyio.lowlevel.checkpoint()
        for number in range(MAX_MEASUREMENTS):
            for one, other in ((a, b), (b, a)):
                one.post(other.peer_id, Forward(step(number), 0), [tensor(int(rate_bytes_per_s * 0.7))])
            for one in (a, b):
                await take(one, 1)
            found = [one.links()[other.peer_id] for one, other in ((a, b), (b, a))]
            if all(_is_right(estimate, round_trip_s, rate_bytes_per_s) for estimate in found):
                break
        assert all(_is_right(estimate, round_trip_s, rate_bytes_per_s) for estimate in found), found
        assert a.links()[CAROL.peer_id] == LinkEstimate()
        assert a.counters["transport.lost"] == 0


def _is_right(estimate: LinkEstimate, round_trip_s: float, rate_bytes_per_s: float) -> bool:
    assert estimate.round_trip_s is not None
    assert estimate.receive_bytes_per_s is not None
    return (
        round_trip_s - 0.002 < estimate.round_trip_s < 2 * round_trip_s + 0.05
        and 1 / 1.5 < estimate.receive_bytes_per_s / rate_bytes_per_s < 1.5
    )


async def test_what_was_measured_outlives_the_connection(host: Any) -> None:
    a, b = await host(ALICE, limits=TransportLimits(heartbeat_s=0.05)), await host(BOB)
    a.introduce(b.hop)
    a.post(b.peer_id, Opened(step()))
    await take(a, 1)
    while a.links()[b.peer_id].round_trip_s is None:
        await anyio.lowlevel.checkpoint()
    before = a.links()[b.peer_id]
    a.disconnect(b.peer_id, "enough")
    await take(a, 1)
    assert a.links()[b.peer_id] == before
