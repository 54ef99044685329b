"""What a launcher and its roles say to each other, one JSON object a line on a control pipe, and how a role ends.

role -> launcher    something that happened, or a request in `RoleAsks`
launcher -> role    `StopRole`, `InitialPeers`, `LeaveTogether`, another's `RoleDoes`, replies in `LauncherReplies`
supervisor          `RoleExited` and what follows it, which travels nowhere
"""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

import msgspec

from shoal.ids import PeerId
from shoal.runtime.role_spec import ExitStatus

Reply = TypeVar("Reply")


class PipeMessage(msgspec.Struct, frozen=True, tag=True):
    """The name of its class is the `type` of its line."""


class RoleReady(PipeMessage, frozen=True):
    """The role serves now."""


class ServerReady(RoleReady, frozen=True):
    stage: int


class MonitorReady(RoleReady, frozen=True):
    maddrs: tuple[str, ...]  # where others can join the DHT through the monitor


class ScoutReady(RoleReady, frozen=True):
    run_id: str  # of the run that it was to find
    configuration: dict[str, Any]  # that all hosts of the run share


class RoleFailed(PipeMessage, frozen=True):
    reason: str
    kind: str = ""  # of error, as `shoal.errors` calls it


class JoinedDht(PipeMessage, frozen=True):
    maddrs: tuple[str, ...]  # of the role


class IdentityIsCopied(PipeMessage, frozen=True):
    by: str  # who has it too, and where
    yields: bool  # whether this role is to take another one


class UserNotice(PipeMessage, frozen=True):
    text: str


class RoleDoes(PipeMessage, frozen=True):
    text: str  # what a data server does before it serves, and how far it is; the launcher tells the client as well


class DialledBack(PipeMessage, frozen=True):
    reason: str  # why the client's host cannot dial this server; empty: it can


class WorkDone(PipeMessage, frozen=True):
    numbers: dict[str, float]  # by name, as in `server.work_report`


class PeerSilent(PipeMessage, frozen=True):
    peer: PeerId
    who: str  # what the user calls it
    silent_s: float


class PeerHeard(PipeMessage, frozen=True):
    peer: PeerId
    who: str


class LastOfStage(PipeMessage, frozen=True):
    stage: int
    round: int  # of what it has learnt
    problem: str  # why nobody takes that; empty: it is being handed over


class ServerMayLeave(PipeMessage, frozen=True):
    stage: int
    round: int
    is_kept: bool  # whether the client has what it has learnt


class RunAnnounced(PipeMessage, frozen=True):
    is_announced: bool  # by a client


class RunConcluded(PipeMessage, frozen=True):
    reason: str
    ended_well: bool


class CostsFound(PipeMessage, frozen=True):
    costs: list[float]  # of the units, see `server.unit_costs.UnitCosts`
    source: str
    elapsed_s: float
    warnings: list[str]
    is_tied: bool
    weights: list[str] | None = None  # what `model.weights` is to be; None: it is known, or there are none


class StatusChanged(PipeMessage, frozen=True):
    values: dict[str, float]  # by name, as in `monitor.status.Status`
    at_s: dict[str, float]  # when each came, in monotonic time


LEAVING_EVERY_S = 0.25


class RoleLeaving(PipeMessage, frozen=True):
    """A client that fetches the model, or a mirror that writes a checkpoint, is still at it; said again and again."""


class RunUnwanted(PipeMessage, frozen=True):
    """A user has told the client that the run is to end."""


class RunSummary(PipeMessage, frozen=True):
    values: dict[str, Any]  # of `summary.json`


class LauncherRequest(PipeMessage, Generic[Reply], frozen=True):
    """Answered by a `Reply`."""


class Launcher(Protocol):
    """Who starts processes for the client; `runtime.control_pipe.RoleControl` asks the one of this host."""

    async def request(self, asked: LauncherRequest[Reply]) -> Reply:
        """Ask for something.

        Raises:
            ConnectionLost: the launcher is gone.
        """
        ...


class LauncherAnswer(PipeMessage, frozen=True):
    error: str = ""  # why it was not done


class StartDataServer(LauncherRequest[LauncherAnswer], frozen=True):
    """Answered when it serves."""


class ReplaceDataServer(LauncherRequest[LauncherAnswer], frozen=True):
    """End one that is frozen, so that it is started again."""


class StartTrainer(LauncherRequest[LauncherAnswer], frozen=True):
    slot: int
    generation: int


class LostProcess(msgspec.Struct, frozen=True):
    role: str
    at_s: float  # monotonic, which all processes of a host share
    index: int = 0  # a trainer's is its slot
    peer: PeerId | None = None  # of a server


class Adoption(PipeMessage, frozen=True):
    generations: dict[int, int]  # of the last trainer of each slot, also of one that could not be started
    running: list[int]  # slots whose trainer has not ended
    lost: list[LostProcess]  # the last ones since the launch, clients as well


class Adopt(LauncherRequest[Adoption], frozen=True):
    """Tell a client that was started again what it has to know of the time without it."""


AnyRequest = StartDataServer | ReplaceDataServer | StartTrainer | Adopt
AnyReply = LauncherAnswer | Adoption


class RoleAsks(PipeMessage, frozen=True):
    id: int
    request: AnyRequest
    generation: int = 0  # which process of the role asks, from 1; its launcher knows


class LauncherReplies(PipeMessage, frozen=True):
    id: int  # of the request
    reply: AnyReply


class StopRole(PipeMessage, frozen=True):
    reason: str  # empty: the user's wish


class InitialPeers(PipeMessage, frozen=True):
    maddrs: tuple[str, ...]  # where the swarm can be joined; a scout tells its launcher as well


class LeaveTogether(PipeMessage, frozen=True):
    peers: tuple[PeerId, ...]  # the servers of this host


class RoleExited(msgspec.Struct, frozen=True):
    status: ExitStatus  # of one process of the role


class RoleRestarting(msgspec.Struct, frozen=True):
    status: ExitStatus  # for which it is started again, after a pause


class RoleRestarted(msgspec.Struct, frozen=True):
    """Its new process exists."""


class RoleGivenUp(msgspec.Struct, frozen=True):
    """It has failed too often."""


FromRole = (
    (RoleReady | ServerReady | MonitorReady | ScoutReady | RoleFailed | JoinedDht | UserNotice | InitialPeers)
    | (DialledBack | WorkDone | PeerSilent | PeerHeard | LastOfStage | ServerMayLeave | RunAnnounced | RunConcluded)
    | (IdentityIsCopied | CostsFound | StatusChanged | RoleLeaving | RunUnwanted | RunSummary | RoleAsks | RoleDoes)
)
ToRole = StopRole | InitialPeers | LeaveTogether | LauncherReplies | RoleDoes
RoleEvent = FromRole | RoleExited | RoleRestarting | RoleRestarted | RoleGivenUp
