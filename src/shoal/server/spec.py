"""What a server is told when it starts."""

from __future__ import annotations

from shoal.config.start import RoleStart


class ServerSpec(RoleStart, frozen=True, kw_only=True):
    """Start parameters of a server.

    Attributes:
        stage: None takes the one that needs a server most.
        expected_servers: How many servers start together, including this one; 0: not known.
        device: Torch device, resolved: "cpu", "mps" or "cuda:<i>".
        memory_bytes: Its share of the host's memory when the first server started; 0: not known.
        device_sharers: Servers of this host on the same device, including this one.
        threads: CPU threads that it computes with.
    """

    stage: int | None
    expected_servers: int
    device: str
    memory_bytes: int = 0
    device_sharers: int = 1
    threads: int = 1
