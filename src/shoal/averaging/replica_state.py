"""What one replica averages: outer parameters, outer momentum and buffers, their staged successors, and their hashes.

    contribution(weight, total) --ring---> stage(...) -> hashes --record--> swap(hashes)
    brought() ------------------gather--'

A round averages one fragment of the parameters (`optim.fragments`): of the state only this one changes then, and of the
local parameters of a member only this one is replaced. The rest of both waits for its own round.

What a contribution counts is judged before the ring, by the length of its pseudo-gradient (`swarm.contribution_guard`).
Nothing is averaged in place: until the swap, the state of the round before and the local parameters stay as they are,
so a new epoch starts from the same inputs. Everything is kept on the CPU, whatever the device of the module, so that
different hardware cannot end a round with different bits.

Shapes: N elements of the parameters, M of the fragment of a round, F of the floating buffers, I of the integer buffers;
F and I are 0 in what rounds average that leave buffers alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from shoal.averaging.cut_gradient import PIECE_BYTES, Bringing, Brought, bring_in_pieces
from shoal.averaging.gathered import payload_of
from shoal.codec.auto import encoder_in
from shoal.codec.base import Codec, CodecState
from shoal.codec.gathered import GatheredCodec
from shoal.codec.plain import PLAIN
from shoal.config.diloco import OuterOptimConfig
from shoal.errors import LocalProtocolError, StateMismatch
from shoal.optim.flat import FlatLayout, buffers_sha256, tensor_sha256
from shoal.optim.fragments import Fragment
from shoal.optim.merge import Merge, merged
from shoal.optim.norm import all_finite, squared_norm
from shoal.optim.outer import OuterSgd, pseudo_gradient
from shoal.optim.parts import AveragedParts
from shoal.optim.vector_memory import IN_MEMORY, VectorMemory, leave, parts_of
from shoal.quant.lsq import is_step_size
from shoal.wire.messages.round import Payload, StageHashes


class AveragedStage(Protocol):
    """The module and its buffers, on the device thread; `pipeline.StageCompute` is one."""

    base_parameters: Callable[[], Tensor] | None
    base_buffers: Callable[[], tuple[Tensor, Tensor]] | None
    cut: Tensor | None

    @property
    def averaged(self) -> AveragedParts:
        """What rounds replace."""
        ...

    @property
    def residual(self) -> CodecState:
        """What codecs have left out of the pseudo-gradients so far."""
        ...

    @residual.setter
    def residual(self, value: CodecState) -> None: ...

    def forget_moments(self) -> None:
        """Have the inner optimizer begin anew."""
        ...


WHOLE: Final = Fragment()


class Contribution(NamedTuple):
    """A vector for each of the `AveragedParts`: what a member brings to the ring, what the ring has made of it."""

    parameters_M: Tensor
    floats_F: Tensor
    integers_I: Tensor


class OuterState(NamedTuple):
    """The state of one stage that a record names. Its vectors never change: a swap replaces all of them."""

    parameters_N: Tensor
    momentum_N: Tensor
    floats_F: Tensor
    integers_I: Tensor

    @property
    def values(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the parts of a replica that has just taken this state are."""
        return self.parameters_N, self.floats_F, self.integers_I

    def averages_like(self, fragment: Fragment) -> Contribution:
        """Vectors of the sizes and types of a round's averages, with any values."""
        parameters_M = self.parameters_N.new_empty(fragment.size(self.parameters_N.numel()))
        if fragment.has_buffers:
            return Contribution(parameters_M, torch.empty_like(self.floats_F), torch.empty_like(self.integers_I))
        return Contribution(parameters_M, self.floats_F.new_empty(0), self.integers_I.new_empty(0))

    def hashes(self) -> StageHashes:
        """What a record says of it."""
        return StageHashes(
            parameters=tensor_sha256(self.parameters_N),
            momentum=tensor_sha256(self.momentum_N),
            buffers=buffers_sha256(self.floats_F, self.integers_I),
        )


def outer_optimizer(outer: OuterOptimConfig, parameters: FlatLayout) -> OuterSgd:
    """The optimizer of a stage's outer rounds, the same on all who follow it; step sizes are only averaged."""
    averaged = [slice(e.offset, e.offset + e.numel) for e in parameters.entries if is_step_size(e.name)]
    return OuterSgd(outer.sgd_lr, outer.sgd_momentum, outer.sgd_nesterov, tuple(averaged))


