"""Answers whoever asks how the run is. A `transport.dispatch.Handler`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from shoal.client.course import Course
from shoal.client.progress import RATE_WINDOW_S
from shoal.client.reports import Reports
from shoal.client.stage_watch import StageWatch
from shoal.client.steering import Pausing
from shoal.clock import Clock
from shoal.config.schema import Config
from shoal.control.membership import Membership
from shoal.control.peer_numbers import FRESH_S, PeerNumbers
from shoal.control.seen_peers import seen_peers
from shoal.ids import PeerId
from shoal.swarm.trainer_slots import TrainerSlots
from shoal.transport.base import Endpoint, Received
from shoal.transport.dispatch import Handler
from shoal.wire.messages.control import MAX_CURVE, MAX_STATE_CHARS, MAX_TOTAL, AskStatus, RunStatus, ServerNumbers


def numbers_of(peer: PeerId, values: Mapping[str, float], age_s: float) -> ServerNumbers:
    """Return what is said of a server which has measured these values so long ago.

    A gauge may have any value, and several add up: what no server has is told as the nearest that one may have, since
    whoever asks refuses all of an answer in which it stands.
    """

    def told(name: str) -> float | None:
        return min(max(values[name], 0.0), float(MAX_TOTAL)) if name in values else None

    def speed(name: str) -> float | None:
        return told(name) if age_s < FRESH_S else None

    def whole(name: str) -> int | None:
        return None if (value := told(name)) is None else int(value)

    return ServerNumbers(
        peer=peer,
        age_s=age_s,
        steps=whole("step.committed"),
        samples_per_s=speed("samples_per_s"),
        busy=speed("busy"),
        step_s=told("step.open_seconds/p50"),
        sent_bytes=whole("transport.sent_bytes"),
        received_bytes=whole("transport.received_bytes"),
        memory_bytes=whole("process.memory_bytes"),
    )


@dataclass(eq=False, repr=False)
class StatusAnswers(Handler):
    """The client's side of `shoal status`."""

    endpoint: Endpoint
    config: Config
    membership: Membership
    reports: Reports
    stages: StageWatch
    pausing: Pausing
    trainers: TrainerSlots
    numbers: PeerNumbers
    course: Course
    clock: Clock

    def receive(self, event: Received) -> bool:
        """Answer the question, whoever of the swarm asks it."""
        if not isinstance(event.message, AskStatus):
            return False
        self.endpoint.post(event.peer, self.status(event.message.since))
        return True

    def status(self, since: int | None = None) -> RunStatus:
        """Return how the run is now.

        Args:
            since: as `AskStatus` has it.
        """
        status = self._now()
        if since is None:
            return status
        evaluated = [loss for _, loss in sorted(self.reports.progress.eval_losses.items()) if math.isfinite(loss)]
        return msgspec.structs.replace(
            status,
            losses=self.course.losses.values,
            eval_losses=tuple(evaluated[-MAX_CURVE:]),
            events=self.course.events(since),
            num_stages=self.config.num_stages,
            peers=seen_peers(self.membership.view),
        )

    def _now(self) -> RunStatus:
        progress = self.reports.progress
        last = progress.last_step_at_s
        last_step_s = None if last is None else max(0.0, self.clock.now_s() - last)
        is_recent = last_step_s is not None and last_step_s <= RATE_WINDOW_S
        eval_losses = progress.eval_losses
        stands_still = self.pausing.is_paused or bool(self._missing())
        return RunStatus(
            state=self._state()[:MAX_STATE_CHARS],
            round=progress.round,
            rounds=self.config.diloco.outer_steps,
            steps=progress.steps,
            samples=progress.samples,
            loss=progress.loss_last,
            eval_loss=eval_losses[max(eval_losses)] if eval_losses else None,
            # The rate of a time that is over says nothing of now.
            samples_per_s=progress.recent_samples_per_s() if is_recent else 0.0,
            last_step_s=last_step_s,
            trainers=tuple(sorted(self.trainers.present)),
            servers=tuple(self._servers()),
            paused=self.pausing.is_paused,
            left_s=None if stands_still else self.course.left_s(progress.round, self.config.diloco.outer_steps),
        )

    def _missing(self) -> Sequence[int]:
        return self.stages.missing or self.membership.view.missing_stages(self.config.num_stages)

    def _servers(self) -> Iterator[ServerNumbers]:
        view = self.membership.view
        for peer in (each.peer for each in (*view.replicas, *view.candidates)):
            heard_s = self.numbers.heard_s(peer)
            if heard_s is not None:
                age_s = max(0.0, self.clock.now_s() - heard_s)
                yield numbers_of(peer, self.numbers.values(peer), age_s)

    def _state(self) -> str:
        missing = self._missing()
        round = self.reports.progress.round
        waits = f"no server for stage{'s'[: len(missing) != 1]} {', '.join(map(str, missing))}" if missing else ""
        if by := self.pausing.by:
            paused = f"paused by {by} {f'in round {round}' if round else 'before the first round'}"
            return f"{paused}; {waits}" if waits else paused
        if waits:
            return f"stopped in round {round}: {waits}" if round else f"waiting for servers: {waits}"
        if not round:
            return "starting: the first round has not begun"
        if not self.trainers.present:
            return f"starting trainers for round {round}"
        return f"training round {round} of {self.config.diloco.outer_steps}"
