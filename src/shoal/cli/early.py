"""What a run starts before anything else: its runtime directory and the fork server.

The fork server takes longest of all to start, because it imports torch and hivemind, and it needs no configuration. So
it starts first, and reading the configuration and importing the launcher's own modules cost no time. Where the run
ends before it has begun (a wrong key, Ctrl-C), both are gone when the context is left.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from shoal.cli.interrupts import Interrupts
from shoal.runtime.file_limit import raise_file_limit
from shoal.runtime.fork_servers import ForkServers
from shoal.runtime.run_dir import RunDir

PRELOAD = (
    "torch",
    # torch imports it, and sympy with it, at the first backward that is given a gradient: 0.2 s and 54 MB a process.
    "torch.fx.experimental.symbolic_shapes",
    "hivemind.dht",
    # Each DHT node would import these when it reads its first address: 0.1 s a process.
    "hivemind.utils.multiaddr.codecs.cid",
    "hivemind.utils.multiaddr.codecs.ip4",
    "hivemind.utils.multiaddr.codecs.uint16be",
    "shoal.client.service",
    "shoal.control.scout",
    "shoal.data_server.service",
    "shoal.monitor.service",
    "shoal.server.profiler",
    "shoal.server.service",
    "shoal.trainer.service",
)
"""What the fork server imports once for all roles."""


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


@contextmanager
def early_start() -> Generator[EarlyStart, None, None]:
    """Start, and leave nothing when the context is left.

    Raises:
        ConfigError: the runtime directory cannot be made.
    """
    raise_file_limit()
    with Interrupts() as interrupts, RunDir() as run_dir:
        fork_servers = ForkServers(PRELOAD, run_dir.path)
        try:
            yield EarlyStart(run_dir, fork_servers, interrupts)
        finally:
            fork_servers.kill()
