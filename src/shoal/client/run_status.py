"""Answers whoever asks how the run is. A `transport.dispatch.Handler`."""

from __future__ import annotations

from shoal.client.progress import RATE_WINDOW_S
from shoal.client.reports import Reports
from shoal.client.stage_watch import StageWatch
from shoal.client.trainers import TrainerPool
from shoal.clock import Clock
from shoal.config.schema import Config
from shoal.control.membership import Membership
from shoal.ids import PeerId
from shoal.transport.base import Endpoint, Received
from shoal.wire.messages.control import MAX_STATE_CHARS, AskStatus, RunStatus


class StatusAnswers:
    """The client's side of `shoal status`."""

    def __init__(
        self,
        endpoint: Endpoint,
        config: Config,
        membership: Membership,
        reports: Reports,
        stages: StageWatch,
        trainers: TrainerPool,
        clock: Clock,
    ) -> None:
        """Answer from these parts of the client."""
        self._endpoint = endpoint
        self._num_rounds, self._num_stages = config.diloco.outer_steps, config.num_stages
        self._membership = membership
        self._reports = reports
        self._stages = stages
        self._trainers = trainers
        self._clock = clock

    def receive(self, event: Received) -> bool:
        """Answer the question, whoever of the swarm asks it."""
        if not isinstance(event.message, AskStatus):
            return False
        self._endpoint.post(event.peer, self.status())
        return True

    def peer_lost(self, peer: PeerId) -> None:
        """Whoever has asked has gone."""

    def status(self) -> RunStatus:
        """Return how the run is now."""
        progress = self._reports.progress
        last = progress.last_step_at_s
        last_step_s = None if last is None else max(0.0, self._clock.now_s() - last)
        is_recent = last_step_s is not None and last_step_s <= RATE_WINDOW_S
        eval_losses = progress.eval_losses
        return RunStatus(
            state=self._state()[:MAX_STATE_CHARS],
            round=progress.round,
            rounds=self._num_rounds,
            steps=progress.steps,
            samples=progress.samples,
            loss=progress.loss_last,
            eval_loss=eval_losses[max(eval_losses)] if eval_losses else None,
            # The rate of a time that is over says nothing of now.
            samples_per_s=progress.recent_samples_per_s() if is_recent else 0.0,
            last_step_s=last_step_s,
            trainers=tuple(sorted(self._trainers.present)),
        )

    def _state(self) -> str:
        missing = self._stages.missing or self._membership.view.missing_stages(self._num_stages)
        round = self._reports.progress.round
        if missing:
            waits = f"no server for stage{'s'[: len(missing) != 1]} {', '.join(map(str, missing))}"
            return f"stopped in round {round}: {waits}" if round else f"waiting for servers: {waits}"
        if not round:
            return "starting: the first round has not begun"
        if not self._trainers.present:
            return f"starting trainers for round {round}"
        return f"training round {round} of {self._num_rounds}"
