"""A server without a given stage finds one: waits until it sees the others, then follows `swarm.assignment`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import anyio
import msgspec

from shoal.config.sizes import format_bytes
from shoal.control.records import StageRecord
from shoal.control.registry import Registry
from shoal.errors import ConfigError, ControlError
from shoal.events.base import emit
from shoal.events.registry import StageChosen
from shoal.ids import PeerId, StageIndex
from shoal.swarm.assignment import StageNeed, assign
from shoal.swarm.view import Candidate, SwarmView

logger = logging.getLogger(__name__)

SETTLE_S = 1.0
# While fewer servers are seen than are known to start, the wait is longer by this factor.
_MISSING_FACTOR = 3.0


@dataclass(eq=False, repr=False)
class StageChooser:
    """Chooses a stage for one server.

    Attributes:
        registry: is running; announces the record.
        record: of this server, with `stage` None.
        num_servers: how many servers are known to start; the choice waits for no more than these. None: not known.
        settle_s: after this time without a change of servers, no more are expected.
    """

    registry: Registry
    peer: PeerId
    record: StageRecord
    needs: Sequence[StageNeed]
    num_servers: int | None = None
    settle_s: float = SETTLE_S

    async def choose(self) -> StageIndex:
        """Announce this server as a candidate, wait for the others, and announce and return the stage that it takes.

        Raises:
            ControlError: it cannot see itself, so that nobody else can either.
        """
        self.registry.advertise(self.record)
        with self.registry.membership.eager():
            settle_s = self.settle_s * (1.0 if self.num_servers is None else _MISSING_FACTOR)
            await self._settled(settle_s)
        stage = assign(self.registry.membership.view, len(self.needs), self.needs).get(self.peer)
        if stage is None:
            raise ControlError("this server does not see its own record in the registry: start it again")
        emit(logger, StageChosen(stage, self.registry.membership.view.num_servers))
        self.registry.advertise(msgspec.structs.replace(self.record, stage=stage))
        return stage

    def _complete(self, view: SwarmView) -> bool:
        return self.num_servers is not None and view.num_servers >= self.num_servers

    async def _settled(self, settle_s: float) -> None:
        """Return when all that are to start are seen, or when servers and stages have not changed for `settle_s`."""
        seen = _servers(self.registry.membership.view)
        while not (self._is_candidate() and self._complete(self.registry.membership.view)):
            with anyio.move_on_after(settle_s) as timer:
                while _servers(self.registry.membership.view) == seen:
                    await self.registry.membership.changed()
            if timer.cancelled_caught:
                return
            seen = _servers(self.registry.membership.view)

    def _is_candidate(self) -> bool:
        """Whether the view has the announcement of this choice.

        A server that was started again is still known as the replica that it was until that announcement is out.
        """
        return any(candidate.peer == self.peer for candidate in self.registry.membership.view.candidates)


def require_fit(server: Candidate, needs: Sequence[StageNeed], stages: Sequence[int], no_files: str = "") -> None:
    """Check that the server's memory suffices for one of these stages, if only for a sample at a time.

    Args:
        no_files: why nothing may lie in files in place of memory; empty: it may.

    Raises:
        ConfigError: it suffices for none; the message has the sizes and what to do.
    """
    if any(needs[stage].fits_cut(server) for stage in stages):
        return
    sizes = "; ".join(_demand(stage, needs[stage], server) for stage in stages)
    files = f"Nothing may lie in files instead: {no_files}. " if no_files else ""
    none = f"stage {stages[0]} does not fit" if len(stages) == 1 else "no stage fits"
    raise ConfigError(
        f"{none} into the {_amounts(server.free_memory_bytes, server.device_memory_bytes)} that this server may use, "
        f"however small the microbatches: {sizes}. {files}Start fewer servers on this host (--num-servers; they share "
        "its memory), raise servers.max_memory_bytes if it is set, cut the model into more stages "
        "(model_pipeline.stages, at the client), or use a larger machine"
    )


def _demand(stage: int, need: StageNeed, server: Candidate) -> str:
    samples = "sample" if need.min_samples == 1 else "samples"
    files = need.files_of(server)
    amounts = _amounts(*need.of(server, need.min_samples, files=files))
    said = f"stage {stage} needs {amounts} with {need.min_samples} {samples} at a time"
    if files:
        return f"{said}, beside {format_bytes(need.disk_bytes)} in files"
    if server.free_disk_bytes and need.disk_bytes:
        room = format_bytes(server.free_disk_bytes)
        return f"{said}; less with {format_bytes(need.disk_bytes)} in files, for which there is room for {room}"
    return said


def _amounts(host_bytes: int, device_bytes: int) -> str:
    if not device_bytes:
        return format_bytes(host_bytes)
    return f"{format_bytes(device_bytes)} of the GPU with {format_bytes(host_bytes)} of the host"


def _servers(view: SwarmView) -> tuple[object, ...]:
    return (tuple(c.peer for c in view.candidates), tuple((r.peer, r.stage) for r in view.replicas))
