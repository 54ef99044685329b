"""Of which records checkpoints are wanted."""

from __future__ import annotations

from shoal.config import Config
from shoal.swarm.keep_rule import KeepRule

INF = float("inf")


def test_the_first_record_those_of_every_so_many_rounds_and_the_last_one_are_kept() -> None:
    rule = KeepRule(every_rounds=10, every_s=INF, last_round=34)
    due: list[int] = []
    for round in (3, 4, 9, 10, 11, 19, 22, 29, 30, 33, 34):
        if rule.is_due(round, 0.0):
            rule.begun(round, 0.0)
            due.append(round)
    assert due == [3, 10, 22, 30, 34], "one that was missed is made up for by the next"


def test_a_checkpoint_is_also_due_when_the_last_one_is_old() -> None:
    rule = KeepRule(every_rounds=0, every_s=60.0, last_round=100)
    rule.begun(3, 100.0)
    assert not rule.is_due(50, 159.0)
    assert rule.is_due(51, 160.0)


def test_a_run_that_has_gone_back_is_kept_again() -> None:
    rule = KeepRule(every_rounds=10, every_s=INF, last_round=100)
    rule.begun(40, 0.0)
    assert rule.is_due(31, 0.0)


def test_what_was_asked_for_is_wanted_of_the_next_record_alone() -> None:
    rule = KeepRule(every_rounds=10, every_s=INF, last_round=100)
    rule.begun(40, 0.0)
    assert not rule.is_due(41, 1.0)
    rule.is_asked = True
    assert rule.is_due(41, 1.0)
    rule.begun(41, 1.0)
    assert not rule.is_due(42, 2.0)


def test_the_keys_of_param_mirror_are_the_rule() -> None:
    values = {"diloco": {"outer_steps": 7}, "param_mirror": {"every_rounds": 4, "every_s": 90.0}}
    assert KeepRule.of(Config.model_validate(values)) == KeepRule(4, 90.0, 7)
    assert KeepRule.of(Config.model_validate(values), 2) == KeepRule(8, 180.0, 7)
    values["param_mirror"] = {"every_s": None}
    assert KeepRule.of(Config.model_validate(values)).every_s == INF
