"""The runs of this user on this host, and what their clients say over their Unix sockets: without a key.

`run.json` in the locked directory of a run says who its client is; the mode of directory and socket decides who may
ask. Neither torch nor hivemind is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from shoal.cli.asking import Answer, ask
from shoal.clock import Clock, Deadline
from shoal.errors import ConfigError
from shoal.identity import Identity
from shoal.ids import RunId
from shoal.runtime.fork_servers import tag_of
from shoal.runtime.process_control import end_tagged
from shoal.runtime.run_dir import FoundDir, RunNote, found_dirs
from shoal.transport.unix import open_unix_endpoint
from shoal.wire.messages import Message
from shoal.wire.messages.base import Hop

_AGAIN_S = 0.1


def living_runs() -> list[RunNote]:
    """Return the notes of what lives on this host, the longest first: one of each launcher.

    Raises:
        ConfigError: a runtime directory belongs to another user.
    """
    notes = [each.note for each in found_dirs() if each.is_alive and each.note is not None]
    return sorted(notes, key=lambda note: (note.begun_unix_s, note.run_id))


def dead_dirs() -> list[FoundDir]:
    """Return what dead runs have left; raises as `living_runs`."""
    return [each for each in found_dirs() if not each.is_alive]


def end_leftovers() -> None:
    """End what still runs of launchers that are dead, which is on its way to its own end: it might yet write.

    Raises:
        ConfigError: a runtime directory belongs to another user.
    """
    for dead in dead_dirs():
        end_tagged(tag_of(dead.path))


def choose(wanted: str, runs: Iterable[RunNote]) -> RunNote | None:
    """Return the run that is meant; None if there is none of that name, or no run at all.

    Args:
        wanted: its name, how it begins, or its folder; empty: the only one.

    Raises:
        ConfigError: it may be one of several.
    """
    # Where a run has its client and servers on one host, the client has the say.
    notes = sorted(runs, key=lambda note: note.hosts == "client")
    named = {note.run_id: note for note in notes}
    if wanted in named:
        return named[wanted]
    if wanted and (folder := Path(wanted)).is_dir():
        # `logs/sandbox` is a link to the newest run of that name.
        return next((note for note in reversed(notes) if Path(note.log_dir) == folder.resolve()), None)
    found = [note for run_id, note in named.items() if run_id.startswith(wanted)]
    if len(found) > 1:
        raise ConfigError(f"say which run, there are {', '.join(sorted(note.run_id for note in found))}")
    return found[0] if found else None


def nothing_here(wanted: str, runs: Iterable[RunNote]) -> str:
    """Return what to say where there is no run of this name (empty: none at all) among those that live here."""
    told = f"no run {wanted} of yours lives on this host" if wanted else "no run of yours lives on this host"
    names = ", ".join(dict.fromkeys(note.run_id for note in runs))
    others = f" (but {names})" if names else ""
    return f"{told}{others}: `shoal ps` lists them; for one of other hosts give --initial-peers"


async def ask_here(
    note: RunNote, question: Message, kind: type[Answer], within_s: float, clock: Clock
) -> tuple[Answer | None, str]:
    """Return what the client of a run of this host answers, or why it says nothing.

    One that is just being started, or started again, does not listen yet: it is dialled again.
    """
    deadline = Deadline.after(clock, within_s)
    answer, problem = None, ""
    while True:
        async with open_unix_endpoint(
            peer_id=Identity.generate().peer_id, run_id=RunId(note.run_id), role="observer", path=None
        ) as endpoint:
            client = Hop(note.client, (f"unix:{note.socket}",))
            answer, problem = await ask(endpoint, client, question, kind, deadline.remaining_s())
        if answer is not None or deadline.remaining_s() <= _AGAIN_S:
            return answer, problem
        await clock.sleep_s(_AGAIN_S)
