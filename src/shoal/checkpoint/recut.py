"""The state in a checkpoint, cut into other stages: the same tensors by name, in other files.

    checkpoint   [ units 0 1 2 ][ units 3 4 5 ]         one of these is in memory,
    wanted       [ 0 1 ][ 2 3 ][ 4 5 ]                  and one of those that are made of them

Names of tensors do not depend on the cut, so no value is computed: parameters, momentum and buffers go to the stage
that has their name, and so does all that inner optimizers knew, slot by slot: each tensor of it is of one parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from shoal.checkpoint.manifest import stored_layouts
from shoal.checkpoint.model_layout import StageLayout, hashes_of
from shoal.checkpoint.store import StagePart
from shoal.checkpoint.stored import StageVectors, StoredCheckpoint
from shoal.checkpoint.tensor_file import encode_tensors
from shoal.errors import StateMismatch
from shoal.optim.flat import FlatLayout
from shoal.wire.messages.round import StageHashes


class Recut:
    """A checkpoint as other stages have it.

    Args:
        origin: What is cut. Every stage of it that is read is compared with its record.
        layouts: The tensors of each stage that is wanted.

    Raises:
        StateMismatch: The checkpoint is of another model; all tensors that differ are named.
    """

    def __init__(self, origin: StoredCheckpoint, layouts: Sequence[StageLayout]) -> None:
        self._origin = origin
        self._layouts = [stored_layouts(layout) for layout in layouts]
        self._parameters = [frozenset(layout.parameters.names) for layout in layouts]
        before = _shapes(origin.manifest.layouts)
        self._homes = {name: stage for stage, shapes in enumerate(before) for name in shapes}
        there = {name: shape for shapes in before for name, shape in shapes.items()}
        here = {name: shape for shapes in _shapes(layouts) for name, shape in shapes.items()}
        if there != here:
            raise StateMismatch(_difference(there, here))
        self._read: tuple[int, dict[str, Tensor]] = (-1, {})

    def hashes(self) -> list[StageHashes]:
        """What the state of each stage hashes to."""
        found: list[StageHashes] = []
        for stage in range(len(self._layouts)):
            parameters, momentum, floats, integers = self.vectors(stage)
            found.append(hashes_of((parameters, floats, integers), momentum))
        return found

    def parts(self, metadata: Callable[[int], Mapping[str, str]]) -> Iterator[StagePart]:
        """Every stage with all that is kept of it.

        Args:
            metadata: Of the inner states of a slot, see `averaging.inner_exchange.owned_by`.

        Raises:
            StateMismatch, RecordRejected, OSError, StorageError: As `StoredCheckpoint.vectors`.
        """
        for stage in range(len(self._layouts)):
            inner = ((slot, encode_tensors(tensors, metadata(slot))) for slot, tensors in self.inner(stage))
            yield StagePart(stage, self.vectors(stage), inner)

    def vectors(self, stage: int) -> StageVectors:
        """The state of a stage. Raises as `parts` does."""
        layouts = self._layouts[stage]
        vectors = StageVectors(*(torch.empty(layout.numel, dtype=layout.dtype) for layout in layouts))
        views = _by_name(layouts, vectors)
        for name in sorted(views, key=self._homes.__getitem__):
            views[name].copy_(self._tensor(name))
        return vectors

    def inner(self, stage: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Yield what inner optimizers knew of the parameters of a stage, by slot. Raises as `parts` does.

        It has the slots of all stages that had its parameters, and none if nothing was kept of one of these.
        """
        wanted = self._parameters[stage]
        origins = sorted({self._homes[f"parameters/{name}"] for name in wanted})
        kept = [self._origin.manifest.inner_slots(origin) for origin in origins]
        if not all(kept):
            return
        for slot in sorted({slot for slots in kept for slot in slots}):
            found: dict[str, Tensor] = {}
            for origin in origins:
                found |= self._known(origin, slot, wanted)
            yield slot, found

    def _known(self, origin: int, slot: int, wanted: Collection[str]) -> dict[str, Tensor]:
        known = self._origin.inner(origin, slot) or {}
        return {name: tensor for name, tensor in known.items() if name.partition("/")[2] in wanted}

    def _tensor(self, name: str) -> Tensor:
        """A tensor of the checkpoint; the stage that it is of stays in memory until one of another is asked for."""
        home = self._homes[name]
        if self._read[0] != home:
            self._read = (-1, {})  # never two of them
            layouts = stored_layouts(self._origin.manifest.stages[home].layout)
            self._read = home, _by_name(layouts, self._origin.vectors(home))
        return self._read[1][name]


def _by_name(layouts: Sequence[FlatLayout], vectors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Views of the vectors of a stage."""
    pairs = zip(layouts, vectors, strict=True)
    return {name: view for each, vector in pairs for name, view in zip(each.names, each.views(vector), strict=True)}


def _shapes(layouts: Sequence[StageLayout]) -> list[dict[str, str]]:
    """By stage, the type and shape of each tensor that is stored, by name."""
    return [
        {entry.name: f"{entry.dtype} {list(entry.shape)}" for each in stored_layouts(layout) for entry in each.entries}
        for layout in layouts
    ]


def _difference(there: Mapping[str, str], here: Mapping[str, str]) -> str:
    """Momentum has the shapes of the parameters, which are named alone."""
    lines: list[str] = []
    for stored in sorted(there.keys() | here.keys()):
        kind, _, name = stored.partition("/")
        old, new = there.get(stored, "absent"), here.get(stored, "absent")
        if kind != "momentum" and old != new:
            lines.append(f"{name} is {new}, in the checkpoint {old}".replace("torch.", ""))
    return "the model has other tensors than the checkpoint: " + "; ".join(lines)
