"""What joining a swarm takes on a host: the key, identities that last, addresses in and addresses out."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import anyio

from shoal.config import Config
from shoal.config.load import load_with_origins
from shoal.config.named_code import own_family
from shoal.control.maddrs import outward
from shoal.control.peers_file import PEERS_FILE
from shoal.errors import ConfigError
from shoal.identity import Identity, create_swarm_key, load_swarm_key
from shoal.runtime.file_locks import lock
from shoal.runtime.hardware import lasting_machine_name

PEERS_VARIABLE: Final = "INITIAL_PEERS"
_STATE_DIR: Final = Path("~/.config/shoal/identities")
_MAX_LAUNCHERS: Final = 64
_LAN_S: Final = 4.0
_MAX_NAMED: Final = 3
"""Addresses in a line to paste: one that answers is enough."""
USUAL_PREFIX: Final = "sandbox"
"""Of the run that a client starts without a configuration file; a host that says no other name joins that one."""


class LastingIdentities:
    """The key files of a launcher, so that its roles are the same peers after a restart.

    Two launchers at a time never share one: each takes the first folder that nobody has locked. The lock is held until
    `close`, or until the process ends. Each machine has folders of its own, by its name: others may have the same disk,
    which need not tell them of locks, or a copy of it.
    """

    def __init__(self, command: str, root: Path = _STATE_DIR) -> None:
        """Take a folder.

        Args:
            command: "client" or "servers"; names the folder.
            root: holds the folders of all launchers.

        Raises:
            ConfigError: it cannot be made, or too many are taken.
        """
        root = root.expanduser()
        own = f"{command}@{lasting_machine_name()}"
        for number in range(1, _MAX_LAUNCHERS + 1):
            self._folder = root / (own if number == 1 else f"{own}-{number}")
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._lock_fd = lock(self._folder / "lock", waits=False)
            except BlockingIOError:
                continue
            except OSError as error:
                raise ConfigError(
                    f"cannot keep identities in {self._folder}: {error.strerror}; set HOME to a folder of yours that "
                    "can be written"
                ) from error
            return
        raise ConfigError(f"{_MAX_LAUNCHERS} launchers run on this host already; end some of them")

    def identity(self, role: str, index: int) -> Identity:
        """Return the identity of a role, made at its first use.

        Raises:
            IdentityError: its file cannot be read or written, or others may read it.
        """
        return Identity.load_or_create(self._folder / f"{role}_{index}.key")

    def forget(self, role: str, index: int) -> None:
        """Have the role's next identity be a new one; raises OSError if the file of the old one cannot be removed."""
        (self._folder / f"{role}_{index}.key").unlink(missing_ok=True)

    def close(self) -> None:
        """Let the next launcher have the folder."""
        os.close(self._lock_fd)


def load_joining_config(
    config_path: Path | None, flags: Sequence[str], env: Mapping[str, str], other_flags: Sequence[str]
) -> tuple[Config, Mapping[str, str]]:
    """Return the configuration of a host that joins, and what set each key; `INITIAL_PEERS` counts if no flag does.

    Raises:
        ConfigError: as `load_config` does.
    """
    config, origins = load_with_origins(config_path, flags, env, other_flags=other_flags)
    peers = env.get(PEERS_VARIABLE, "").strip()
    if not config.network.initial_peers and peers:
        given = (*flags, f"--network.initial-peers={peers}")
        config, origins = load_with_origins(config_path, given, env, other_flags=other_flags)
    if "experiment_prefix" not in origins:
        config = config.model_copy(update={"experiment_prefix": USUAL_PREFIX})
    return config, origins


def require_membership(config: Config) -> bytes:
    """Return the swarm's key; peers must have been given as well.

    Raises:
        ConfigError: one of them is missing; the message has the lines that help.
    """
    path = config.network.swarm_key_file
    has_key, has_peers = path.expanduser().exists(), bool(config.network.initial_peers)
    if has_key and has_peers:
        return load_swarm_key(path)
    missing = " and ".join(name for name, there in (("swarm key", has_key), ("initial peers", has_peers)) if not there)
    raise ConfigError(
        f"no {missing}: `shoal invite` on a host of the swarm prints one text with both, and `shoal join` takes it. By "
        "hand, start_trainer_client.py prints the addresses and makes the key; on this host, run\n"
        f"  export {PEERS_VARIABLE}=/ip4/<address>/tcp/50000/p2p/<peer id>\n"
        f"  mkdir -p {path.parent} && scp <client host>:{path} {path}"
    )


