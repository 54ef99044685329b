"""What a client is told when it starts."""

from __future__ import annotations

import msgspec

from shoal.config.start import RoleStart
from shoal.wire.messages.base import Hop


class ResumedFrom(msgspec.Struct, frozen=True):
    """A checkpoint of the run.

    Attributes:
        location: As `checkpoint.store.CheckpointStore` takes it.
    """

    location: str
    round: int


class ClientSpec(RoleStart, frozen=True, kw_only=True):
    """Start parameters of a client.

    Attributes:
        launcher_pid: The run begins, for all ages, when this process was started.
        expected_servers: How many servers the launcher starts with the client; the first round waits a while for them.
        succeeds: A client of another host has begun the run.
        patient: Wait for them without a limit, or for one complete pipeline if `expected_servers` is 0.
        resumed: From which checkpoint the run goes on; its files are in `log_dir` (`client.resuming`).
        data_server: Of this host; the client asks the launcher to start it.
    """

    launcher_pid: int
    expected_servers: int
    succeeds: bool = False
    patient: bool = False
    resumed: ResumedFrom | None = None
    data_server: Hop
    monitor: Hop
