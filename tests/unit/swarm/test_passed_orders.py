"""Quorums and records in large rings: what the coordinator posts, and what a member makes of what it is passed on."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest
from tests.unit.swarm.test_round_coordinator import unsealed

from shoal.errors import RemoteProtocolError
from shoal.ids import Ballot, PeerId, StepKey
from shoal.swarm.passed_orders import IN_LARGE_RINGS, PassingRule, spread
from shoal.swarm.records import Tip, record_hash, seal
from shoal.swarm.round_coordinator import RoundCoordinatorMachine
from shoal.swarm.round_effects import CloseSteps, CoordinatorEffect, Journal, MemberEffect, RunRing, Send, Swap
from shoal.swarm.round_member import RoundMemberMachine
from shoal.swarm.round_orders import StepsClosed
from shoal.swarm.round_settings import CloseRequest, RoundPhase, RoundSettings
from shoal.wire.frame import HEADER, encode_frame
from shoal.wire.messages.base import Hop, SampleRange
from shoal.wire.messages.round import (
    MAX_ORDER_BYTES,
    Close,
    OrderNamed,
    OrderPassed,
    PrepareRecord,
    Propose,
    Record,
    RecordPrepared,
    StageHashes,
    StageOutcome,
    StaleBallot,
)
from shoal.wire.messages.step import StepEntry

CLIENT, OTHER_CLIENT = PeerId("C"), PeerId("D")
_PEER_CHARACTERS = 52
"""As a peer id has."""


class Swarm:
    """A client and its replicas, in as many rings as there are stages; each trains one step in a round.

    Attributes:
        withheld: Whether a message between two members is lost on its way.
        told: How many bytes the client has posted to each member in this round, `of`: by kind of message.
    """

    def __init__(self, num_stages: int, num_slots: int, rule: PassingRule = IN_LARGE_RINGS) -> None:
        settings = RoundSettings("run", num_stages, "D0", stage_timeout_s=120.0, passing=rule)
        sign: Callable[[Record], object] = lambda record: seal(record, CLIENT, lambda _: bytes(64))  # noqa: E731
        self.coordinator = RoundCoordinatorMachine(CLIENT, 1, settings, sign, unsealed)
        self.stages: dict[PeerId, int] = {}
        self.slots: dict[PeerId, int] = {}
        self.members: dict[PeerId, RoundMemberMachine] = {}
        self.withheld: Callable[[PeerId, PeerId], bool] = lambda _sender, _receiver: False
        self.told, self.of = Counter[PeerId](), Counter[str]()
        self.now_s = 0.0
        self._queue: deque[tuple[PeerId, PeerId, object]] = deque()
        self._in_ring: dict[int, list[tuple[PeerId, Propose]]] = {}
        for slot in range(num_slots):
            for stage in range(num_stages):
                self.join(stage, slot)
        self._do(self.coordinator.lead(0.0))
        self.run()

    def join(self, stage: int, slot: int) -> PeerId:
        """A replica comes."""
        peer = PeerId(f"{stage}.{slot}.".ljust(_PEER_CHARACTERS, "x"))
        hop = Hop(peer, (f"tcp:10.0.{slot // 256}.{slot % 256}:31337",))
        self.stages[peer], self.slots[peer] = stage, slot
        self.members[peer] = RoundMemberMachine(hop, stage, Tip(0, "D0", None), _hashes(0, stage), unsealed)
        self._do(self.coordinator.replicas({each: member.hop for each, member in self.members.items()}, self.now_s))
        return peer

    def ring(self, stage: int) -> list[PeerId]:
        """The members of a stage, in ring order."""
        return [peer for peer, at in self.stages.items() if at == stage]

    def round(self) -> None:
        """Play a round as far as it goes by itself."""
        self.told.clear()
        self.of.clear()
        number = self.coordinator.tip.round + 1
        self._do(self.coordinator.close(CloseRequest(number, self.slots, {}), self.now_s))
        self.run()

    def tick(self, after_s: float) -> None:
        """Let time pass."""
        self.now_s += after_s
        self._do(self.coordinator.tick(self.now_s))
        self.run()

    def run(self) -> None:
        while self._queue:
            sender, receiver, message = self._queue.popleft()
            if receiver == CLIENT:
                self._do(self.coordinator.receive(sender, message, self.now_s))  # type: ignore[arg-type]
            else:
                self._member(receiver, self.members[receiver].receive(sender, message))  # type: ignore[arg-type]

    def _do(self, effects: list[CoordinatorEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                num_bytes = len(memoryview(encode_frame(effect.message).head)[HEADER.size :])
                self.told[effect.peer] += num_bytes
                self.of[type(effect.message).__name__] += num_bytes
                self._queue.append((CLIENT, effect.peer, effect.message))
            elif isinstance(effect, Journal):
                self._do(self.coordinator.journaled(effect.digest))

    def _member(self, peer: PeerId, effects: list[MemberEffect]) -> None:
        member, stage = self.members[peer], self.stages[peer]
        for effect in effects:
            match effect:
                case Send(receiver, message):
                    if receiver == CLIENT or not self.withheld(peer, receiver):
                        self._queue.append((peer, receiver, message))
                case CloseSteps(number):
                    self._member(peer, member.steps_closed(StepsClosed(16, (), (self._step(peer, number),))))
                case RunRing(quorum):
                    ring = self._in_ring.setdefault(stage, [])
                    ring[:] = [*(each for each in ring if each[1].epoch == quorum.epoch), (peer, quorum)]
                    if len(ring) == len(quorum.members):
                        for each, its in self._in_ring.pop(stage):
                            self._member(each, self.members[each].ring_done(its, _hashes(its.round, stage)))
                case Swap(_, hashes):
                    self._member(peer, member.swapped(hashes, {}))
                case _:
                    pass

    def _step(self, peer: PeerId, number: int) -> StepEntry:
        slot, num_stages = self.slots[peer], len(set(self.stages.values()))
        at = 16 * (number * 1000 + slot)
        path = tuple(self.ring(stage)[0] for stage in range(num_stages))
        key = StepKey(slot, 1, number, 0)
        targets = 70_000 + (31 * slot + 7 * number) % 997  # as many as 50 steps have
        return StepEntry(key, path, 0, (SampleRange(0, at, at + 16),), 16, targets, 0.7, 0.1, False)


def _hashes(round: int, stage: int) -> StageHashes:
    names = (f"{kind} {round} {stage}" for kind in "pmb")
    return StageHashes(*(hashlib.sha256(name.encode()).hexdigest() for name in names))


def test_a_client_of_many_replicas_posts_300_bytes_a_replica_and_50_kb_a_stage_in_a_round() -> None:
    num_stages, num_slots = 8, 60
    swarm = Swarm(num_stages, num_slots)
    swarm.round()
    assert swarm.coordinator.tip.round == 1
    swarm.round()
    assert swarm.coordinator.tip.round == 2
    assert swarm.of.total() <= 300 * num_stages * num_slots + 50_000 * num_stages, swarm.of
    by_name = [peer for stage in range(num_stages) for peer in swarm.ring(stage) if swarm.told[peer] < 1000]
    assert len(by_name) == num_stages * (num_slots - IN_LARGE_RINGS.num_first), "three of each ring are told more"
    assert max(swarm.told[peer] for peer in by_name) <= 450, swarm.of


def test_what_most_members_are_told_does_not_grow_with_their_number() -> None:
    told: list[set[int]] = []
    for num_slots in (20, 80):
        swarm = Swarm(2, num_slots)
        swarm.round()
        swarm.round()
        assert swarm.coordinator.tip.round == 2
        told.append({swarm.told[peer] for peer in swarm.ring(0)[1:5]})
    assert told[0] == told[1]


def test_in_small_rings_the_client_tells_each_member_itself() -> None:
    swarm = Swarm(2, IN_LARGE_RINGS.least_members - 1)
    swarm.round()
    assert swarm.coordinator.tip.round == 1
    assert swarm.of.keys() == {"Close", "Propose", "PrepareRecord", "CommitRecord"}


@pytest.mark.parametrize("place", [0, 1, 4, 10])
def test_one_member_that_passes_nothing_on_keeps_it_from_nobody(place: int) -> None:
    swarm = Swarm(1, 30)
    silent = swarm.ring(0)[place]
    swarm.withheld = lambda sender, _: sender == silent
    swarm.round()
    assert swarm.coordinator.tip.round == 1


def test_a_quorum_that_has_not_come_to_all_is_told_by_the_client_and_so_is_its_record() -> None:
    swarm = Swarm(1, 30)
    swarm.withheld = lambda _sender, _receiver: True
    swarm.round()
    assert swarm.coordinator.phase is RoundPhase.STAGING
    swarm.tick(121.0)
    assert swarm.coordinator.phase is RoundPhase.PREPARING, "in its next epoch the client tells each member itself"
    swarm.of.clear()
    swarm.tick(0.5)
    swarm.tick(IN_LARGE_RINGS.patience_s - 0.5)
    assert swarm.of == {}, "it may be on its way"
    swarm.tick(0.5)
    assert swarm.coordinator.tip.round == 1
    whole = len(memoryview(encode_frame(_prepared(swarm)).head)[HEADER.size :])
    assert swarm.of["PrepareRecord"] == 27 * whole, "but for the three that have had it"


def _prepared(swarm: Swarm) -> PrepareRecord:
    signed = swarm.coordinator.tip.signed
    assert signed is not None
    return PrepareRecord(swarm.coordinator.ballot, signed)


def test_a_newcomer_is_told_all_of_its_first_quorum_and_passes_on_what_the_others_need() -> None:
    swarm = Swarm(1, 30)
    swarm.round()
    newcomer = swarm.join(0, 30)
    swarm.run()
    assert swarm.members[newcomer].fetching is not None
    signed = swarm.coordinator.tip.signed
    assert signed is not None
    swarm._member(newcomer, swarm.members[newcomer].fetched(record_hash(signed), _hashes(1, 0)))
    swarm.run()
    # What comes to its neighbours on either side can only come through it.
    ring = swarm.ring(0)
    swarm.withheld = lambda sender, receiver: {sender, receiver} == {ring[22], ring[23]}
    swarm.round()
    assert swarm.coordinator.tip.round == 2
    assert len(swarm.members[ring[25]].unseal(swarm.members[ring[25]].tip.signed).stages[0].members) == 31  # type: ignore[arg-type]


# -- one member

ME, BEFORE, AFTER = (Hop(PeerId(name), (f"memory:{name}",)) for name in ("R", "P", "S"))
FIRST, LATER = Ballot(1, CLIENT, 7), Ballot(2, OTHER_CLIENT, 9)
BYTES = StageHashes("p1", "m1", "b1")


def quorum(epoch: int = 0, ballot: Ballot = FIRST) -> Propose:
    return Propose(ballot, 1, epoch, 0, (BEFORE, ME, AFTER), (1, 2, 3))


def record(*, is_kept: bool = False) -> PrepareRecord:
    outcome = StageOutcome(0, 0, (BEFORE.peer, ME.peer, AFTER.peer), (1, 2, 3), BYTES, 0)
    body = Record("run", 1, FIRST, "D0", (outcome,), (), (), {}, keep=is_kept)
    return PrepareRecord(FIRST, seal(body, CLIENT, lambda _: b""))


def passed(order: Propose | PrepareRecord) -> OrderPassed:
    return OrderPassed(msgspec.msgpack.encode(order))


def named(order: Propose | PrepareRecord, ballot: Ballot = FIRST) -> OrderNamed:
    return OrderNamed(ballot, hashlib.sha256(msgspec.msgpack.encode(order)).digest())


@pytest.fixture
def member() -> RoundMemberMachine:
    machine = RoundMemberMachine(ME, 0, Tip(0, "D0", None), StageHashes("p0", "m0", "b0"), unsealed)
    machine.receive(CLIENT, Close(FIRST, 1))
    machine.steps_closed(StepsClosed(3, (), ()))
    return machine


def test_what_the_coordinator_has_not_named_is_not_done(member: RoundMemberMachine) -> None:
    assert member.receive(BEFORE.peer, passed(quorum())) == []
    member.receive(CLIENT, named(quorum(1)))
    assert member.receive(BEFORE.peer, passed(quorum(2))) == []
    assert member.quorum is None


@pytest.mark.parametrize("name_first", [True, False])
def test_what_it_has_named_is_done_and_given_to_the_other_neighbour_once(
    member: RoundMemberMachine, name_first: bool
) -> None:
    messages: list[tuple[PeerId, OrderNamed | OrderPassed]] = [
        (CLIENT, named(quorum())),
        (BEFORE.peer, passed(quorum())),
    ]
    effects = [
        e for peer, message in (messages if name_first else messages[::-1]) for e in member.receive(peer, message)
    ]
    assert RunRing(quorum()) in effects
    assert [effect for effect in effects if isinstance(effect, Send)] == [Send(AFTER.peer, passed(quorum()))]
    assert member.receive(CLIENT, named(quorum())) == []
    for epoch in (1, 2, 0):  # it comes from both sides, and takes no place of what waits for its name
        assert member.receive(AFTER.peer, passed(quorum(epoch))) == []
    assert RunRing(quorum(1)) in member.receive(CLIENT, named(quorum(1)))


def test_what_the_coordinator_gives_goes_to_both_neighbours(member: RoundMemberMachine) -> None:
    member.receive(CLIENT, named(quorum()))
    sends = [e for e in member.receive(CLIENT, passed(quorum())) if isinstance(e, Send)]
    assert sends == [Send(peer, passed(quorum())) for peer in (BEFORE.peer, AFTER.peer)]


def test_a_record_is_prepared_for_the_coordinator_whoever_has_passed_it_on(member: RoundMemberMachine) -> None:
    member.receive(CLIENT, quorum())
    member.ring_done(quorum(), BYTES)
    member.receive(CLIENT, named(record()))
    sends = [e for e in member.receive(AFTER.peer, passed(record())) if isinstance(e, Send)]
    reply = RecordPrepared(FIRST, 1, record_hash(record().record))
    assert sends == [Send(CLIENT, reply), Send(BEFORE.peer, passed(record()))]


@pytest.mark.parametrize("is_named", [True, False])
def test_what_was_named_before_another_order_is_late(member: RoundMemberMachine, is_named: bool) -> None:
    member.receive(CLIENT, quorum())
    member.ring_done(quorum(), BYTES)
    member.receive(CLIENT, named(record()))
    later = record(is_kept=True)
    if is_named:
        member.receive(CLIENT, named(later))
        member.receive(BEFORE.peer, passed(later))
    else:
        member.receive(CLIENT, later)
    assert member.receive(AFTER.peer, passed(record())) == []
    assert member.prepared == later.record


def test_what_an_earlier_coordinator_has_named_is_not_done_under_a_later_ballot(member: RoundMemberMachine) -> None:
    member.receive(CLIENT, quorum())
    member.ring_done(quorum(), BYTES)
    member.receive(CLIENT, named(record()))
    member.receive(OTHER_CLIENT, Close(LATER, 1))
    assert member.receive(BEFORE.peer, passed(record())) == []
    assert member.prepared is None
    assert member.receive(CLIENT, named(record())) == [Send(CLIENT, StaleBallot(LATER))]


def test_a_name_under_another_peers_ballot_is_refused(member: RoundMemberMachine) -> None:
    with pytest.raises(RemoteProtocolError, match="ballot"):
        member.receive(BEFORE.peer, named(quorum()))


@pytest.mark.parametrize(
    ("order", "reason"),
    [(b"\xc1", "no order"), (msgspec.msgpack.encode(quorum(ballot=LATER)), "an order of")],
)
def test_a_name_for_what_is_no_order_of_its_coordinator_is_refused(
    member: RoundMemberMachine, order: bytes, reason: str
) -> None:
    member.receive(CLIENT, OrderNamed(FIRST, hashlib.sha256(order).digest()))
    with pytest.raises(RemoteProtocolError, match=reason):
        member.receive(BEFORE.peer, OrderPassed(order))


def test_a_member_holds_two_orders_that_nobody_has_named(member: RoundMemberMachine) -> None:
    for epoch in range(5):
        assert member.receive(BEFORE.peer, passed(quorum(epoch))) == []
    for epoch in (0, 1, 2):
        assert member.receive(CLIENT, named(quorum(epoch))) == []
    assert RunRing(quorum(3)) in member.receive(CLIENT, named(quorum(3)))


def test_those_that_are_told_themselves_are_far_from_each_other() -> None:
    order = quorum()
    for num_members in (16, 17, 125, 250):
        sends = [Send(PeerId(str(number)), order) for number in range(num_members)]
        told = [int(send.peer) for send in spread(sends, FIRST, IN_LARGE_RINGS) if send.message == passed(order)]
        gaps = {later - earlier for earlier, later in pairwise([*told, num_members + told[0]])}
        assert len(told) == 3
        assert max(gaps) - min(gaps) <= 1


def test_what_is_too_long_to_be_passed_on_is_told_by_the_coordinator() -> None:
    signed = msgspec.structs.replace(record().record, body=bytes(MAX_ORDER_BYTES))
    sends = [Send(PeerId(str(number)), PrepareRecord(FIRST, signed)) for number in range(16)]
    assert spread(sends, FIRST, IN_LARGE_RINGS) == sends
