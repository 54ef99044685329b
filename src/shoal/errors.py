"""Every exception of shoal, in one tree that answers two questions: whose fault is it, and may I retry?

    ShoalError
    +-- ConfigError                  the user's input; exit code 2; the message names the key
    |   +-- MisfitError              a model family raises, or gives something else than it says
    |   +-- WeightsMissing           what a run begins from is not on this host, or it is something else
    +-- IdentityError                a peer is not who it should be
    |   +-- HandshakeError
    |   +-- SignatureError
    +-- ProtocolError                bytes that break the protocol
    |   +-- LocalProtocolError       ours: a bug here
    |   +-- RemoteProtocolError      theirs: drop the connection
    |       +-- MemberFault          a member of a group, which it names
    +-- TransportError*
    |   +-- ConnectionLost*
    |   +-- DeadlineExceeded*
    +-- RemoteError                  the peer answered that it failed
    |   +-- ChildDied                a process that works for this one ended before it had answered
    +-- ControlError                 the registry
    |   +-- BootstrapError           no initial peer answered; exit code 2
    |   +-- RecordRejected           a record whose signature, schema or sequence does not hold
    +-- NoPipeline*                  names the stages without a replica
    +-- RoundAborted*
    |   +-- RoundClosed*             replicas take no more steps of the round
    +-- TrainingDiverged             nothing but steps that are not finite
    +-- SampleError                  a sample of the data set cannot be prepared
    |   +-- BadSamples               nor by whoever tries it again
    +-- UnreadableAudio              a clip of audio is left out of the data set, or trains nothing
    +-- StorageError                 a file that the run cannot do without cannot be written
    |   +-- PlaceTaken               another process writes checkpoints to the same folder
    +-- RunFailed                    a run that is observed has ended, or has not recovered
    +-- HostFailed                   a host that is reached by ssh does not do what it is told
    +-- MachineBusy*                 other processes take the cores: nothing can be measured; exit code 3
    +-- StateMismatch                two replicas that should hold the same bytes do not
    +-- Contradiction                logs of a run that do not go together
    +-- InvariantViolation           a bug; never caught below the process

A star marks `Transient` errors: the same call may succeed later or with another peer. They are caught in few named
places, and every retry has a deadline. A message holds the values and the next action.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

MALFORMED: Final = (ValueError, RecursionError)
"""What a decoder of JSON or msgpack raises for bytes from anywhere; the second one if they are nested too deeply.

All errors of msgspec and json are of the first kind, and so is what is no text in UTF-8.
"""


class ShoalError(Exception):
    """Root of the tree; nothing raises it itself."""


@contextmanager
def os_error_as(say: Callable[[OSError], ShoalError]) -> Generator[None]:
    """Inside, an OSError becomes what `say` makes of it."""
    try:
        yield
    except OSError as error:
        raise say(error) from error


class Transient:
    """Mixin of the errors after which the same call may succeed later, or with another peer."""


class UnreadableAudio(ShoalError):
    """A clip of audio that cannot be decoded or trained on; it is left out and counted."""


class ConfigError(ShoalError):
    """The user's input cannot be honoured: the message names the key, the value and what to do. Exit code 2."""


class MisfitError(ConfigError):
    """A model family raises, or gives something else than it says it does, so that no server could train it."""


class WeightsMissing(ConfigError):
    """The weights that a run begins from are not on this host, or they are others."""


class IdentityError(ShoalError):
    """A peer is not who it should be, or a key cannot be used."""


class Offence(enum.StrEnum):
    """Why a connection was refused or closed by this side: what refusals are counted by."""

    SWARM_KEY = "swarm_key"
    TLS = "tls"
    GARBAGE = "garbage"
    VERSION = "version"
    RUN = "run"
    IDENTITY = "identity"
    USER = "user"
    SLOW = "slow"
    CROWDED = "crowded"
    SOCKET = "socket"
    FRAME = "frame"


class HandshakeError(IdentityError):
    """The first exchange on a connection failed: wrong swarm key, wrong peer or wrong protocol version."""

    def __init__(self, message: str, offence: Offence) -> None:
        """Say what happened, and what kind of offence it is."""
        super().__init__(message)
        self.offence = offence


