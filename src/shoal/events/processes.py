"""Processes of one host: the fork server, roles, their control pipes and threads."""

from __future__ import annotations

from logging import CRITICAL, ERROR, WARNING

from shoal.events.base import Event
from shoal.ids import PeerId


class ForkServerReady(Event, frozen=True, tag="fork_server.ready"):
    """Roles can be forked; the time counts from the launch."""

    after_s: float


class ForkServerPreloaded(Event, frozen=True, tag="fork_server.preloaded"):
    """The fork server has imported its modules."""

    pid: int


class ForkServerEnded(Event, frozen=True, tag="fork_server.ended"):
    """The fork server has ended; the launcher has adopted the roles that it had forked."""

    level = WARNING
    pid: int
    reason: str
    adopted: int


class ForkServerRestarted(Event, frozen=True, tag="fork_server.restarted"):
    """Another fork server has been started in place of one that had ended."""

    why = "it was killed, as by a system that is short of memory, or did not answer"
    says = "the fork server has ended ({reason}); it is started again, roles go on"
    pid: int
    reason: str


class ForkServerLost(Event, frozen=True, tag="fork_server.lost"):
    """No fork server can be started any more, so that the run ends."""

    level = ERROR
    reason: str


class ForkServerKilled(Event, frozen=True, tag="fork_server.killed"):
    """The fork server did not end everything below it in time, and was killed."""

    level = ERROR
    reason: str
    timeout_s: float


class RoleStarted(Event, frozen=True, tag="role.started"):
    """A process of a role has been forked."""

    role: str
    pid: int


class RoleProcessEnded(Event, frozen=True, tag="role.exited"):
    """A process of a role has ended; a WARNING where it has failed."""

    role: str
    pid: int
    status: str


class RoleIsRestarting(Event, frozen=True, tag="role.restarting"):
    """A role has ended, and its launcher starts it again after a pause."""

    says = "{role} has ended ({status}); it is started again"
    role: str
    status: str


class RoleLost(Event, frozen=True, tag="role.lost"):
    """A role of this host has ended, and its launcher does not start it again."""

    level = WARNING
    why = "it was killed, or has failed too often: its log in the run's folder says more"
    role: str
    status: str
    reason: str

    def say(self) -> str:
        onwards = "the swarm goes on without it"
        if self.role.startswith("trainer"):
            onwards = "its client replaces it, unless it was lost too often"
        elif self.role.startswith("server"):
            # Whether the swarm goes on depends on who else serves its stage.
            onwards = "it is not started again"
        return f"{self.role} has ended ({self.reason}); {onwards}"


class RoleRestartFailed(Event, frozen=True, tag="role.restart_failed"):
    """A role that has ended could not be started again."""

    level = ERROR
    role: str
    reason: str


class RoleEndedByError(Event, frozen=True, tag="role.failed"):
    """This role ends with an error that it names."""

    level = ERROR
    kind: str
    reason: str


class RoleCrashed(Event, frozen=True, tag="role.crashed"):
    """This role ends with an error that nobody expects, which is a bug; the traceback follows."""

    level = CRITICAL


class SupervisorKilling(Event, frozen=True, tag="supervisor.killing"):
    """These roles have not left in time, and are killed."""

    level = WARNING
    roles: list[str]
    grace_s: float


class ControlPipeGarbled(Event, frozen=True, tag="control_pipe.garbled"):
    """What came through a control pipe is no message; the pipe is closed."""

    level = ERROR
    reason: str
    line: str


class ControlPipeLineTooLong(Event, frozen=True, tag="control_pipe.line_too_long"):
    """A line of a control pipe is too long for a message; the pipe is closed."""

    level = ERROR
    size_bytes: int


class DeviceThreadFailedAfterCancel(Event, frozen=True, tag="device_thread.failed_after_cancel"):
    """A computation has failed after its caller was cancelled; the traceback follows."""

    level = ERROR


class EmulatedDeath(Event, frozen=True, tag="emulation.death"):
    """This process kills itself at a point where the configuration orders it (`emulation.deaths`)."""

    level = WARNING
    point: str
    ordered: int
    number: int


class ProcessFailed(Event, frozen=True, tag="process.failed"):
    """A role of a swarm in one process, as tests have it, has ended with an error."""

    level = WARNING
    peer: PeerId
    reason: str
