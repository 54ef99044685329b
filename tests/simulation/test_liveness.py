"""What worlds ask of a run that is left alone: it goes on, however often its clients have contested."""

from __future__ import annotations

import pytest
from tests.simulation import liveness
from tests.simulation.kernel import Kernel
from tests.simulation.safety import Broken

END_S = 10.0
LIMIT_S = 3.0


class Run:
    """Does something, and is led by somebody else, at these times."""

    def __init__(self, done_at_s: list[float], led_at_s: list[float]) -> None:
        self.kernel = Kernel(0)
        self.done = self.leader = 0
        for at_s in done_at_s:
            self.kernel.at(at_s, self._do)
        for at_s in led_at_s:
            self.kernel.at(at_s, self._lead)

    def judged(self, most_changes: int) -> None:
        liveness.keeps_going(
            self.kernel, END_S, LIMIT_S, lambda: self.done, leader=lambda: self.leader, most_changes=most_changes
        )

    def _do(self) -> None:
        self.done += 1

    def _lead(self) -> None:
        self.leader += 1


def test_a_run_that_does_nothing_for_longer_than_the_limit_does_not_go_on() -> None:
    Run([2.5, 5.0, 7.5], []).judged(2)
    with pytest.raises(Broken, match="what follows 1 took"):
        Run([2.5, 7.5], []).judged(2)


def test_who_comes_to_lead_has_the_limit_once_more_and_clients_that_contest_for_ever_are_noticed() -> None:
    Run([2.5, 7.5], [5.0]).judged(2)
    with pytest.raises(Broken, match="what follows 1 took"):
        Run([2.5, 7.5], [5.0]).judged(0)
    with pytest.raises(Broken, match="what follows 0 took"):
        Run([], [2.5 * number for number in range(1, 20)]).judged(2)


def test_who_comes_to_lead_shortly_before_the_end_has_to_go_on_too() -> None:
    Run([2.5, 5.0, 12.0], [7.5, 9.5]).judged(2)
    with pytest.raises(Broken, match="what follows 2 took"):
        Run([2.5, 5.0], [7.5]).judged(2)
