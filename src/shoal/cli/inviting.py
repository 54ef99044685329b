"""`shoal invite` and `shoal join`: one text takes a host into a swarm, with nothing to copy beside it.

key, prefix, addresses of a host --> the text --> a hidden prompt, standard input or a file (never a command line, which
every user of a host can read) --> the key in its file, the swarm remembered --> the flags of `shoal start-servers`
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from getpass import getpass
from pathlib import Path
from typing import Final

import anyio
import msgspec

from shoal.cli.arguments import parse_duration_s
from shoal.cli.known_peers import with_known_peers
from shoal.clock import Clock, utc_iso
from shoal.config import Config
from shoal.control.invitation import MARK, MAX_PEERS, Invitation, read, written
from shoal.control.known_client import known_client
from shoal.control.maddrs import outward
from shoal.control.pairing import VALID_S
from shoal.errors import MALFORMED, ConfigError
from shoal.identity import create_swarm_key, load_swarm_key, swarm_key_fingerprint
from shoal.runtime.durable_files import put_whole

HOUR_S: Final = 3600.0
JOINED_FILE: Final = Path("~/.config/shoal/joined.json")
"""The swarm that this host has joined last."""


class Joined(msgspec.Struct, frozen=True):
    """What is remembered of a swarm, beside its key."""

    experiment_prefix: str
    swarm_key_file: str
    initial_peers: tuple[str, ...]


def print_invitation(
    config: Config, origins: Mapping[str, str], for_: str, clock: Clock, *, by_code: bool = False
) -> int:
    """Print the text for another host, and beside it what it is; return the exit code.

    Args:
        config: gives key file, prefix and initial peers; without peers, those of this host's newest run.
        origins: names the keys that are set.
        for_: how long it may be taken; empty: an hour.
        by_code: print a short code in its place, and wait for who says it.

    Raises:
        ConfigError: there is no key, or nothing says where the swarm is.
    """
    if by_code and for_:
        raise ConfigError("--for and --code: a code is valid for ten minutes; leave one out")
    # By a code it is taken at once: it only has to be valid for as long as the code.
    valid_s = 2 * VALID_S if by_code else HOUR_S
    if for_:
        valid_s = parse_duration_s(for_, "--for")
    config = with_known_peers(config, origins)
    swarm_key = load_swarm_key(config.network.swarm_key_file)
    text = invitation_text(config, swarm_key, config.network.initial_peers, clock, valid_s)
    if by_code:
        from shoal.cli.codes import offer

        return anyio.run(partial(offer, text, on_lan=config.network.lan), backend_options={"use_uvloop": True})
    until = utc_iso(clock.unix_s() + valid_s)
    print(
        f"to the swarm with the key {swarm_key_fingerprint(swarm_key)}, until {until}: on another host, `shoal join` "
        "asks for it.\nIt holds the swarm's key: who reads it is a member for good. Send it over a way that nobody "
        "else can read.",
        file=sys.stderr,
        flush=True,
    )
    print(text, flush=True)
    return 0


def invitation_text(
    config: Config, swarm_key: bytes, maddrs: Sequence[str], clock: Clock, valid_s: float = HOUR_S
) -> str:
    """Return the text by which another host joins the swarm that answers at these addresses."""
    peers, expires_unix_s = outward(maddrs)[:MAX_PEERS], int(clock.unix_s() + valid_s)
    return written(Invitation(config.experiment_prefix, swarm_key, peers, expires_unix_s))


@dataclass(frozen=True)
class Asked:
    """How the invitation is to be had.

    Attributes:
        file: with the text, - for standard input.
        by_code: a code is typed, for an invitation that is offered at an address, or somewhere on the local network.
        on_lan: whether that may be searched.
        again: also if a swarm is remembered. Where nothing is set, and none is, the text is asked for.
    """

    file: Path | None = None
    by_code: bool = False
    at: str | None = None
    again: bool = False
    on_lan: bool = True

    @property
    def is_new(self) -> bool:
        """Whether another swarm is meant than the one that is remembered."""
        return self.again or self.by_code or self.file is not None or self.at is not None

    def text(self) -> str:
        """Return the text of the invitation. Raises ConfigError, or ConnectionLost where nobody offers the code."""
        if self.by_code or self.at is not None:
            from shoal.cli.codes import invitation_for

            search = partial(invitation_for, _typed("code: "), self.at, on_lan=self.on_lan)
            return anyio.run(search, backend_options={"use_uvloop": True})
        if self.file is None and _is_asked():
            with suppress(EOFError):
                return getpass("invitation (what you paste is not shown): ")
            return ""
        if self.file is None or str(self.file) == "-":
            return "" if sys.stdin is None else sys.stdin.read()
        try:
            return self.file.expanduser().read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the invitation in {self.file}: {error}") from error


def _is_asked() -> bool:
    """Whether somebody sits there; standard input may be closed."""
    return sys.stdin is not None and sys.stdin.isatty()


def _typed(prompt: str) -> str:
    if _is_asked():
        print(prompt, end="", flush=True)
    return "" if sys.stdin is None else sys.stdin.readline()


def joining_flags(
    config: Config, origins: Mapping[str, str], asked: Asked, clock: Clock
) -> tuple[list[str], list[str]]:
    """Take an invitation, or the swarm that was joined last; return the flags that say which swarm it is, and initial
    peers.

    Args:
        origins: names the keys that are set: whoever names another key file, or run, means another swarm than the one
            that is remembered.
        asked: says how the invitation is to be had.

    Raises:
        ConfigError: there is no invitation, or none that can be taken; or this host has the key of another swarm.
        ConnectionLost: nobody offers the code.
    """
    path = config.network.swarm_key_file.expanduser().absolute()
    prefix = config.experiment_prefix if "experiment_prefix" in origins else ""
    joined = None if asked.is_new else _remembered(prefix)
    if joined is None and prefix and not asked.is_new and (last := _remembered("")) is not None:
        # Another run of the same client: its key and its addresses are known. If it is elsewhere, the join says so.
        joined = Joined(prefix, last.swarm_key_file, last.initial_peers)
    if joined is not None and not _is_meant(joined, config, origins, path):
        joined = None
    if joined is None:
        invitation = read(asked.text(), clock.unix_s())
        _keep_key(path, invitation.swarm_key)
        joined = Joined(invitation.experiment_prefix, str(path), invitation.initial_peers)
        _remember(joined)
        print(f"the key of the swarm, {swarm_key_fingerprint(invitation.swarm_key)}, is in {path}", flush=True)
    else:
        print(
            f"joining {joined.experiment_prefix} where this host was the last time; if it has moved, or for another "
            "swarm: `shoal join --anew`",
            flush=True,
        )
    swarm_key = load_swarm_key(Path(joined.swarm_key_file))
    known = known_client(swarm_key, joined.experiment_prefix, joined.initial_peers)
    peers = dict.fromkeys((*joined.initial_peers, *(known.initial_peers if known is not None else ())))
    flags = ["--experiment-prefix", joined.experiment_prefix, "--swarm-key-file", joined.swarm_key_file]
    return flags, [",".join(peers)]


def refuse_on_command_line(*arguments: str) -> None:
    """Raises ConfigError: an invitation stands there; it is not repeated."""
    if any(MARK in argument for argument in arguments):
        raise ConfigError(
            "an invitation on a command line can be read by every user of this host, and stays in the shell's history: "
            "give it where `shoal join` asks, or by --invitation FILE; ask for another swarm key if that matters"
        )


def refuse_code_on_command_line(flags: Sequence[str]) -> None:
    """Raises ConfigError: a word stands there that is no value of a flag."""
    before = "--code"
    for word in flags:
        if not word.startswith("-") and (not before.startswith("-") or before == "--code" or "=" in before):
            raise ConfigError(
                f"--code {word}: a code is asked for, and is no argument: leave it out, and type it then. It looks "
                "like 7-482-913, and `shoal invite --code` prints it on a host of the swarm"
            )
        before = word


def _is_meant(joined: Joined, config: Config, origins: Mapping[str, str], path: Path) -> bool:
    if "network.swarm_key_file" in origins and str(path) != joined.swarm_key_file:
        return False
    return "experiment_prefix" not in origins or config.experiment_prefix == joined.experiment_prefix


def _keep_key(path: Path, swarm_key: bytes) -> None:
    if not path.expanduser().exists():
        create_swarm_key(path, swarm_key)
    elif load_swarm_key(path) != swarm_key:
        raise ConfigError(
            f"{path} holds the key of another swarm, and is left alone: name another file with --swarm-key-file, or "
            "move that one away"
        )


def _joined_file(prefix: str) -> Path:
    return JOINED_FILE.with_name(f"joined.{prefix}.json").expanduser() if prefix else JOINED_FILE.expanduser()


def _remembered(prefix: str) -> Joined | None:
    with suppress(OSError, *MALFORMED):  # none was joined, or by another version
        joined = msgspec.json.decode(_joined_file(prefix).read_bytes(), type=Joined)
        if Path(joined.swarm_key_file).expanduser().exists():
            return joined
    return None


def _remember(joined: Joined) -> None:
    path = _joined_file("")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # By its name as well: whoever says which swarm is meant need not have joined it last.
        for each in (_joined_file(joined.experiment_prefix), path):
            put_whole(each, msgspec.json.encode(joined), lasting=False, private=True)
    except OSError as error:
        raise ConfigError(f"cannot remember the swarm in {path}: {error.strerror}") from error
