"""Exit codes: the one place that turns an exception into a message and a number."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable

from cyclopts import CycloptsError, MissingArgumentError, UnusedCliTokensError

from shoal.cli.output import discard_stdout, flush_stdout, takes_output, without_controls
from shoal.errors import BootstrapError, ConfigError, InvariantViolation, MachineBusy, ShoalError

DONE = 0
FAILED = 1
USER_ERROR = 2
BUSY = 3
INTERRUPTED = 130
_OF_DISKS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE})
"""What a disk says whoever asks: no bug."""
_NO_HOME = "Could not determine home directory."
"""As `Path.expanduser` says it, of a user whom the system does not know and who has not set HOME."""


def guarded(call: Callable[[], int | None]) -> int:
    """Run `call` and return its exit code; errors that the user can act on become one message without a traceback.

    Args:
        call: returns an exit code, or None for 0.

    Raises:
        InvariantViolation: and whatever else is a bug: its traceback is wanted.
    """
    try:
        code = call()
        flush_stdout()
    except (ConfigError, BootstrapError) as error:
        say_error(str(error))
        return USER_ERROR
    except UnusedCliTokensError as error:
        say_error(f"unexpected argument {' '.join(error.unused_tokens or ())!r}; values follow a flag, see --help")
        return USER_ERROR
    except MissingArgumentError as error:
        say_error(_missing(error))
        return USER_ERROR
    except CycloptsError as error:
        # Its texts are made for a terminal box: one line is enough here.
        say_error(" ".join(str(error).split()))
        return USER_ERROR
    except MachineBusy as error:
        say_error(str(error))
        return BUSY
    except KeyboardInterrupt:
        return INTERRUPTED
    except InvariantViolation:
        raise
    except ShoalError as error:
        say_error(str(error) or type(error).__name__)
        return FAILED
    except BaseExceptionGroup as group:
        if not (said := _of_host(group)):
            raise
        say_error(said)
        return FAILED
    except RuntimeError as error:
        if not (said := _of_host(error)):
            raise
        say_error(said)
        return USER_ERROR
    except OSError as error:
        if said := _of_host(error):
            say_error(said)
            return FAILED
        # What prints is a library at times, which raises what the system has said.
        if takes_output():
            raise
        discard_stdout()
        if isinstance(error, BrokenPipeError):
            return DONE  # a reader that has seen enough (`| head`)
        say_error(f"cannot write to standard output: {error.strerror}")
        return FAILED
    return DONE if code is None else code


def _missing(error: MissingArgumentError) -> str:
    """Say what has to be given: a place without a dash in front by the name that its help has, a flag as it is."""
    argument, command = error.argument, " ".join(("shoal", *(error.command_chain or ())))
    assert argument is not None
    name = argument.name.lstrip("-").upper() if argument.field_info.is_positional else None
    if name is not None and error.keyword is None and not argument.tokens:
        return f"{command}: say {name}, see `{command} --help`"
    return f"{command}: {error.keyword or argument.name} needs a value, see `{command} --help`"


def _of_host(error: BaseException) -> str:
    """Return what to say if an error, or one of a group, is that no more files may be opened, that a disk takes or
    gives nothing, or that this user has no home; else nothing."""
    from shoal.file_thread import hint, remedy, said_by_disk
    from shoal.runtime.role import leaves

    for each in leaves(error):
        if isinstance(each, OSError) and hint(each):
            return f"{each.strerror}{hint(each)}"
        if isinstance(each, RuntimeError) and str(each) == _NO_HOME:
            return "this user has no home directory: set HOME to a folder of yours"
        if isinstance(each, OSError) and each.errno in _OF_DISKS and each.filename is not None:
            return f"{each.filename}: {said_by_disk(each, each.filename)}; {remedy(each, each.filename)}"
    return ""


def say_error(message: str) -> None:
    """Print an error; a second line and those after it are indented under the first."""
    print("shoal: error: " + without_controls(message).replace("\n", "\n              "), file=sys.stderr)
