"""Watches a whole interpreter for anything that is executed although it is no module of an installed program.

In a test's own process: `with executed() as found: ...`. In other ones: this folder on PYTHONPATH, and `AUDIT_FILE` in
the environment. The interpreter then imports this module before anything else, forked processes inherit the hook, and a
file gets a line for each process that is watched and for each thing that was executed there.

An audit hook cannot be taken away again, so in a test's process it only listens when it is asked to.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

FILE_VARIABLE = "AUDIT_FILE"
EVENTS = {"pickle.find_class", "marshal.load", "marshal.loads", "exec", "compile"}
# These make code of what a program says of its own classes (annotations as texts, methods of a dataclass) and of its
# main module. What comes from elsewhere never gets there.
_DEFINITIONS = ("/typing.py", "/dataclasses.py", "/msgspec/_utils.py", "<frozen runpy>")


def _is_import(frame: FrameType | None) -> bool:
    """Whether a module is being imported: its file is unmarshalled and executed, and may make classes from texts."""
    while frame is not None:
        if "importlib._bootstrap" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _is_definition(frame: FrameType) -> bool:
    return frame.f_code.co_filename.endswith(_DEFINITIONS)


def _story(event: str, frame: FrameType | None) -> str:
    places: list[str] = []
    while frame is not None and len(places) < 6:
        places.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    return f"executed {event} in {os.getpid()}: {' < '.join(places)}"


def watch(tell: Callable[[str], None], *, with_pids: bool = False) -> None:
    """Tell of all that is executed from now on, until the process ends; `with_pids` also of each process watched."""
    watched = set[int]()

    def hook(event: str, _arguments: object) -> None:
        if with_pids and os.getpid() not in watched:
            watched.add(os.getpid())
            tell(f"watched {os.getpid()}")
        if event in EVENTS:
            frame = sys._getframe().f_back
            # An interpreter runs its own program without any caller.
            if frame is not None and frame.f_back is not None and not _is_import(frame) and not _is_definition(frame):
                tell(_story(event, frame))

    sys.addaudithook(hook)


_listeners: list[list[str]] = []
_is_watching = False


@contextmanager
def executed() -> Generator[list[str]]:
    """Give a list to which everything is added that is executed inside."""
    global _is_watching
    if not _is_watching:
        _is_watching = True
        watch(lambda text: [found.append(text) for found in _listeners] and None)
    found = list[str]()
    _listeners.append(found)
    try:
        yield found
    finally:
        _listeners.remove(found)


def _write(text: str) -> None:
    # Opened anew for each line: a role closes what it has not opened itself.
    file = os.open(os.environ[FILE_VARIABLE], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(file, f"{text}\n".encode())
    finally:
        os.close(file)


if FILE_VARIABLE in os.environ:
    watch(_write, with_pids=True)
