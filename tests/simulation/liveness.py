"""What must happen in the end: checks that the worlds share, made when the last fault has healed long enough ago.

Safety says what must never happen and is checked all the time (`safety.py`); whether things go on can only be said of
a run that is left alone. So every world has a time at which its faults have healed, and one by which this must hold.

Where the loss of one process is all that goes wrong for a while, there is more to say: how long its work may take to go
on (`SingleLosses`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from tests.simulation.kernel import Kernel
from tests.simulation.network import DEADLINE_S, Network
from tests.simulation.safety import Broken

LOOK_S = 0.25
"""How often it is looked at, in virtual time, whether anything more was done."""


def all_recorded(recorded: Collection[object], num_samples: int, states: Iterable[str]) -> None:
    """Every sample has been trained and recorded."""
    if len(recorded) != num_samples:
        raise Broken(f"no progress: {len(recorded)} of {num_samples} samples are recorded: {sorted(states)}")


def goes_on(round_before: int, round_now: int, at_least: int = 2) -> None:
    """Rounds were committed after the last fault."""
    if round_now < round_before + at_least:
        raise Broken(f"no progress after round {round_before}: {round_now}")


def nobody_left_behind(rounds: Mapping[str, int]) -> None:
    """All replicas are in the same round, or just between two."""
    if max(rounds.values()) - min(rounds.values()) > 1:
        raise Broken(f"a replica was left behind: {dict(rounds)}")


def arrived(waiting: Mapping[str, object], what: str) -> None:
    """Nobody waits any more for what was under way."""
    if waiting:
        raise Broken(f"{what} never came: {dict(waiting)}")


def within(took_s: float, limit_s: float, what: str) -> None:
    """It took no longer than its limit, in virtual time: what depends on deadlines alone, and on no machine's speed."""
    if took_s > limit_s:
        raise Broken(f"{what} took {took_s:.2f} s, the limit is {limit_s:.2f} s")


def keeps_going(
    kernel: Kernel,
    end_s: float,
    limit_s: float,
    progress: Callable[[], int],
    is_over: Callable[[], bool] | None = None,
    leader: Callable[[], object] = lambda: None,
    most_changes: int = 0,
) -> None:
    """Run until `end_s`, or until it is over; meanwhile something more is done in each `limit_s` of virtual time.

    A fault may leave clients that contest. Whoever comes to lead waits anew for what the one before it has left, and so
    has the limit once more, also after `end_s`. But they must come to an end: before anything more is done the leader
    changes `most_changes` times at most.
    """
    done, leads, since_s, num_changes = progress(), leader(), kernel.now_s, 0
    while (kernel.now_s < end_s or num_changes) and not (is_over is not None and is_over()):
        kernel.run(kernel.now_s + LOOK_S, is_over)
        if progress() != done:
            done, leads, since_s, num_changes = progress(), leader(), kernel.now_s, 0
        elif leader() != leads and num_changes < most_changes:
            leads, since_s, num_changes = leader(), kernel.now_s, num_changes + 1
        within(kernel.now_s - since_s, limit_s, f"what follows {done}")


def given_time(kernel: Kernel, last_s: float, is_enough: Callable[[], bool]) -> None:
    """Run on until there is enough to be judged, at most until `last_s`: a slow network takes longer."""
    if not is_enough():
        kernel.run(last_s, is_enough)


class SingleLosses:
    """What follows the loss of one process has a limit in virtual time, if nothing else goes wrong until then.

    Nor in the `CALM_S` before: by then what was wrong has been noticed. A network that makes messages wait for seconds
    is never calm.
    """

    CALM_S = DEADLINE_S

    def __init__(self, network: Network) -> None:
        self._network = network
        self._awaited: dict[str, float] = {}

    def lost(self, what: str, limit_s: float) -> None:
        """A process is killed right now: what follows is awaited from now on.

        Args:
            what: Follows; awaited once at a time, from the last loss on.
            limit_s: How long it may take.
        """
        lost_s = self._awaited[what] = self._network.now_s
        self._network.after(limit_s, self._judge, what, lost_s)

    def followed(self, what: str) -> None:
        """This has come, or is not to be awaited any more."""
        self._awaited.pop(what, None)

    def is_alone(self, what: str) -> bool:
        """Whether this is awaited, and its loss is all that has gone wrong."""
        lost_s = self._awaited.get(what)
        return lost_s is not None and self._is_calm(lost_s)

    def _is_calm(self, lost_s: float) -> bool:
        return not self._network.manners.slow_rate and self._network.num_faults(lost_s - self.CALM_S) == 1

    def _judge(self, what: str, lost_s: float) -> None:
        if self._awaited.get(what) == lost_s and self._is_calm(lost_s):
            limit_s = self._network.now_s - lost_s
            raise Broken(f"{what} has not followed the loss at {lost_s:.2f} s within {limit_s:.2f} s")
