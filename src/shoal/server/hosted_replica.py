"""What a server says of the replica that it hosts, to the registry and to its launcher."""

from __future__ import annotations

from typing import Protocol


class HostedWorker(Protocol):
    """The replica's end of the steps; `pipeline.stage_worker.StageWorker` is one."""

    @property
    def num_committed(self) -> int: ...

    @property
    def num_open(self) -> int: ...

    @property
    def cap(self) -> int | None: ...


class HostedMember(Protocol):
    """The replica's end of the rounds; `averaging.member.RoundMember` is one."""

    @property
    def offered_round(self) -> int: ...


class HostedReplica(Protocol):
    """`server.replica.LocalReplica` is one."""

    @property
    def stage(self) -> int: ...

    @property
    def worker(self) -> HostedWorker: ...

    @property
    def member(self) -> HostedMember: ...
