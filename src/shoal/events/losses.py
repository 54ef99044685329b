"""What is lost while a run goes on, and when it is back. Times are monotonic seconds.

`swarm.incidents` joins them, and makes of the sentences (`told`) what people read (`incidents`).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shoal.events.base import Event
from shoal.events.incidents import placed
from shoal.ids import PeerId


class ServerLost(Event, frozen=True, tag="server.lost"):
    """The client has lost its connection with a server: the server's process or host has ended, is frozen or cut off.

    Attributes:
        silent_s: for how long nothing was heard of it; 0 if its end has closed the connection.
        since: time of day at which it was heard last.
        still_s: for how long the client itself stood still before it found that; 0: it did not.
        over: the servers that are left in its stage.
        slots: trainers whose steps ran over it.
    """

    why = "its process or its host has ended, is frozen, or is cut off from this host"
    do = (
        "nothing, if it comes back: its launcher starts a process again that has ended. One that stays frozen is "
        "called shoal:server:N among the processes of its host: `kill -CONT` has it go on, `kill -9` has another one "
        "started"
    )
    peer: PeerId
    who: str
    stage: int
    silent_s: float
    since: str
    over: tuple[str, ...]
    slots: tuple[int, ...]
    at_s: float
    host: str = ""
    still_s: float = 0.0

    def told(self) -> str:
        others = listed(self.over)
        if not self.over:
            onwards = f"nobody else serves stage {self.stage}"
        elif self.slots:
            onwards = f"its work goes on over {others}"
        else:
            onwards = f"no trainer's steps ran over it, {others} {'serve' if len(self.over) > 1 else 'serves'} on"
        return f"{self.who} (stage {self.stage}) {_how(self.silent_s, self.since, self.still_s)}; {onwards}"

    def ways(self) -> tuple[Event, ...]:
        return _ways(self)


class ServerLeaving(Event, frozen=True, tag="server.leaving"):
    """A server has asked whether it may leave: its user wants it to."""

    peer: PeerId
    who: str
    host: str
    stage: int
    at_s: float

    def told(self) -> str:
        return f"{self.who} (stage {self.stage}) leaves: its user wants it to"


class TrainerLost(Event, frozen=True, tag="trainer.lost"):
    """The client has lost its connection with a trainer, and replaces it unless it was lost too often in the round.

    Attributes:
        silent_s, since, still_s: as of a server.
    """

    why = "its process has ended or is frozen"
    slot: int
    silent_s: float
    since: str
    at_s: float
    host: str = ""
    still_s: float = 0.0

    def told(self) -> str:
        who = placed(f"trainer {self.slot}", self.host)
        onwards = "its client replaces it, unless it was lost too often in this round"
        return f"{who} {_how(self.silent_s, self.since, self.still_s)}; {onwards}"

    def ways(self) -> tuple[Event, ...]:
        return _ways(self)


class DataServerLost(Event, frozen=True, tag="data_server.lost"):
    """The client has lost its connection with its data server, which its launcher starts again.

    Attributes:
        silent_s, since, still_s: as of a server.
    """

    slots: tuple[int, ...]
    at_s: float
    silent_s: float = 0.0
    since: str = ""
    host: str = ""
    still_s: float = 0.0

    def told(self) -> str:
        who = placed("the data server", self.host)
        return f"{who} {_how(self.silent_s, self.since, self.still_s)}; it is started again"

    def ways(self) -> tuple[Event, ...]:
        return _ways(self)


class LossFound(Event, frozen=True, tag="loss.found"):
    """A client that was started again hears of a process that has ended meanwhile: often the client itself.

    Attributes:
        kind: the role of the process.
        slots: trainers that needed it.
        found_s: when the client has heard of it.
    """

    kind: str
    who: str
    slots: tuple[int, ...]
    at_s: float
    found_s: float
    peer: PeerId = PeerId("")
    host: str = ""

    def told(self) -> str:
        onwards = "another one takes its place" if self.kind == "trainer" else "it is started again"
        return f"{placed(self.who, self.host)} has ended; {onwards}"


class ClientReplaced(Event, frozen=True, tag="client.replaced"):
    """The client of another host is lost, and this one takes its place.

    Attributes:
        silent_s: for how long it could not be reached, as far as this client knows.
        host: where it was; empty where it is not known.
    """

    peer: PeerId
    who: str
    silent_s: float
    at_s: float
    host: str = ""

    def told(self) -> str:
        return f"{self.who} cannot be reached any more, nor does it announce itself: this client takes its place"


class ServerHeard(Event, frozen=True, tag="server.heard_again"):
    """There is a connection again with a server that was lost.

    Attributes:
        after_s: since it was heard last.
    """

    says = "{who} is heard again after {after_s:.1f} s; it catches up"
    peer: PeerId
    who: str
    after_s: float


class ServerBack(Event, frozen=True, tag="server.back"):
    """A server that was lost holds the newest record again, and takes part.

    Attributes:
        after_s: since it was heard last before it was lost.
    """

    peer: PeerId
    who: str
    stage: int
    after_s: float
    at_s: float

    def say(self) -> str:
        after = f"{self.after_s:.1f} s after it was heard last"
        return f"{self.who} has caught up, {after}: it serves stage {self.stage} again"


class TrainerReady(Event, frozen=True, tag="trainer.ready"):
    """A slot's trainer has said hello."""

    slot: int
    generation: int
    at_s: float


class DataServerBack(Event, frozen=True, tag="data_server.back"):
    """The data server answers again."""

    round: int
    at_s: float


class TrainingGoesOn(Event, frozen=True, tag="training.goes_on"):
    """A trainer has committed its first step after losses that it was hit by.

    Attributes:
        paused_s: its longest time without a step since the first sign of them.
    """

    slot: int
    paused_s: float
    lost: tuple[str, ...]

    def say(self) -> str:
        without = f"{self.paused_s:.1f} s without a step"
        return f"trainer {self.slot} trains again after {without} ({listed(self.lost)} lost)"


def listed(names: Sequence[str]) -> str:
    """Name several in a sentence."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _how(silent_s: float, since: str, still_s: float) -> str:
    if silent_s:
        return f"has said nothing for {silent_s:.1f} s (since {since}), so it is frozen or cut off"
    if still_s:
        return f"has given this client up, which stood still for {still_s:.1f} s"
    return "is gone: its connection has closed"


def _ways(lost: ServerLost | TrainerLost | DataServerLost) -> tuple[Event, ...]:
    """Return that a process is lost by its end, by its silence, and by that of the client."""
    at_once = msgspec.structs.replace(lost, silent_s=0.0)
    return msgspec.structs.replace(at_once, still_s=0.0), lost, at_once
