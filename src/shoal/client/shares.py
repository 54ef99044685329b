"""How the run's work was shared in a round, as its trainers have reported, and how fast each pipeline is by that.

Who trains how much is decided where batches are handed out (`swarm.shared_deal`), which only knows the pipelines of a
round by their slots. Here they are known by their replicas, so that what was measured stays with them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from shoal.events.run import StepReported
from shoal.ids import PeerId
from shoal.swarm.routing import Pipeline
from shoal.swarm.shares import Speed, bounds, known
from shoal.wire.messages.control import Evaluation


@dataclass(frozen=True)
class Shared:
    """What the trainers of one round have done.

    Attributes:
        samples: trained by each slot.
        samples_per_s: of each slot, while it trained.
        waited_s: from the last step of the first trainer that was done to the last step of the last trainer.
    """

    samples: Mapping[int, int]
    samples_per_s: Mapping[int, float]
    waited_s: float


class Shares:
    """The pipelines of the round, with what each has trained."""

    def __init__(self) -> None:
        self._paths: dict[int, tuple[PeerId, ...]] = {}
        self._speeds: dict[tuple[PeerId, ...], Speed] = {}
        self._samples = Counter[int]()
        self._busy_s = defaultdict[int, float](float)
        self._last_at_s: dict[int, float] = {}

    def begin_round(self, pipelines: Iterable[Pipeline]) -> None:
        """These pipelines train from now on; what is known of others is forgotten."""
        self._paths = {pipeline.slot: pipeline.peers for pipeline in pipelines}
        self._speeds = {path: self._speeds.get(path, Speed()) for path in self._paths.values()}
        self._samples.clear()
        self._busy_s.clear()
        self._last_at_s.clear()

    def step(self, event: StepReported) -> None:
        """Count one committed step."""
        path = self._paths.get(event.slot)
        if path is None:
            return
        self._speeds[path].measured(event.num_samples, event.duration_s)
        self._samples[event.slot] += event.num_samples
        self._busy_s[event.slot] += event.duration_s
        self._last_at_s[event.slot] = event.at_s

    def speeds(self, pipelines: Iterable[Pipeline]) -> tuple[float, ...]:
        """Return samples per second of these pipelines; 0: not known."""
        unknown = Speed()
        return tuple(self._speeds.get(pipeline.peers, unknown).samples_per_s for pipeline in pipelines)

    def of_round(self) -> Shared:
        """Return how the round was shared."""
        ends_s = self._last_at_s.values()
        speeds = {slot: num / self._busy_s[slot] for slot, num in self._samples.items() if self._busy_s[slot] > 0}
        waited_s = max(ends_s) - min(ends_s) if ends_s else 0.0
        return Shared(dict(self._samples), speeds, waited_s)


def evaluation_shares(
    base_round: int, num_holdout: int, num_slots: int, speeds: tuple[float, ...]
) -> list[Evaluation | None]:
    """Cut the held-out set into one share for each pipeline, by their speeds; None: no share.

    Args:
        base_round: round of the record to evaluate.
        num_holdout: size of the held-out set; 0: nothing is evaluated.
        speeds: samples per second of each pipeline; 0: not known; empty: all get the same share.
    """
    if speeds:
        cuts = bounds(num_holdout, known(speeds))
    else:
        cuts = [num_holdout * part // num_slots for part in range(num_slots + 1)]
    return [Evaluation(base_round, start, stop) if stop > start else None for start, stop in pairwise(cuts)]
