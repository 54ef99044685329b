"""What a client is told when it starts."""

from __future__ import annotations

from shoal.config.start import RoleStart
from shoal.ids import PeerId
from shoal.wire.messages.base import Hop


class ClientSpec(RoleStart, frozen=True, kw_only=True):
    """Start parameters of a client.

    Attributes:
        launcher_pid: Process whose start time is the run's beginning.
        expected_servers: Servers that are being started with it: the first round waits for them, for a while.
        succeeds: The run was begun by a client of another host.
        own_servers: Those of this host, in the order of their numbers.
        patient: Wait for them, or without a number for one complete pipeline, however long it takes.
        data_server: The data server of this host, which the client asks the launcher to start.
        monitor: Where numbers go.
    """

    launcher_pid: int
    expected_servers: int
    succeeds: bool = False
    patient: bool = False
    own_servers: tuple[PeerId, ...] = ()
    data_server: Hop
    monitor: Hop
