"""The trainer's end of an evaluation: a few batches in flight over one path, losses summed in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio

from shoal.data.microbatch import Microbatch
from shoal.errors import RoundAborted
from shoal.ids import PeerId
from shoal.runtime.waking import Signal
from shoal.transport.base import Endpoint
from shoal.wire.messages import Hop, Traffic
from shoal.wire.messages.step import EvalForward, EvalLabels, EvalRefused, EvalResult


class EvalDriver:
    """One evaluation at a time."""

    def __init__(self, endpoint: Endpoint, *, window: int, timeout_s: float, is_wrapped: bool = False) -> None:
        self._endpoint = endpoint
        self._window = window
        self._timeout_s = timeout_s
        # Where on a path the loss is computed.
        self._head = 0 if is_wrapped else -1
        self._evaluation = -1
        self._path: tuple[PeerId, ...] = ()
        self._results: dict[int, EvalResult] = {}
        self._num_sent = 0
        self._problem: str | None = None
        self._refuses: Callable[[PeerId], None] = lambda _: None
        self._changed = Signal()

    def receive(self, peer: PeerId, message: EvalResult | EvalRefused) -> None:
        """Takes an answer; those of another evaluation mean nothing."""
        if message.evaluation != self._evaluation or peer not in self._path:
            return
        if isinstance(message, EvalRefused):
            if message.microbatch in self._results:
                return  # it was passed on, arrived, and was answered before the connection ended
            self._refuses(peer)
            self._problem = f"{peer} refused: {message.reason}"
        elif peer == self._path[self._head] and message.microbatch < self._num_sent:
            self._results.setdefault(message.microbatch, message)
        self._changed.notify()

    def peer_lost(self, peer: PeerId) -> None:
        """An evaluation over a lost replica fails."""
        if peer in self._path:
            self._problem = f"{peer} is lost"
            self._changed.notify()

    async def evaluate(
        self,
        evaluation: int,
        base_round: int,
        microbatches: Sequence[Microbatch],
        path: tuple[Hop, ...],
        refuses: Callable[[PeerId], None],
    ) -> tuple[float, int]:
        for hop in path:
            self._endpoint.introduce(hop)
        self._path = tuple(hop.peer for hop in path)
        self._evaluation, self._results, self._problem = evaluation, {}, None
        self._refuses = refuses
        self._num_sent = 0
        try:
            while len(self._results) < len(microbatches):
                while self._num_sent < len(microbatches) and self._num_sent - len(self._results) < self._window:
                    self._send(evaluation, self._num_sent, base_round, microbatches[self._num_sent], path)
                    self._num_sent += 1
                await self._change()
                if self._problem is not None:
                    raise RoundAborted(f"evaluation of round {base_round}: {self._problem}")
        finally:
            self._evaluation, self._path = -1, ()
        loss_sum, num_targets = 0.0, 0
        for number, microbatch in enumerate(microbatches):
            count = sum(microbatch.targets)
            loss_sum += self._results[number].loss * count
            num_targets += count
        return loss_sum, num_targets

    def _send(
        self, evaluation: int, number: int, base_round: int, microbatch: Microbatch, path: tuple[Hop, ...]
    ) -> None:
        forward = EvalForward(evaluation, number, base_round, path, self._endpoint.hop)
        self._endpoint.post(path[0].peer, forward, microbatch.for_first_stage, Traffic.ACTIVATIONS)
        labels = EvalLabels(evaluation, number, base_round)
        self._endpoint.post(path[self._head].peer, labels, microbatch.for_loss, Traffic.ACTIVATIONS)

    async def _change(self) -> None:
        """Waits for an answer, a loss, or too long."""
        with anyio.move_on_after(self._timeout_s) as timer:
            await self._changed.take()
        if timer.cancelled_caught:
            self._problem = f"no answer within {self._timeout_s:g} s"