def found_on_lan(config: Config, origins: Mapping[str, str]) -> Config:
    """Return a configuration with initial peers: without any, those that announce themselves on this network to whoever
    has the key, and the name of their run if none is set."""
    path = config.network.swarm_key_file
    if config.network.initial_peers or not config.network.lan or not path.expanduser().exists():
        return config
    from shoal.control.lan import find_on_lan

    print("no initial peers are given: looking for the swarm on this network", flush=True)
    prefix = config.experiment_prefix if "experiment_prefix" in origins else None
    try:
        found = anyio.run(find_on_lan, load_swarm_key(path), prefix, _LAN_S)
    except OSError:
        found = None  # there is no network on which it could be
    if found is None:
        return config
    network = config.network.model_copy(update={"initial_peers": found.initial_peers})
    return config.model_copy(update={"network": network, "experiment_prefix": found.experiment_prefix})


def load_or_create_swarm_key(path: Path) -> tuple[bytes, bool]:
    """Return the swarm's key, and whether it was made just now because there was none.

    Raises:
        ConfigError: it cannot be read or written.
    """
    if path.expanduser().exists():
        return load_swarm_key(path), False
    return create_swarm_key(path), True


def addresses(maddrs: Sequence[str]) -> str:
    """Return a list of initial peers to read, of which the first ones are named."""
    more = f" and {len(maddrs) - _MAX_NAMED} more addresses" if len(maddrs) > _MAX_NAMED else ""
    return ", ".join(maddrs[:_MAX_NAMED]) + more


def continuation(config: Config, maddrs: Sequence[str]) -> Iterator[str]:
    """Yield the lines by which the user continues a run that has no client any more.

    Args:
        maddrs: addresses at which its roles take part in the DHT.
    """
    command = ["python", "start_trainer_client.py", *_naming(config)]
    command.append(f"--initial-peers={','.join(outward(maddrs)[:_MAX_NAMED])}")
    yield "if its client's host is gone for good, any host with the swarm key continues the run by"
    yield shlex.join(command)


def _naming(config: Config) -> Iterator[str]:
    """Yield the flags without which another host would not find this swarm."""
    if config.experiment_prefix != USUAL_PREFIX:
        yield from ("--experiment-prefix", config.experiment_prefix)
    path = config.network.swarm_key_file
    if path != type(config.network).model_fields["swarm_key_file"].default:
        yield from ("--swarm-key-file", str(path))


def invitation(
    config: Config, maddrs: Sequence[str], log_dir: Path, *, new_key: bool, text: str = "", is_first: bool = True
) -> Iterator[str]:
    """Yield the lines that the user pastes on other hosts.

    Args:
        is_first: and what else is true when a run begins.
        text: by which `shoal join` joins, if it is wanted here; it holds the swarm's key.
    """
    path = config.network.swarm_key_file
    command = ["python", "start_servers.py", "--num-servers", str(config.num_stages), *_naming(config)]
    family = own_family(config)
    if family is not None:
        command += ["--model.family", family]
    if text:
        yield "on every other host, `shoal join` asks for this text, within an hour; who reads it is a member for good"
        yield text
    if is_first and new_key and not text:
        yield f"made a new swarm key, {path}: copy it to the other hosts, over a way that nobody else can read"
    yield f"{'or' if text else 'on every other host'}, with the swarm key in {path}, run"
    yield f"export {PEERS_VARIABLE}={','.join(maddrs)}"
    yield shlex.join(command)
    if family is not None:
        yield f"the code of {family} has to be there too, and `shoal join` takes --model.family {family} as well"
    yield f"any address in {log_dir / PEERS_FILE} does as well: as peers come, theirs are there too"
    if not text:
        yield "or `shoal invite` here prints one text, key and addresses in it, for which `shoal join` there asks"
    if not is_first:
        return
    stages = f"all {config.num_stages} stages" if config.num_stages > 1 else "the one stage"
    wanted = f"{config.servers.num_servers} servers" if config.servers.num_servers else f"servers of {stages}"
    yield f"waiting for {wanted}, however long it takes; Ctrl-C ends"