class SignatureError(IdentityError):
    """A signature does not verify under the key that it claims."""


class ProtocolError(ShoalError):
    """Bytes or a message order that the protocol does not allow."""


class LocalProtocolError(ProtocolError):
    """This process was about to break the protocol: a bug here."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol: its connection is closed and nothing it sent is used."""


class MemberFault(RemoteProtocolError):
    """A member of a group has sent what an operation does not have."""

    def __init__(self, message: str, peer: str) -> None:
        super().__init__(message)
        self.peer = peer


class TransportError(Transient, ShoalError):
    """The connection to a peer failed."""


class ConnectionLost(TransportError):
    """An open connection ended: the peer closed it, died, or missed its heartbeats."""


class DeadlineExceeded(TransportError):
    """No answer arrived in time."""


class RemoteError(ShoalError):
    """The peer answered that it could not do what was asked."""


class ChildDied(RemoteError):
    """A process that works for this one has ended before it had answered.

    Attributes:
        code: The exit code; negative: the number of the signal that ended it; None: it hangs at its end.
        lines: The last ones that it has printed, if they were kept.
    """

    def __init__(self, message: str, code: int | None, lines: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.lines = lines


class ControlError(ShoalError):
    """The registry could not be read or written."""


class BootstrapError(ControlError):
    """No initial peer answered in time. Exit code 2, since the addresses are the user's."""


class RecordRejected(ControlError):
    """A record whose signature, schema or sequence number does not hold."""


class NoPipeline(Transient, ShoalError):
    """No complete path exists now: the message names the stages without a replica.

    Attributes:
        refusal: why replicas of a stage refuse the step; empty: they are not there.
        is_model: every replica of the stage does, since the model of the user's own fails.
    """

    def __init__(self, message: str, refusal: str = "", *, is_model: bool = False) -> None:
        super().__init__(message)
        self.refusal = refusal
        self.is_model = is_model


class RoundAborted(Transient, ShoalError):
    """An outer round, or one epoch of it, was given up; nothing was applied."""


class RoundClosed(RoundAborted):
    """Replicas refuse steps because their round is closed; the step that was to be trained is applied nowhere."""


class TrainingDiverged(ShoalError):
    """Loss or gradients have stopped being finite, and every step is skipped: the message names what to change."""


class SampleError(ShoalError):
    """A sample cannot be read or prepared, or whoever prepares it dies of it; the message names it."""


class BadSamples(SampleError):
    """Samples are not what they have to be, or too many cannot be read: whoever reads them again finds the same."""


class StorageError(ShoalError):
    """A file that the run cannot do without cannot be written: the message names it and what to do."""


class PlaceTaken(StorageError):
    """Another process writes checkpoints to the folder at this moment.

    Attributes:
        holder: The process, and its host.
    """

    def __init__(self, location: str, holder: str) -> None:
        self.location = location
        self.holder = holder or "a process that does not say its name"
        super().__init__(f"{self.holder} writes to {location} now: give one of both another --checkpoint-dir")


class RunFailed(ShoalError):
    """A run that is observed from outside has ended too early, has not got over a fault, or has left something."""


class MachineBusy(Transient, ShoalError):
    """Other processes take the machine's cores, so that a measurement would mean nothing. Exit code 3."""


class StateMismatch(ShoalError):
    """Two replicas that should hold the same bytes do not."""


class Contradiction(ShoalError):
    """The logs of a run do not go together: nothing that can have happened has led to them.

    Attributes:
        stage: Of the replica whose log is wrong, or whose log shows the contradiction.
        peer: The same replica's.
    """

    def __init__(self, message: str, round: int, stage: int, peer: str) -> None:
        super().__init__(message)
        self.round = round
        self.stage = stage
        self.peer = peer


class InvariantViolation(ShoalError):
    """A rule that the code itself guarantees does not hold: a bug, never caught below the process."""


class HostFailed(ShoalError):
    """Something did not work on a host that is reached by ssh; the message is one for a person."""