def outer_step(
    optimizer: OuterSgd,
    state: OuterState,
    average: Contribution,
    fragment: Fragment = WHOLE,
    memory: VectorMemory = IN_MEMORY,
) -> OuterState:
    """The state that follows from another one and the averages of the round after it, in new buffers.

    Args:
        fragment: Of that round; all else of the parameters and of the momentum stays.
        memory: Where the long ones of the buffers lie.
    """
    own = replace(optimizer, averaged=fragment.places(optimizer.averaged))
    parameters_N, momentum_N = own.stage(
        fragment.take(state.parameters_N), fragment.take(state.momentum_N), average.parameters_M, memory
    )
    if not fragment.is_whole:
        # One after the other: what is put is needed no more.
        parameters_N = fragment.put(parameters_N, memory.copy(state.parameters_N))
        momentum_N = fragment.put(momentum_N, memory.copy(state.momentum_N))
        leave(state.parameters_N, state.momentum_N, parameters_N, momentum_N)
    buffers = average if fragment.has_buffers else state
    return OuterState(parameters_N, momentum_N, buffers.floats_F, buffers.integers_I)


class Foreseen(NamedTuple):
    """An averaged pseudo-gradient (M), and outer parameters and momentum (N each) that follow, with their hashes."""

    average_M: Tensor
    parameters_N: Tensor
    momentum_N: Tensor
    parameters_hash: str
    momentum_hash: str


class _Staged(NamedTuple):
    """A successor of the held state, and what it was made from if that is to be kept."""

    state: OuterState
    average: Contribution | None


