"""What members and coordinators say where something else has happened than the round asked of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.averaging.coordinator import RoundCoordinator
from shoal.averaging.member import RoundMember
from shoal.errors import RoundAborted
from shoal.swarm.records import Tip
from shoal.swarm.round_effects import Overtaken


async def test_that_its_steps_are_in_another_round_by_now_is_logged_and_nothing_is_joined(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="shoal")

    async def close(round: int) -> None:
        raise RoundAborted(f"round {round} cannot be closed: this replica is in round 5")

    member: Any = SimpleNamespace(steps=SimpleNamespace(close=close))
    await RoundMember._close(member, 4)
    assert caplog.messages == ["round.close_superseded"]


@pytest.mark.parametrize(("is_taken", "event"), [(True, "replica.resumed"), (False, "replica.not_resumed")])
def test_whether_a_snapshot_was_taken_up_is_logged(
    is_taken: bool, event: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="shoal")
    found = SimpleNamespace(log=(1, 2), generation=1, earlier=()), None
    member: Any = SimpleNamespace(
        base=None,
        stage=1,
        _machine=SimpleNamespace(round=3),
        source=SimpleNamespace(resumable=lambda _: found),
        steps=SimpleNamespace(resume=lambda *_: is_taken),
    )
    RoundMember._resume(member)
    assert caplog.messages == [event]


def test_what_a_client_knew_of_its_run_is_void_when_another_record_stands(caplog: pytest.LogCaptureFixture) -> None:
    told: list[object] = []
    coordinator: Any = SimpleNamespace(_ready=object(), _tell=told.append)
    coordinator._changed = SimpleNamespace(notify=lambda: None)
    effect = Overtaken(Tip(5, "hash", None))
    RoundCoordinator._do(coordinator, [effect])
    assert (coordinator._ready, told) == (None, [effect])
    assert caplog.messages == ["round.overtaken"]
