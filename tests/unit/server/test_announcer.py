"""What a server says about itself while its rounds go on."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.control.records import Record, StageRecord
from shoal.server.announcer import Announcer


@dataclass
class Worker:
    num_committed: int = 0
    num_samples: int = 0
    num_open: int = 0
    cap: int | None = None


@dataclass
class Member:
    offered_round: int = 0


@dataclass
class Replica:
    stage: int
    worker: Worker = field(default_factory=Worker)
    member: Member = field(default_factory=Member)


class Registry:
    def __init__(self) -> None:
        self.said: list[Record] = []

    def advertise(self, record: Record) -> None:
        self.said.append(record)


def test_each_new_record_is_announced_with_the_steps_of_all_rounds() -> None:
    registry, replica = Registry(), Replica(1)
    announcer = Announcer(registry, StageRecord(("memory:s",), 7.0, stage=None))
    assert registry.said == []
    for round in (0, 1, 2):
        replica.worker.num_committed, replica.worker.num_open, replica.member.offered_round = 10 * round, round, round
        announcer.announce(replica)
    assert [(r.base_round, r.step, r.load) for r in registry.said] == [(0, 0, 0.0), (1, 10, 1.0), (2, 20, 2.0)]
    assert {(r.stage, r.serving, r.join_unix_s) for r in registry.said} == {(1, True, 7.0)}


def test_a_server_that_moves_says_which_stage_it_loads_and_that_it_does_not_serve_it_yet() -> None:
    registry = Registry()
    announcer = Announcer(registry, StageRecord(("memory:s",), 7.0, stage=None))
    announcer.announce(Replica(0, member=Member(4)))
    announcer.announce(Replica(0, member=Member(4)), serving=False)
    announcer.announce(Replica(1, member=Member(-1)), serving=False)
    announcer.announce(Replica(1, member=Member(5)))
    assert [(r.stage, r.serving, r.base_round) for r in registry.said] == [
        (0, True, 4),
        (0, False, 4),
        (1, False, -1),
        (1, True, 5),
    ]


def test_a_cap_that_memory_has_lowered_is_announced_beside_what_the_user_says() -> None:
    registry, replica = Registry(), Replica(0)
    announcer = Announcer(registry, StageRecord(("memory:s",), 7.0, stage=None, max_microbatch_samples=8))
    for replica.worker.cap in (8, 4):
        announcer.announce(replica)
    assert [(r.max_microbatch_samples, r.cap) for r in registry.said] == [(8, 8), (8, 4)]
