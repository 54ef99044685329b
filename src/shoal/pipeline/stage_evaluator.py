"""A replica's part in evaluation: forwards in eval mode on the parameters of a round's record. Nothing is kept."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.config.own_class import raised
from shoal.errors import LocalProtocolError
from shoal.events.base import emit
from shoal.events.steps import EvaluationFailed
from shoal.ids import PeerId
from shoal.pipeline.device_operations import Operations
from shoal.pipeline.model_mistake import is_refused_for
from shoal.pipeline.out_of_memory import is_out_of_memory
from shoal.pipeline.tensor_check import misfit
from shoal.swarm.microbatch_cut import too_large
from shoal.transport.base import Endpoint
from shoal.wire.messages import Traffic
from shoal.wire.messages.control import MAX_REFUSAL_CHARS
from shoal.wire.messages.step import EvalForward, EvalLabels, EvalRefused, EvalResult
from shoal.wire.tensors import WireTensor

logger = logging.getLogger(__name__)

# Batches that wait for the device or for their labels; a trainer keeps a few in flight.
_MAX_PENDING = 1024

_Pair = tuple[PeerId, int, int]
"""Trainer, evaluation, microbatch."""


@dataclass(slots=True)
class _Batch:
    """One evaluation batch: input and labels come from different peers, in any order."""

    request: EvalForward | None = None
    taken: Sequence[WireTensor] = ()
    labels: WireTensor | None = None


class StageEvaluator:
    """Queue of evaluation batches of one replica."""

    def __init__(self, endpoint: Endpoint, operations: Operations) -> None:
        self._endpoint = endpoint
        self._operations = operations
        self._compute = operations.compute
        # A wrapped first stage sees a batch twice: when it begins, and where its loss is computed.
        self._pending: dict[tuple[_Pair, bool], _Batch] = {}
        self._passed_on: dict[PeerId, tuple[int, int, PeerId]] = {}

    @property
    def is_ready(self) -> bool:
        """Whether a batch could be run now."""
        return any(_is_complete(batch, is_end) for (_, is_end), batch in self._pending.items())

    def receive(
        self,
        peer: PeerId,
        message: EvalForward | EvalLabels,
        tensors: Sequence[WireTensor],
        base_round: int,
        cap: int | None = None,
    ) -> None:
        """Queues an input or labels, or refuses them: the replica holds another record, or takes `cap` samples only."""
        trainer, module = peer, self._compute.module
        specs, is_end = (module.label_spec,), module.has_loss
        if isinstance(message, EvalForward):
            self._endpoint.introduce(message.trainer)
            trainer = message.trainer.peer
            if module.head is not None:
                is_end = peer != trainer
            specs = module.part(is_head=is_end and module.head is not None).forward_specs
        num_samples = tensors[0].shape[0] if tensors and tensors[0].shape else 0
        problem = misfit(tensors, specs, num_samples) or too_large(num_samples, cap)
        if message.base_round != base_round:
            problem = f"this replica holds the record of round {base_round}, not {message.base_round}"
        elif isinstance(message, EvalForward) and not self._is_on_path(message):
            problem = "this replica is not on the path"
        elif len(self._pending) >= _MAX_PENDING:
            problem = "too many evaluation batches wait"
        pair = (trainer, message.evaluation, message.microbatch)
        if problem is not None:
            self._refuse(pair, problem)
            return
        # A trainer does one evaluation after the other: what waits from an earlier one waits for nothing any more.
        for old in [key for key in self._pending if key[0][0] == trainer and key[0][1] < message.evaluation]:
            del self._pending[old]
        batch = self._pending.setdefault((pair, is_end), _Batch())
        if isinstance(message, EvalForward):
            batch.request, batch.taken = message, tensors
        else:
            batch.labels = tensors[0]

    def peer_lost(self, peer: PeerId) -> None:
        """Forgets what a lost trainer has asked for, and says that what was passed on to a lost replica may be lost.

        The trainer may still have a connection with that one, and would wait for an answer.
        """
        self._pending = {key: batch for key, batch in self._pending.items() if key[0][0] != peer}
        self._passed_on.pop(peer, None)
        for trainer, (evaluation, microbatch, following) in list(self._passed_on.items()):
            if following == peer:
                del self._passed_on[trainer]
                self._refuse((trainer, evaluation, microbatch), f"its connection with {peer} has ended")

    async def run_one(self) -> int:
        """Runs the first batch that is complete and passes the result on.

        Returns:
            How many samples did not fit into the device's memory; 0: all did.
        """
        pair, is_end = next(key for key, batch in self._pending.items() if _is_complete(batch, key[1]))
        batch = self._pending.pop((pair, is_end))
        if batch.request is None or not batch.taken:
            return 0
        num_samples = batch.taken[0].shape[0]
        if batch.labels is not None and batch.labels.shape[0] != num_samples:
            self._refuse(pair, "input and labels differ in their number of samples")
            return 0
        try:
            result = await self._operations.evaluate(batch.taken, batch.labels if is_end else None)
        except Exception as error:
            family = self._compute.module.family_name
            if not (isinstance(error, LocalProtocolError) or is_refused_for(error, family)):
                raise
            emit(logger, EvaluationFailed(), error=error)
            self._refuse(pair, raised(error, family, max_chars=MAX_REFUSAL_CHARS))
            return num_samples if is_out_of_memory(error) else 0
        trainer, evaluation, microbatch = pair
        if not isinstance(result, WireTensor):
            answer = EvalResult(evaluation, microbatch, result, num_samples)
            self._endpoint.post(trainer, answer)
            return 0
        # Behind the last stage of a wrapped path comes the first one.
        following = batch.request.path[(self._compute.stage + 1) % len(batch.request.path)]
        # Whatever was sent before it on the same connection has arrived if this has.
        self._passed_on[trainer] = (evaluation, microbatch, following.peer)
        self._endpoint.introduce(following)
        self._endpoint.post(following.peer, batch.request, (result, *batch.taken[1:]), Traffic.ACTIVATIONS)
        return 0

    def _is_on_path(self, message: EvalForward) -> bool:
        module, path = self._compute.module, message.path
        return len(path) == module.num_stages and path[self._compute.stage].peer == self._endpoint.peer_id

    def _refuse(self, pair: _Pair, reason: str) -> None:
        trainer, evaluation, microbatch = pair
        for is_end in (False, True):
            self._pending.pop((pair, is_end), None)
        self._endpoint.post(trainer, EvalRefused(evaluation, microbatch, reason))


def _is_complete(batch: _Batch, is_end: bool) -> bool:
    return bool(batch.taken) and (batch.labels is not None or not is_end)
