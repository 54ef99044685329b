"""A launcher: the roles of its host, where the model is cut, how the host joins, leaves and ends."""

from __future__ import annotations

from logging import ERROR, WARNING

from shoal.events.base import Event
from shoal.events.stages import stages_named
from shoal.ids import PeerId


class SwarmOpen(Event, frozen=True, tag="swarm.open"):
    """The swarm can be joined at these addresses."""

    initial_peers: tuple[str, ...]


class SwarmMoved(Event, frozen=True, tag="swarm.moved"):
    """The first peer of the swarm is at other addresses than before; what is announced on the local network says so.

    Its host's network has given it another address, or it was started again.
    """

    says = "other hosts find this one at other addresses now: invitations and lines of before do not lead here any more"
    do = "Join further hosts by the lines that follow; hosts that have joined find the way themselves."
    initial_peers: tuple[str, ...]


class RunEndedByError(Event, frozen=True, tag="run.failed"):
    """The run on this host ends without its result."""

    level = ERROR
    reason: str


class RunInterrupted(Event, frozen=True, tag="run.interrupted"):
    """A signal has asked the run to end."""

    signal: str


class CurvesNotDrawn(Event, frozen=True, tag="curves.not_drawn"):
    """The picture of how the run has learned could not be written, or what it is drawn from not be read."""

    level = WARNING
    do = "make the folder one that can be read and written"
    path: str
    reason: str


class ReportNotWritten(Event, frozen=True, tag="report.not_written"):
    """The page with what the dashboard has shown could not be written, or what it is made of not be read."""

    level = WARNING
    do = "make the folder one that can be read and written; then shoal report"
    path: str
    reason: str


class ModelCut(Event, frozen=True, tag="model.cut"):
    """Which units of the model each stage has."""

    units: list[int]
    stages: int


class ProfilerLost(Event, frozen=True, tag="profiler.lost"):
    """The process that measures the units of the model has ended early."""

    level = WARNING
    why = "it was killed, as by a system that is short of memory"
    says = "the units of the model could not be measured, so its own figures decide the cut ({reason})"
    reason: str


class DataServerKilled(Event, frozen=True, tag="data_server.killed"):
    """The data server is frozen, and is killed at the client's request; it is started again."""

    level = WARNING
    pid: int | None


class ServerJoined(Event, frozen=True, tag="server.joined"):
    """A server of this host takes part in the DHT."""

    says = "{role} has joined; it chooses its stage"
    role: str


class ServerServes(Event, frozen=True, tag="server.serves"):
    """A server of this host serves a stage."""

    says = "{role} serves stage {stage}"
    role: str
    stage: int


class PeerFellSilent(Event, frozen=True, tag="peer.silent"):
    """A peer of this host's servers has said nothing for a while."""

    why = "it is frozen, or the network between it and this host is cut"
    says = "{who} has said nothing for {silent_s:.1f} s: frozen or cut off"
    peer: PeerId
    who: str
    silent_s: float


class PeerHeardAgain(Event, frozen=True, tag="peer.heard"):
    """A peer that was silent to this host's servers speaks again."""

    says = "{who} is heard again after {after_s:.1f} s"
    peer: PeerId
    who: str
    after_s: float


class ServerStopped(Event, frozen=True, tag="server.stopped"):
    """The process of a server of this host stands still, and cannot say so itself."""

    level = WARNING
    why = "it was sent SIGSTOP: by Ctrl-Z in its terminal, by a debugger, or by what saves energy or memory"
    do = "let it go on by `kill -CONT` with its number; one that is killed is started again"
    says = "{role} stands still (process {pid} is stopped): the run does without it; `kill -CONT {pid}` lets it go on"
    role: str
    pid: int


class ServerGoesOn(Event, frozen=True, tag="server.goes_on"):
    """The process of a server of this host that stood still goes on."""

    says = "{role} goes on after it stood still for {after_s:.0f} s"
    role: str
    after_s: float


class DiskFails(Event, frozen=True, tag="disk.fails"):
    """A server of this host cannot write its log, or that of its replica, and trains on."""

    level = WARNING
    why = "the disk is full, or fails"
    says = "{who} cannot write to {where}: {remedy}; it trains on"
    do = "do it soon: else what it logs is lost, and this run cannot be replayed"
    who: str
    where: str
    remedy: str


class DiskTakesAgain(Event, frozen=True, tag="disk.takes"):
    """A server of this host can write to its disk again."""

    says = "{who} can write to its disk again"
    who: str


class ScoutLost(Event, frozen=True, tag="scout.lost"):
    """The scout of this host has ended; another one is started."""

    level = WARNING
    status: str


class ScoutGivenUp(Event, frozen=True, tag="scout.given_up"):
    """The scout of this host has ended too often, and is not started again."""

    level = ERROR
    do = "when the run is over, end this command by Ctrl-C"
    says = (
        "the scout of this host has ended for good ({status}): unless a server here hears the client's last word, "
        "nobody here learns that run {run} is over"
    )
    status: str
    run: str


class ServersInterrupted(Event, frozen=True, tag="servers.interrupted"):
    """A signal has asked the servers of this host to leave."""

    says = "leaving; press Ctrl-C again to end at once"
    signal: str


class ServersFailed(Event, frozen=True, tag="servers.failed"):
    """The servers of this host end with an error."""

    level = ERROR
    reason: str


class HostLeaving(Event, frozen=True, tag="host.leaving"):
    """This host leaves, is the last one with some stages, and hands over what they have learnt."""

    do = "press Ctrl-C again to leave at once"
    stages: tuple[int, ...]
    round: int

    def say(self) -> str:
        return (
            f"this host is the last with {stages_named(self.stages)}: it hands over what they have learnt up to round "
            f"{self.round}, so that it is not lost"
        )


class HostStageKept(Event, frozen=True, tag="host.stage_kept"):
    """The client keeps the state of a stage whose last server leaves."""

    says = "stage {stage} as of round {round} is with the client now"
    stage: int
    round: int


class HostStageUnwanted(Event, frozen=True, tag="host.stage_unwanted"):
    """This host leaves, is the last one with a stage, and can hand its state to nobody."""

    level = WARNING
    do = "start a server of the stage elsewhere, or press Ctrl-C again to leave at once"
    says = (
        "this host is the last with stage {stage}, and nobody takes it ({problem}): what it has learnt is lost if this "
        "host leaves. It waits for one for {patience_s:.0f} s"
    )
    stage: int
    problem: str
    patience_s: float


class HostStateLost(Event, frozen=True, tag="host.state_lost"):
    """This host leaves with state that nobody else has."""

    level = WARNING
    why = "no other server of these stages came, and no client kept their state"
    stages: tuple[int, ...]

    def say(self) -> str:
        return (
            f"leaving: what {stages_named(self.stages)} learnt on this host is lost, unless a server of it comes back"
        )
