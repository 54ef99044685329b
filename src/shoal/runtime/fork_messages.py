"""What the supervisor and its fork server say to each other, in `runtime.frames`.

A `ForkRole` travels with one file descriptor, the role's end of its control pipe, and a `Forked` with another, the
new process's `runtime.process_handle`; descriptors arrive in the order of the frames that they belong to.
"""

from __future__ import annotations

import msgspec

from shoal.runtime.role_spec import RoleSpec

TAG_NAME = "SHOAL_PROCESS_TAG"
"""Environment variable of every process below a supervisor, which has made up its value; it is no secret."""


class Configure(msgspec.Struct, frozen=True, tag=True):
    """What to import before the next fork: the first request, and again when it is known what a run needs besides.

    Attributes:
        preload: see `ForkServerProcess.preload`.
        began_unix_s: from which time this host's roles count on (`SystemClock`), also if the wall clock was set since.
    """

    preload: list[str]
    began_unix_s: float


class ForkRole(msgspec.Struct, frozen=True, tag=True):
    """Fork one role; `number` is that of this launch: a role that is started again gets a new one."""

    number: int
    spec: RoleSpec


class Preloaded(msgspec.Struct, frozen=True, tag=True):
    """All modules of a `Configure` are imported; forks are served from now on."""


class PreloadFailed(msgspec.Struct, frozen=True, tag=True):
    """A module cannot be imported, or one of them has started a thread; the fork server ends."""

    message: str


class Forked(msgspec.Struct, frozen=True, tag=True):
    """The launch runs: its process says so itself, before it does anything else, and sends a handle of itself.

    So whoever has read the stream to its end knows every process that lives, also of a fork server that was killed
    in the middle of a fork.
    """

    number: int
    pid: int


class ForkFailed(msgspec.Struct, frozen=True, tag=True):
    """The system refused another process."""

    number: int
    message: str


class Exited(msgspec.Struct, frozen=True, tag=True):
    """The launch has ended and is about to be reaped: its exit code, or the signal that ended it, negated."""

    number: int
    code: int


Request = Configure | ForkRole
Reply = Preloaded | PreloadFailed | Forked | ForkFailed | Exited
