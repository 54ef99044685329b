"""What is asked of the process that looks after the units of a host, and what it answers: one JSON each, over ssh."""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec

_YEAR_10000_UNIX_S = 253402300800.0
"""No date says a later time."""


class Unit(msgspec.Struct, frozen=True):
    """Something that is to run on a host until it ends or is told to.

    Attributes:
        name: such as sandbox-servers; the folder of its files has it too.
        argv: what is run, in that folder.
        files: texts that it reads, by their names in the folder.
            All of this is compared: the same unit is not started twice.
        is_lasting: it comes back after a failure, and when the host has restarted.
    """

    name: str
    argv: tuple[str, ...]
    files: dict[str, str] = {}
    is_lasting: bool = False

    def digest(self) -> str:
        """Return what tells it from another one."""
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()


class UnitState(msgspec.Struct, frozen=True):
    """How a unit is.

    Attributes:
        code: of its end; None: it runs, or nobody knows, as after a restart of the host.
        since_unix_s: when it was started, by the host's clock.
        pid: its first process; 0: none.
        said: the last lines of its output, the newest last.
        digest: of the unit that was started; empty: none was.
        has_given_up: it has failed so often that it is not started again by itself.
    """

    name: str
    is_running: bool
    code: int | None
    since_unix_s: Annotated[float, msgspec.Meta(ge=0.0, lt=_YEAR_10000_UNIX_S)]
    pid: int
    said: tuple[str, ...] = ()
    digest: str = ""
    has_given_up: bool = False


class StartUnit(msgspec.Struct, frozen=True, tag="start"):
    """Have this unit run. One that runs and is another is replaced only if `replaces`.

    Attributes:
        by_systemd: as a service of the user's systemd; else as a session of its own.
        this_time: more arguments, at this start alone.
    """

    unit: Unit
    replaces: bool
    by_systemd: bool
    this_time: tuple[str, ...] = ()


class StopUnits(msgspec.Struct, frozen=True, tag="stop"):
    """Interrupt units as Ctrl-C does; again after `patience_s`, and after as long again they are killed."""

    names: tuple[str, ...]
    patience_s: float


class LookAtUnits(msgspec.Struct, frozen=True, tag="look"):
    """Say how units are: those that are named, or else all."""

    names: tuple[str, ...] = ()
    num_lines: int = 1


class AwaitPeers(msgspec.Struct, frozen=True, tag="await_peers"):
    """Wait until a run that this unit has begun says where it can be joined, or the unit has ended."""

    name: str
    within_s: float


class Units(msgspec.Struct, frozen=True):
    """The answer.

    Attributes:
        changed: what was done, in words; empty: nothing, since it was so already.
        differs: a unit runs that is another, and was left alone.
        others: units that run, but not as the file says now; who asks a host finds them.
    """

    units: tuple[UnitState, ...]
    changed: str = ""
    differs: bool = False
    version: str = ""
    others: tuple[UnitState, ...] = ()


Request = StartUnit | StopUnits | LookAtUnits | AwaitPeers
