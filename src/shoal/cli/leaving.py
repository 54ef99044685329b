"""A host of servers leaves: each server goes when what it holds is elsewhere; the last ones of a stage hand it over.

Ctrl-C -> every server is told to leave -> it says that it may, and ends -> all have ended: the host leaves
                                       '-> it is the last of its stage: said, and waited for; a second Ctrl-C ends all
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import anyio

from shoal.clock import Clock
from shoal.errors import ConnectionLost
from shoal.events.base import Event, tell
from shoal.events.hosts import HostLeaving, HostStageKept, HostStageUnwanted, HostStateLost
from shoal.ids import PeerId
from shoal.runtime.launcher_messages import LastOfStage, LeaveTogether, ServerMayLeave
from shoal.runtime.role_handle import RoleHandle
from shoal.runtime.waking import Signal

logger = logging.getLogger(__name__)

PATIENCE_S = 30.0
"""So long is somebody waited for who takes what would be lost, and so long may a server be silent."""


@dataclass
class _LeavingServer:
    stage: int | None = None
    round: int = 0
    problem: str = ""
    is_kept: bool = False
    is_done: bool = False


class HostLeaves:
    """The leaving of one host's servers.

    Attributes:
        has_begun: the servers were told to leave.
    """

    def __init__(self, say: Callable[[str], None], clock: Clock, patience_s: float = PATIENCE_S) -> None:
        self.has_begun = False
        self._say = say
        self._clock = clock
        self._patience_s = patience_s
        self._servers: dict[RoleHandle, _LeavingServer] = {}
        self._told: set[str] = set()
        self._changed = Signal()
        self._since_s = 0.0

    async def run(self, servers: Mapping[RoleHandle, PeerId]) -> None:
        """Tell these servers to leave, and return when all have, or when nothing more can be done for their state."""
        self.has_begun = True
        leaving = tuple(servers.values())
        for server in servers:
            if server.serves:
                with suppress(ConnectionLost):
                    server.send(LeaveTogether(leaving))
                    self._servers[server] = _LeavingServer()
        self._since_s = self._clock.now_s()
        while not all(state.is_done for state in self._servers.values()):
            left_s = self._since_s + self._patience_s - self._clock.now_s()
            with anyio.move_on_after(left_s) as timer:
                await self._changed.wait()
            if timer.cancelled_caught:
                self._give_up()
                return

    def take(self, said: LastOfStage | ServerMayLeave, server: RoleHandle) -> None:
        """Take what a server says about its leaving."""
        state = self._servers.get(server)
        if state is None:
            return
        state.stage, state.round = said.stage, said.round
        if isinstance(said, ServerMayLeave):
            state.is_done, state.is_kept = True, said.is_kept
        else:
            state.problem = said.problem
        if not state.problem:
            self._since_s = self._clock.now_s()
        self._tell()
        self._changed.notify()

    def gone(self, server: RoleHandle) -> None:
        """A server has ended, one way or another."""
        if server in self._servers:
            self._servers[server].is_done = True
            self._changed.notify()

    def _tell(self) -> None:
        """Say what is being handed over once all servers have spoken, and how it goes on."""
        states = self._servers.values()
        if any(state.stage is None and not state.is_done for state in states):
            return
        last = [state for state in states if state.is_kept or (state.stage is not None and not state.is_done)]
        handed_over = [state for state in last if not state.problem]
        if handed_over:
            self._once(HostLeaving(_stages(handed_over), max(state.round for state in handed_over)), key="last")
        for state in last:
            if state.stage is None:
                continue
            if state.is_kept:
                self._once(HostStageKept(state.stage, state.round), key=f"kept {state.stage}")
            elif state.problem:
                unwanted = HostStageUnwanted(state.stage, state.problem, self._patience_s)
                self._once(unwanted, key=f"problem {state.stage} {state.problem}")

    def _once(self, event: Event, key: str) -> None:
        if key not in self._told:
            self._told.add(key)
            tell(logger, event, self._say)

    def _give_up(self) -> None:
        lost = [state for state in self._servers.values() if not state.is_done and state.stage is not None]
        if lost:
            tell(logger, HostStateLost(_stages(lost)), self._say)


def _stages(states: list[_LeavingServer]) -> tuple[int, ...]:
    return tuple(sorted({state.stage for state in states if state.stage is not None}))
