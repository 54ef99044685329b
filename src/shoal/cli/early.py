"""What a run starts before anything else: its runtime directory and the fork server.

The fork server takes longest of all to start, because it imports torch and hivemind, and it needs no configuration. So
it starts first, and reading the configuration and importing the launcher's own modules cost no time. Where the run
ends before it has begun (a wrong key, Ctrl-C), both are gone when the context is left.

Ctrl-C is taken from here on, also in a process that a shell has started in the background and lets ignore it, and
remembered: a KeyboardInterrupt can get lost, in a finalizer or in a library that is being imported.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal, Self

import msgspec

from shoal.clock import SystemClock
from shoal.errors import ConfigError, RemoteError
from shoal.model.hf.described import OF_TRANSFORMERS, kind_of
from shoal.runtime.file_limit import raise_file_limit
from shoal.runtime.fork_servers import ForkServers
from shoal.runtime.process_info import process_age_s
from shoal.runtime.run_dir import RunDir, RunNote
from shoal.transport.limits import DEFAULT_LIMITS
from shoal.wire.messages.base import Hop

if TYPE_CHECKING:
    from shoal.config.schema import Config

PRELOAD = (
    "torch",
    # torch imports it, and sympy with it, at the first backward that is given a gradient: 0.2 s and 54 MB a process.
    "torch.fx.experimental.symbolic_shapes",
    "shoal.control.dht",
    # Each DHT node would import these when it reads its first address: 0.1 s a process.
    "hivemind.utils.multiaddr.codecs.cid",
    "hivemind.utils.multiaddr.codecs.ip4",
    "hivemind.utils.multiaddr.codecs.uint16be",
    "shoal.client.service",
    "shoal.control.scout",
    "shoal.data_server.service",
    "shoal.mirror.service",
    "shoal.monitor.service",
    "shoal.server.profiler",
    "shoal.server.service",
    "shoal.trainer.service",
)
"""What the fork server imports once for all roles."""

_FOR_TRANSFORMERS = "shoal.model.hf.preloaded"
_FOR_ADAPTERS = ("peft",)


@dataclass(frozen=True)
class EarlyStart:
    """What runs already when the configuration is read.

    Attributes:
        fork_servers: fork all roles; the first one runs.
    """

    run_dir: RunDir
    fork_servers: ForkServers
    _interrupts: Interrupts = field(repr=False)

    def require_uninterrupted(self) -> None:
        """Leave Ctrl-C to the event loop that starts now.

        Raises:
            KeyboardInterrupt: it was pressed before.
        """
        self._interrupts.give_back()
        self._interrupts.check()

    def preload_for(self, config: Config) -> None:
        """Have what this model needs besides imported once, before the roles that need it are forked."""
        if config.model.family in OF_TRANSFORMERS:
            kind = kind_of(config.model)
            of_model = _FOR_TRANSFORMERS if kind is None else f"{_FOR_TRANSFORMERS}:{kind}"
            self.fork_servers.preload((of_model,) if config.lora is None else (of_model, *_FOR_ADAPTERS))

    def announce(
        self, run_id: str, log_dir: Path, client: Hop | None = None, hosts: Literal["servers", "mirror"] = "servers"
    ) -> None:
        """Let other commands of this user know what runs here.

        Args:
            client: of this host; None: it runs elsewhere.
            hosts: what runs here without a client.

        Raises:
            ConfigError: the runtime directory cannot be written.
        """
        note = RunNote(
            run_id=run_id,
            hosts=hosts,
            launcher_pid=os.getpid(),
            begun_unix_s=SystemClock().unix_s() - process_age_s(os.getpid()),
            log_dir=str(log_dir),
        )
        if client is not None:
            socket = client.addresses[0].removeprefix("unix:")
            note = msgspec.structs.replace(note, hosts="client", client=client.peer, socket=socket)
        self.run_dir.announce(note)

    async def keep_run_dir(self) -> None:
        """Until cancelled, look whether somebody has cleared the runtime directory away, and make it again then."""
        clock = SystemClock()
        while True:
            await clock.sleep_s(DEFAULT_LIMITS.listen_again_s)
            # What keeps it from being made now need not do so the next time; roles say what they miss of it.
            with suppress(ConfigError, OSError):
                self.run_dir.restore()


@contextmanager
def early_start() -> Generator[EarlyStart, None, None]:
    """Start, and leave nothing when the context is left.

    Raises:
        ConfigError: the runtime directory cannot be made.
        RemoteError: the system refuses another process.
    """
    raise_file_limit()
    with Interrupts() as interrupts, RunDir() as run_dir:
        fork_servers = _first(run_dir)
        try:
            yield EarlyStart(run_dir, fork_servers, interrupts)
        finally:
            fork_servers.kill()


def _first(run_dir: RunDir) -> ForkServers:
    try:
        return ForkServers(PRELOAD, run_dir.path)
    except (BlockingIOError, MemoryError) as error:
        raise RemoteError(
            f"the system refuses another process ({error}): end others, or allow this user more (`ulimit -u`)"
        ) from error


def ending_signals() -> tuple[signal.Signals, ...]:
    """Return the signals by which a launcher ends well: also a terminal that goes away, unless the launcher was started
    to outlive it (`nohup`)."""
    outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *(() if outlives else (signal.SIGHUP,)))


class Interrupts:
    """A context that takes SIGINT while it lasts, or until `give_back`; still raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self._seen = False

    def __enter__(self) -> Self:
        signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._seen = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Go no further if Ctrl-C was pressed.

        Raises:
            KeyboardInterrupt: it was.
        """
        if self._seen:
            raise KeyboardInterrupt

    def give_back(self) -> None:
        """Leave the signal to Python, also where a shell has let the process ignore it."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
