"""The registry of a cluster in one process: what it says, and that hundreds who watch do not each put it together."""

from __future__ import annotations

from unittest.mock import Mock

import anyio
import pytest

from shoal.clock import SystemClock
from shoal.control import membership
from shoal.control.records import StageRecord
from shoal.control.view_builder import build_view
from shoal.ids import PeerId
from shoal_lab.registry import LocalRegistry

FIRST, SECOND = PeerId("first"), PeerId("second")


def _record(peer: PeerId, base_round: int = 0) -> StageRecord:
    return StageRecord((f"memory:{peer}",), 0.0, stage=0, base_round=base_round)


async def test_what_a_peer_announces_all_see_who_do_not_miss_it() -> None:
    registry = LocalRegistry(SystemClock())
    seeing, deaf = registry.watch(SECOND), registry.watch(FIRST)
    registry.is_hidden = lambda watcher, peer: (watcher, peer) == (FIRST, SECOND)
    registry.announce(SECOND, _record(SECOND))
    with anyio.fail_after(5):
        await seeing.wait_for(lambda view: view.replica(SECOND) is not None)
    assert deaf.view.replica(SECOND) is None
    assert registry.watch().view.replica(SECOND) is not None


async def test_a_lost_peer_is_not_brought_back_by_what_it_has_announced_before() -> None:
    registry = LocalRegistry(SystemClock())
    losing, other = registry.watch(SECOND), registry.watch(SECOND)
    # Numbers of records are times: of so many at once the last ones are ahead of the clock.
    for number in range(200):
        registry.announce(FIRST, _record(FIRST, number))
    losing.lost(FIRST)
    registry.announce(SECOND, _record(SECOND))
    with anyio.fail_after(5):
        await losing.wait_for(lambda view: view.replica(SECOND) is not None)
    assert losing.view.replica(FIRST) is None
    assert other.view.replica(FIRST) is not None


async def test_a_view_is_put_together_once_for_all_who_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = LocalRegistry(SystemClock())
    watchers = [registry.watch(PeerId(f"server{number}")) for number in range(50)]
    built = Mock(side_effect=build_view)
    monkeypatch.setattr(membership, "build_view", built)
    for number in range(50):
        peer = PeerId(f"server{number}")
        registry.announce(peer, _record(peer))
    with anyio.fail_after(5):
        for watcher in watchers:
            await watcher.wait_for(lambda view: len(view.replicas) == 50)
    assert built.call_count == 1