class ReplicaState:
    """The outer state of one replica. Every method runs on the device thread.

    Args:
        stage: The local side; its present state becomes D_0.
        optimizer: The same on all replicas.
        codec: How pseudo-gradients travel, the same on all replicas. What it keeps from one round to the next is the
            stage's `residual`: of one life of a replica, and changed by a swap alone.
        resets_inner: Each swap has the inner optimizer begin anew.
        num_fragments: P, the same on all replicas.
        merge: What a swap makes of what was learnt since the cut; None: there are no cuts. The same on all replicas.

    Attributes:
        memory: Where the states of records lie.
        hashes: Of the state of the record that the replica holds.
        base: The state of that record; may be read by any thread.
    """

    def __init__(
        self,
        stage: AveragedStage,
        optimizer: OuterSgd,
        codec: Codec = PLAIN,
        *,
        resets_inner: bool = False,
        num_fragments: int = 1,
        merge: Merge | None = None,
        memory: VectorMemory = IN_MEMORY,
    ) -> None:
        self.memory = memory
        self._stage = stage
        self._merge = merge
        self._encoding: Bringing | None = None
        self._norm_of_cut: float | None = None
        self._codec, self._encoder = codec, encoder_in(codec, "")
        self._num_fragments = num_fragments
        self._resets_inner = resets_inner
        self._brought: Brought | None = None
        self._optimizer = optimizer
        parameters, floats, integers = stage.averaged
        layout = parameters.layout
        parameters_N = parameters.flat(memory.empty(layout.numel, layout.dtype))
        momentum_N = memory.zeros_like(parameters_N)
        self.base = OuterState(parameters_N, momentum_N, floats.flat().cpu(), integers.flat().cpu())
        self._staged: dict[StageHashes, _Staged] = {}
        self._pinned: StageHashes | None = None
        self._forgets = False
        self.hashes = self.base.hashes()
        stage.base_parameters = self.base_parameters
        # What is trained on is the held state, where a swap replaces all of the local one.
        keeps_own = num_fragments > 1 or merge is not None
        stage.base_buffers = self.base_buffers if keeps_own else None
        stage.residual = codec.initial_state(parameters_N.numel())

    def base_parameters(self) -> Tensor:
        """The parameters (N) of the record that the replica holds; not to be changed."""
        return self.base.parameters_N

    def base_buffers(self) -> tuple[Tensor, Tensor]:
        """The floating (F) and the integer (I) buffers of the record that the replica holds; not to be changed."""
        return self.base.floats_F, self.base.integers_I

    def fragment(self, round: int) -> Fragment:
        """What a round averages."""
        return Fragment.of_round(round, self._num_fragments)

    @property
    def ring_bytes(self) -> int:
        """Bytes of a contribution: the most that there are in a round."""
        _, floats_F, integers_I = self.base.values
        num_elements, dtype = self.gradient_kind
        return num_elements * dtype.itemsize + floats_F.nbytes + integers_I.nbytes

    def gradient_size(self, fragment: Fragment) -> int:
        """M, the elements of a pseudo-gradient of this fragment."""
        return fragment.size(self.base.parameters_N.numel())

    @property
    def gradient_kind(self) -> tuple[int, torch.dtype]:
        """Elements and dtype of the longest pseudo-gradient that there is: that of the first fragment."""
        return self.gradient_size(self.fragment(0)), self.base.parameters_N.dtype

    def _measured(self, fragment: Fragment) -> tuple[float, Tensor]:
        """The length of this replica's pseudo-gradient, and the pseudo-gradient (M) in memory of its own.

        The length is NaN or infinite if that is not finite, or anything else of the local parameters or a buffer is
        not. If so, the inner optimizer's moments came to be with these parameters: the next swap forgets them.
        """
        parameters, floats, _ = self._stage.averaged
        self.memory.make_room()
        is_finite = all_finite(floats.tensors if fragment.is_whole else [*floats.tensors, *parameters.tensors])
        gradient_M = self._pseudo_gradient(fragment, self.base.parameters_N.new_empty(self.gradient_size(fragment)))
        norm = math.sqrt(squared_norm(gradient_M).item()) if is_finite else math.nan
        self._forgets = not math.isfinite(norm)
        return norm, gradient_M

    def brought(self, fragment: Fragment = WHOLE) -> tuple[float, Payload | None]:
        """The length of this replica's pseudo-gradient, and what that is encoded as; None if it is not finite, or sums
        are encoded on their way. The length is not finite if that, or anything else that is trained here, is not.

        What is left out here is the residual of the next round only once a swap says that this payload has counted.
        """
        if self._stage.cut is not None:
            return self._brought_by_cut(fragment)
        norm, gradient_M = self._measured(fragment)
        self._brought = None
        if self._encoder.is_elementwise or not math.isfinite(norm):
            return norm, None
        residual = tuple(fragment.take(each_N) for each_N in self._stage.residual)
        try:
            encoded = self._encoder.encode(gradient_M, residual)
        except LocalProtocolError:  # values that are finite, and whose squares or sums are not
            self._forgets = True
            return math.inf, None
        [payload_P] = encoded.tensors
        self._brought = Brought(payload_P, payload_of(payload_P), encoded.state)
        return norm, self._brought.announced

    def encode_some(self, fragment: Fragment = WHOLE) -> bool:
        """Do the next piece of `brought` after the cut; returns whether that has nothing to do any more."""
        cut_N = self._stage.cut
        if cut_N is None or self._norm_of_cut is not None or not isinstance(self._encoder, GatheredCodec):
            return True
        if self._encoding is None:
            self._encoding = bring_in_pieces(
                self._encoder, fragment, self.base.parameters_N, cut_N, self._stage.residual
            )
        try:
            next(self._encoding)
            while cut_N.nbytes <= PIECE_BYTES:
                next(self._encoding)
        except StopIteration as done:
            self._norm_of_cut, self._brought = done.value
            self._encoding = None
            return True
        return False

    def _brought_by_cut(self, fragment: Fragment) -> tuple[float, Payload | None]:
        while not self.encode_some(fragment):
            pass
        norm = math.nan if self._norm_of_cut is None else self._norm_of_cut
        # Buffers are averaged as they are at the join, and what the parameters have become since the cut is kept.
        parameters, floats, _ = self._stage.averaged
        if not all_finite([*floats.tensors, *parameters.tensors]):
            norm = math.nan
        self._forgets = not math.isfinite(norm)
        return norm, None if self._forgets or self._brought is None else self._brought.announced

    @property
    def brought_payload(self) -> Brought | None:
        """What `brought` has encoded in this round; None: nothing yet. May be read by any thread."""
        return self._brought

    @property
    def encoded(self) -> Tensor:
        """The bytes (P) that `brought` has made in this round.

        Raises:
            StateMismatch: It has made none.
        """
        if self._brought is None:
            raise StateMismatch("this replica has encoded no pseudo-gradient in this round")
        return self._brought.payload_P

    def put_encoded(self, into_P: Tensor, announced: Payload | None) -> None:
        """Copy these bytes to where they are gathered.

        Raises:
            StateMismatch: They are not what was announced.
        """
        brought = self._brought
        if brought is None or brought.announced != announced:
            own = None if brought is None else brought.announced
            raise StateMismatch(f"this replica has encoded {own}, the quorum has {announced}")
        into_P.copy_(brought.payload_P)

    def contribution(
        self,
        weight: int,
        total_weight: int,
        gradient_M: Tensor | None = None,
        scale: float = 1.0,
        fragment: Fragment = WHOLE,
    ) -> Contribution:
        """This replica's share in the averages, in buffers of its own.

        Pseudo-gradient and floating buffers are multiplied by weight / total_weight, one rounded product in their
        dtype; without weight they are zeros. Integer buffers take the maximum over the members, whatever their weights.

        Args:
            weight: Targets of this replica since it took part in averaging the fragment.
            total_weight: Of all members; at least 1.
            gradient_M: Is overwritten with the pseudo-gradient. None makes a new vector.
            scale: A second factor on the pseudo-gradient, in an operation of its own; 1: no operation.
        """
        self.memory.make_room()  # also of what was measured
        floats_F, integers_I = self.buffers(weight, total_weight, fragment)
        base_N = self.base.parameters_N
        if gradient_M is None:
            gradient_M = base_N.new_empty(fragment.size(base_N.numel()))
        if weight == 0:
            return Contribution(gradient_M.zero_(), floats_F, integers_I)
        self._pseudo_gradient(fragment, gradient_M).mul_(weight / total_weight)
        if scale != 1.0:
            gradient_M.mul_(scale)
        return Contribution(gradient_M, floats_F, integers_I)

    def _pseudo_gradient(self, fragment: Fragment, out_M: Tensor) -> Tensor:
        """Write it into a vector, which is returned. Of a whole one no copy of the local parameters is made."""
        base_N, parameters = self.base.parameters_N, self._stage.averaged.parameters
        if fragment.is_whole:
            for entry, tensor in zip(parameters.layout.entries, parameters.tensors, strict=True):
                own = slice(entry.offset, entry.offset + entry.numel)
                base, local, out = base_N[own], tensor.detach().cpu().reshape(-1), out_M[own]
                for part in parts_of(base):
                    pseudo_gradient(base[part], local[part], out=out[part])
                    leave(base[part])
        else:
            local_M = fragment.take(parameters.flat().cpu())
            pseudo_gradient(fragment.take(base_N), local_M, out=out_M)
            leave(base_N)
        return out_M

    def buffers(self, weight: int, total_weight: int, fragment: Fragment = WHOLE) -> tuple[Tensor, Tensor]:
        """The buffers of `contribution` alone: floats (F) and integers (I)."""
        if not fragment.has_buffers:
            return self.base.floats_F.new_empty(0), self.base.integers_I.new_empty(0)
        floats, integers = self._stage.averaged.floats, self._stage.averaged.integers
        floats_F = floats.flat().cpu().mul_(weight / total_weight) if weight else torch.zeros_like(self.base.floats_F)
        return floats_F, integers.flat().cpu()

    def foresee(self, average_M: Tensor, fragment: Fragment = WHOLE) -> Foreseen:
        """What `stage` will compute of the parameters if that is their average. Any thread may call this: what it reads
        stays as it is."""
        base = self.base
        state = self.successor(base, Contribution(average_M, base.floats_F, base.integers_I), fragment)
        hashes = tensor_sha256(state.parameters_N), tensor_sha256(state.momentum_N)
        return Foreseen(average_M, state.parameters_N, state.momentum_N, *hashes)

    def stage(
        self,
        average: Contribution | None,
        keep_average: bool = False,
        fragment: Fragment = WHOLE,
        foreseen: Foreseen | None = None,
    ) -> StageHashes:
        """Compute the outer step into new buffers and return their hashes.

        What was staged before is dropped, unless it is pinned.

        Args:
            average: The ring's result; None if no member has trained: the state stays.
            keep_average: `swap` then returns a copy of the averages; the memory of `average` is used again.
            foreseen: What is known of that step.
        """
        if average is None:
            staged, hashes = self.base, self.base.hashes()
        elif foreseen is None:
            staged = self.successor(self.base, average, fragment)
            hashes = staged.hashes()
        else:
            buffers = average if fragment.has_buffers else self.base
            staged = OuterState(foreseen.parameters_N, foreseen.momentum_N, buffers.floats_F, buffers.integers_I)
            digest = buffers_sha256(buffers.floats_F, buffers.integers_I)
            hashes = StageHashes(foreseen.parameters_hash, foreseen.momentum_hash, digest)
        self._staged = {key: kept for key, kept in self._staged.items() if key == self._pinned}
        kept = average if keep_average else None
        if kept is not None:
            kept = kept._replace(parameters_M=self.memory.copy(kept.parameters_M))
        self._staged[hashes] = _Staged(staged, kept)
        return hashes

    def successor(self, state: OuterState, average: Contribution, fragment: Fragment = WHOLE) -> OuterState:
        """See `outer_step`."""
        return outer_step(self._optimizer, state, average, fragment, self.memory)

    def stage_fetched(self, state: OuterState, hashes: StageHashes) -> None:
        """Take what was fetched from other replicas as staged; whoever fetched it has compared it with the hashes."""
        self._staged[hashes] = _Staged(state, None)

    def pin(self, hashes: StageHashes) -> None:
        """Keep the staged bytes with these hashes until a swap, and no longer those that were pinned before."""
        self._pinned = hashes

    def swap(
        self,
        hashes: StageHashes,
        anew: bool = False,
        counted: Payload | None = None,
        fragment: Fragment = WHOLE,
        keeps_rest: bool = False,
        codec: str = "",
    ) -> Contribution | None:
        """Make the staged bytes with these hashes the state, and the local parameters and buffers equal to it.

        If they are those that the replica holds already, only the training on top of them is dropped. See `restore` for
        the inner optimizer.

        Args:
            anew: The inner optimizer begins anew, as in a replica that has just started.
            counted: What of this replica's is in these bytes. If it is what `brought` has encoded, or would, what that
                has left out is the residual from now on.
            fragment: Of the round whose record it is.
            keeps_rest: Only what that round has averaged becomes equal to the state: the replica has had its part in
                it, and what it has learnt of all else counts in later rounds. So does what it has learnt since its cut:
                that is merged (`optim.merge`).
            codec: As what pseudo-gradients of the round after it travel, by its record (`Record.codec`).

        Returns:
            The averages from which the state was computed; None unless `stage` kept them.

        Raises:
            StateMismatch: the hashes are neither staged nor held; nothing has changed.
        """
        staged = self._staged.get(hashes, _Staged(self.base, None) if hashes == self.hashes else None)
        if staged is None:
            raise StateMismatch(f"parameters {hashes.parameters[:16]} are not staged here")
        state, average = staged
        if counted is not None and self._brought is None:
            self.brought(fragment)  # another life of this peer has joined, perhaps with the same steps
        if self._brought is not None and self._brought.announced == counted:
            self._stage.residual = self._residual_after(self._brought, fragment)
        self.base = state
        self.hashes = hashes
        self._encoder = encoder_in(self._codec, codec)
        self._forgets = self._forgets or anew
        # Parameters that are not finite are kept nowhere.
        is_kept = keeps_rest and not self._forgets
        self._take(fragment if is_kept else WHOLE, self._merge if is_kept else None)
        return average

    def _residual_after(self, brought: Brought, fragment: Fragment) -> CodecState:
        """What this replica has left out so far, in all fragments."""
        if fragment.is_whole:
            return brought.residual
        after = tuple(each_N.clone() for each_N in self._stage.residual)
        for each_N, left_M in zip(after, brought.residual, strict=True):
            fragment.put(left_M, each_N)
        return after

    def restore(self) -> None:
        """Make the local parameters and buffers equal to the held state, and forget what is staged.

        Inner optimizer moments and the residual stay local, unless they belong to parameters that are not finite or to
        another chain of records.
        """
        self._take(WHOLE)

    def _take(self, fragment: Fragment, merge: Merge | None = None) -> None:
        """`restore` what of the local state is in a fragment; with `merge` but for what was learnt since the cut."""
        if self._forgets or self._resets_inner:
            self._stage.forget_moments()
        if self._forgets:
            self._stage.residual = self._codec.initial_state(self.base.parameters_N.numel())
            self._forgets = False
        cut_N, self._stage.cut = self._stage.cut, None
        self._brought = self._encoding = self._norm_of_cut = None
        self._staged.clear()
        self._pinned = None
        parameters, floats, integers = self._stage.averaged
        parameters_N = self.base.parameters_N
        is_cut = merge is not None and cut_N is not None
        if is_cut or not fragment.is_whole:
            values_M, parameters_N = fragment.take(parameters_N), parameters.flat().cpu()
            if merge is not None and cut_N is not None:
                values_M = merged(merge, values_M, fragment.take(parameters_N), fragment.take(cut_N))
            fragment.put(values_M, parameters_N)
            leave(self.base.parameters_N)
        parameters.load(parameters_N)
        if fragment.has_buffers:
            floats.load(self.base.floats_F)
            integers.load(self.base.integers_I)

    def check(self) -> None:
        """Compare the held bytes with the hashes that the record gave them.

        Raises:
            StateMismatch: They differ: this machine's memory cannot be trusted.
        """
        found = self.base.hashes()
        if found != self.hashes:
            raise StateMismatch(f"the held state hashes to {found}, the record says {self.hashes}")
