"""Losses, and when the trainers that they hit went on."""

from __future__ import annotations

from shoal.client.failovers import Failovers


def test_a_loss_is_over_when_every_trainer_that_it_hit_has_committed_again() -> None:
    failovers = Failovers()
    failovers.lost("server", {0, 2}, 10.0)
    failovers.step_committed(1, 10.5)
    failovers.step_committed(0, 11.0)
    assert failovers.as_json() == [{"kind": "server", "at_s": 10.0, "recovered_after_s": None}]
    failovers.step_committed(2, 12.5)
    failovers.step_committed(2, 13.0)
    assert failovers.as_json() == [{"kind": "server", "at_s": 10.0, "recovered_after_s": 2.5}]


def test_a_loss_that_hits_nobody_is_over_at_once() -> None:
    failovers = Failovers()
    failovers.lost("server", (), 3.0)
    assert failovers.as_json() == [{"kind": "server", "at_s": 3.0, "recovered_after_s": 0.0}]


def test_losses_are_kept_apart_and_in_order() -> None:
    failovers = Failovers()
    failovers.lost("trainer", {1}, 1.0)
    failovers.lost("server", {1}, 2.0)
    failovers.step_committed(1, 4.0)
    found = [(each["kind"], each["recovered_after_s"]) for each in failovers.as_json()]
    assert found == [("trainer", 3.0), ("server", 2.0)]
