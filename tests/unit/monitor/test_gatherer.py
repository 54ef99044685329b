"""What the monitor hears of each peer, and from whom."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
import pytest

from shoal.clock import SystemClock
from shoal.errors import RemoteProtocolError
from shoal.ids import PeerId
from shoal.monitor.service import Gatherer
from shoal.monitor.status import Status
from shoal.swarm.view import PeerLabel, SwarmView
from shoal.transport.base import Received
from shoal.wire.messages.control import MetricReport, Metrics, PeerMetrics

pytestmark = pytest.mark.anyio

CLIENT, SERVER, TRAINER = PeerId("client"), PeerId("12D3KooWserver00"), PeerId("12D3KooWtrainer0")
VIEW = SwarmView(labels={SERVER: PeerLabel("server", "box2", 1)})


class _Rows:
    """A W&B run."""

    def __init__(self) -> None:
        self.rows: list[Mapping[str, float]] = []

    def log(self, values: Mapping[str, float]) -> None:
        self.rows.append(values)

    def close(self, timeout_s: float) -> bool:
        return True


class _Registry:
    """Says once who is there."""

    def __init__(self) -> None:
        self.membership = self
        self._views = [VIEW]

    async def changed(self) -> SwarmView:
        if not self._views:
            await anyio.sleep_forever()
        return self._views.pop()


async def _gatherer(rows: Any) -> Gatherer:
    registry: Any = _Registry()
    gatherer = Gatherer(Status(2), rows, SystemClock(), CLIENT)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(gatherer.follow, registry)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    return gatherer


def _passed_on(peer: PeerId, role: str, committed: int) -> PeerMetrics:
    return PeerMetrics(peer, MetricReport(role, {"step.committed{stage=1}": committed}, {}, {}))


async def test_each_peers_numbers_are_in_a_row_of_the_run_under_its_name_once() -> None:
    rows = _Rows()
    gatherer = await _gatherer(rows)
    assert gatherer.receive(Received(CLIENT, _passed_on(SERVER, "server", 3)))
    assert gatherer.receive(Received(CLIENT, _passed_on(TRAINER, "trainer", 0)))
    assert rows.rows == [], "a peer does not know at how many samples that was"
    for _ in range(2):
        gatherer.receive(Received(CLIENT, Metrics("client", CLIENT, 1, {"samples": 8.0})))
    run = {"samples": 8.0, "round": 1.0}
    assert rows.rows == [
        run | {"server 1@box2/step.committed": 3.0, "trainer ...trainer0/step.committed": 0.0},
        run,
    ]


async def test_only_the_client_of_this_host_speaks_for_others() -> None:
    gatherer = await _gatherer(None)
    with pytest.raises(RemoteProtocolError, match="only the client does"):
        gatherer.receive(Received(SERVER, _passed_on(TRAINER, "trainer", 3)))
    assert gatherer.measured([]) == {}


async def test_what_each_peer_has_measured_last_is_left_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="shoal")
    gatherer = await _gatherer(None)
    for committed in (3, 5):
        gatherer.receive(Received(CLIENT, _passed_on(SERVER, "server", committed)))
    await gatherer.aclose()
    [line] = [record for record in caplog.records if record.getMessage() == "monitor.peers"]
    assert vars(line)["measured"] == {"server 1@box2": {"step.committed": 5.0}}
