"""What the run has achieved so far, from what trainers and rounds have come to. A part of `client.totals`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from shoal.events.run import LossPart, RoundBegun, RoundRecorded, ShareEvaluated, StepReported, TrainerFinished

RATE_WINDOW_S = 10.0
"""The rate is that of so long a time, or of four steps if they take longer."""
CURVE_PARTS = 32
"""A round's curve has at most so many parts, so that the line of a round has a bounded size."""


@dataclass
class Progress:
    """Running totals; times are monotonic seconds.

    Attributes:
        round: in progress, 1-based.
        loss_first: mean loss (nats) of the first step that was not skipped.
        eval_losses: mean held-out loss (nats), by the round of the record on which it was measured.
        paused_s: how long users have paused the run between the first step and the last.
    """

    round: int = 0
    steps: int = 0
    samples: int = 0
    skipped_steps: int = 0
    loss_first: float | None = None
    loss_last: float | None = None
    first_step_at_s: float | None = None
    last_step_at_s: float | None = None
    eval_losses: dict[int, float] = field(default_factory=dict[int, float])
    pipelines_max: int = 0
    trainers_max: int = 0
    paused_s: float = 0.0
    _pause_s: float = 0.0
    _eval_shares: dict[int, dict[int, ShareEvaluated]] = field(default_factory=dict[int, dict[int, ShareEvaluated]])
    _recent: list[tuple[float, int, int]] = field(default_factory=list[tuple[float, int, int]])
    _ring_bytes: dict[str, int] = field(default_factory=dict[str, int])
    _trainer_bytes: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    _round_losses: list[tuple[float, int, int]] = field(default_factory=list[tuple[float, int, int]])

    def step(self, event: StepReported) -> None:
        """Count one committed step."""
        self.steps += 1
        self.samples += event.num_samples
        self.skipped_steps += event.skipped
        self.last_step_at_s = event.at_s
        if self.first_step_at_s is None:
            self.first_step_at_s = event.at_s
        else:
            self.paused_s += self._pause_s
        self._pause_s = 0.0
        if not event.skipped:
            if self.loss_first is None:
                self.loss_first = event.loss
            self.loss_last = event.loss
            self._round_losses.append((event.loss, event.num_targets, event.num_samples))
        self._recent.append((event.at_s, event.num_samples, event.num_targets))
        window_s = max(RATE_WINDOW_S, 4 * event.duration_s)
        while self._recent and self._recent[0][0] < event.at_s - window_s:
            del self._recent[0]

    def resumed(self, pause_s: float) -> None:
        """A pause is over; it counts if another step follows."""
        self._pause_s += pause_s

    def move(self, by_s: float) -> None:
        """All that has happened was so much later; how fast it was just now says nothing any more."""
        if self.first_step_at_s is not None and self.last_step_at_s is not None:
            self.first_step_at_s += by_s
            self.last_step_at_s += by_s
        self._recent.clear()

    def evaluated(self, event: ShareEvaluated, num_holdout: int) -> float | None:
        """Add one trainer's share; return the mean loss once the whole held-out set has been evaluated.

        Shares are added in the order of the slots, so that the mean does not depend on who was first.
        """
        shares = self._eval_shares.setdefault(event.base_round, {})
        shares[event.slot] = event
        num_samples = sum(share.num_samples for share in shares.values())
        if num_samples < num_holdout or not num_samples:
            return None
        num_targets = sum(share.num_targets for share in shares.values())
        loss = sum(shares[slot].loss_sum for slot in sorted(shares)) / max(1, num_targets)
        self.eval_losses[event.base_round] = loss
        return loss

    def has_share(self, base_round: int, slot: int) -> bool:
        """Return whether a slot's share of the evaluation of record `base_round` is there."""
        return slot in self._eval_shares.get(base_round, {})

    def begin_round(self, event: RoundBegun) -> None:
        """A round begins, or the evaluation at the end, which is none.

        Shares of an earlier attempt to evaluate are forgotten: the held-out set may have been cut differently.
        """
        if event.steps:
            self.round = event.round
        self.pipelines_max = max(self.pipelines_max, event.pipelines)
        self.trainers_max = max(self.trainers_max, event.trainers)
        self._eval_shares.pop(event.round - 1, None)

    def done(self, event: TrainerFinished) -> None:
        """Take what a trainer has sent since its start; what is said again changes nothing."""
        self._trainer_bytes[f"{event.slot}.{event.generation}"] = dict(event.sent_bytes)

    def recorded(self, event: RoundRecorded) -> None:
        """A round is over: add what its replicas have sent; the next round has a loss of its own."""
        self._ring_bytes = dict(Counter(self._ring_bytes) + Counter(event.sent_bytes))
        self._round_losses.clear()

    @property
    def sent_bytes(self) -> Mapping[str, int]:
        """What trainers and replicas have reported as sent, by traffic."""
        total = Counter(self._ring_bytes)
        for sent in self._trainer_bytes.values():
            total.update(sent)
        return total

    @property
    def round_loss(self) -> float | None:
        """The mean training loss over the round's samples; None without one."""
        return _mean(self._round_losses)

    @property
    def round_curve(self) -> tuple[LossPart, ...]:
        """The training loss in the course of the round, over the steps in the order in which they were reported."""
        per_part = -(-len(self._round_losses) // CURVE_PARTS) or 1
        starts = range(0, len(self._round_losses), per_part)
        return tuple(_part(self._round_losses[start : start + per_part]) for start in starts)

    def recent_samples_per_s(self) -> float:
        """Return the rate over the last seconds, see `RATE_WINDOW_S`."""
        return self._recent_rate(samples for _, samples, _ in islice(self._recent, 1, None))

    def recent_targets_per_s(self) -> float:
        """Return the same of targets."""
        return self._recent_rate(targets for *_, targets in islice(self._recent, 1, None))

    def _recent_rate(self, amounts: Iterable[int]) -> float:
        """Return what these come to in a second: the first entry marks the beginning, and is not among them."""
        elapsed_s = self._recent[-1][0] - self._recent[0][0] if self._recent else 0.0
        return sum(amounts) / elapsed_s if elapsed_s > 0 else 0.0

    def mean_samples_per_s(self) -> float:
        """Return the rate from the first committed step to the last, averaging rounds included, pauses left out."""
        if self.first_step_at_s is None or self.last_step_at_s is None or self.steps < 2:
            return 0.0
        elapsed_s = self.last_step_at_s - self.first_step_at_s - self.paused_s
        return self.samples * (self.steps - 1) / self.steps / elapsed_s if elapsed_s > 0 else 0.0


def _mean(steps: Sequence[tuple[float, int, int]]) -> float | None:
    """Return the mean loss over the targets of steps, each a loss, targets and samples; None without a target."""
    total = sum(targets for _, targets, _ in steps)
    return sum(loss * targets for loss, targets, _ in steps) / total if total else None


def _part(steps: Sequence[tuple[float, int, int]]) -> LossPart:
    losses = [loss for loss, _, _ in steps]
    mean = _mean(steps)
    values = (min(losses), losses[0] if mean is None else mean, max(losses))
    # Five digits are more than a picture shows.
    return LossPart(sum(samples for *_, samples in steps), *(float(f"{value:.5g}") for value in values))
