"""What a server says about itself while its rounds go on."""

from __future__ import annotations

import math
from dataclasses import dataclass

import anyio
import pytest

from shoal.averaging.member import RoundEvent, RoundSwapped
from shoal.control.records import Record, StageRecord
from shoal.ids import Ballot, PeerId
from shoal.server.announcer import Announcer
from shoal.swarm.round_effects import ReplicaOut
from shoal.wire.messages import round as round_messages

pytestmark = pytest.mark.anyio


@dataclass
class Worker:
    num_committed: int = 0
    num_open: int = 0


class Registry:
    def __init__(self) -> None:
        self.said: list[Record] = []

    def advertise(self, record: Record) -> None:
        self.said.append(record)


def swapped(round: int) -> RoundSwapped:
    ballot = Ballot(1, PeerId("client"), 1)
    record = round_messages.Record("run", round, ballot, "", (), (), (), {})
    return RoundSwapped(record, round_messages.StageHashes("p", "m", "b"))


async def test_each_new_record_is_announced_with_the_steps_of_all_rounds() -> None:
    sender, receiver = anyio.create_memory_object_stream[RoundEvent](math.inf)

    @dataclass
    class Replica:
        worker: Worker
        events: object

    registry, worker = Registry(), Worker()
    announcer = Announcer(registry, StageRecord(("memory:s",), 0.0, stage=1), Replica(worker, receiver))
    assert [(r.serving, r.held_round, r.step) for r in registry.said] == [(True, 0, 0)]
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(announcer.run)
            for round in (1, 2):
                worker.num_committed, worker.num_open = 10 * round, round - 1
                sender.send_nowait(swapped(round))
                sender.send_nowait(ReplicaOut(PeerId("s"), "why not"))
                await anyio.wait_all_tasks_blocked()
            sender.close()
    assert [(r.held_round, r.step, r.load) for r in registry.said[1:]] == [(1, 10, 0.0), (2, 20, 1.0)]
    assert {(r.stage, r.serving) for r in registry.said} == {(1, True)}
