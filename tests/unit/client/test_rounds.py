"""How long a round's trainers are waited for."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from shoal.client.rounds import RoundLoop
from shoal.config import Config


def waited_s(durations_s: Sequence[float], round: int, **run: object) -> float | None:
    config = Config.model_validate({"diloco": {"outer_steps": 9}, "run": run})
    ledger = SimpleNamespace(totals=SimpleNamespace(durations_s=durations_s))
    loop = SimpleNamespace(_config=config, _ledger=ledger)
    return RoundLoop._boundary_deadline_s(loop, round)  # type: ignore[arg-type]


def test_the_first_rounds_and_the_last_may_take_as_long_as_configured_and_others_what_is_usual() -> None:
    assert waited_s((), 1, first_deadline_s=12.5) == 12.5
    assert waited_s((1.0, 1.0), 3, first_deadline_s=12.5) == 12.5
    assert waited_s((1.0, 1.0, 1.0), 4, first_deadline_s=12.5) == 1.5
    assert waited_s((1.0, 1.0, 1.0), 9, first_deadline_s=12.5) == 12.5


def test_a_round_that_has_to_be_repeatable_is_waited_for_as_long_as_it_takes() -> None:
    assert waited_s((), 1, first_deadline_s=12.5, deterministic=True) is None
