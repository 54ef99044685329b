"""Rounds of fragments, and of pseudo-gradients that are encoded as a whole, beside plain arithmetic: equal bits.

The cases cover each pair of codec, aggregation, feedback, fragments, number of replicas, and what happens. Every
replica trains in its own way: parameters move at random, and the third slot trains twice as much as the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import msgspec
import pytest
import torch
from tests.alongside import until
from tests.covering import covering
from tests.reference.diloco import Coding, agreed_sum, coded_by, coded_mean, in_fragment
from tests.unit.averaging.conftest import FakeStage, MakeRun, Replica, Run, brought_to
from tests.unit.averaging.test_rounds import finish, on_message
from torch import Tensor

from shoal.averaging import round_average
from shoal.averaging.replica_state import ReplicaState
from shoal.averaging.round_average import RingSettings
from shoal.codec.registry import CodecSettings, codec_of
from shoal.collective.group import Group
from shoal.optim.merge import Merge
from shoal.optim.outer import OuterSgd
from shoal.wire.messages.collective import RingPart
from shoal.wire.messages.round import Payload, StageOutcome

NUM_ELEMENTS = 4100
"""Of one fragment, and of all: a whole chunk and a part of one. Each further fragment has a chunk more."""
LR, MOMENTUM = 0.5, 0.9
OUTER = OuterSgd(LR, MOMENTUM, nesterov=True)

AXES: dict[str, tuple[Any, ...]] = {
    "codec": ("int8", "int4", "int4_e3m0", "2bit", "sparse"),
    "over_senders": (False, True),
    "feedback": (0.0, 0.95, 1.0),
    "fragments": (1, 2, 4),
    "num_replicas": (2, 3),
    "event": ("nothing", "lost", "left out", "newcomer", "idle", "not finite"),
    "overlap": ("none", "carry", "mean"),
}
RING_AXES = {name: AXES[name] for name in ("fragments", "num_replicas", "event")} | {"codec": ("none", "bf16", "fp16")}
CUT_AFTER = 2
"""Commits of a round, where rounds overlap."""
WIRES = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Plain:
    """The stage in plain arithmetic: what all hold, and by name each replica's own parameters, its residual, for each
    fragment the targets that it has trained and that are in no average of that, and, if it was cut in this round, its
    parameters then and those targets."""

    coding: Coding | None
    wire: torch.dtype | None
    fragments: int
    overlap: str
    outer: Tensor
    momentum: Tensor
    local: dict[str, Tensor] = field(default_factory=dict)
    residual: dict[str, Tensor] = field(default_factory=dict)
    since: dict[str, list[int]] = field(default_factory=dict)
    cuts: dict[str, tuple[Tensor, list[int]]] = field(default_factory=dict)

    def train(self, name: str, change: Tensor, targets: int) -> None:
        self.local[name] = self.local.get(name, self.outer) + change
        self.since[name] = [each + targets for each in self.since.get(name, [0] * self.fragments)]

    def cut(self, name: str) -> None:
        self.cuts[name] = (self.local[name], self.since[name])

    def end(self, round: int, members: Sequence[str], broken: Sequence[str] = ()) -> list[int]:
        """Who is broken counts for nothing and forgets its residual, and as who is no member all that it has trained;
        returns what each member weighs."""
        own = in_fragment(len(self.outer), round, self.fragments)
        number, nothing = round % self.fragments, [0] * self.fragments
        now = {name: (self.local.get(name, self.outer), self.since.get(name, nothing)) for name in members}
        taken = now | {name: cut for name, cut in self.cuts.items() if name in members}
        weights = [0 if name in broken else taken[name][1][number] for name in members]
        shares = [weight / sum(weights) for weight in weights]
        deltas = [(self.outer - taken[name][0])[own] for name in members]
        deltas = [delta if share else 0 * self.outer[own] for delta, share in zip(deltas, shares, strict=True)]
        if self.coding is None:
            each = zip(deltas, shares, strict=True)
            average = agreed_sum([delta * share for delta, share in each], self.wire)
        else:
            before = [self.residual.get(name, torch.zeros_like(self.outer)).clone() for name in members]
            average, left = coded_mean(deltas, [residual[own] for residual in before], shares, self.coding)
            for name, residual, values in zip(members, before, left, strict=True):
                residual[own] = values
                self.residual[name] = residual
        self.residual |= {name: torch.zeros_like(self.outer) for name in broken}
        self.momentum[own] = self.momentum[own] * MOMENTUM + average
        self.outer[own] = self.outer[own] - (self.momentum[own] * MOMENTUM + average) * LR
        keeping = set(members) - set(broken)
        self.local = {
            name: torch.where(own, self.merged(name), self.local[name]) for name in keeping & self.local.keys()
        }
        self.since = {name: list(now[name][1]) for name in keeping}
        for name, since in self.since.items():
            since[number] -= taken[name][1][number]
        self.cuts.clear()
        return weights

    def merged(self, name: str) -> Tensor:
        """What becomes of the fragment of a member."""
        if name not in self.cuts:
            return self.outer
        if self.overlap == "mean":
            return (self.outer + self.local[name]) / 2
        return self.outer + (self.local[name] - self.cuts[name][0])


class Scene:
    """One stage of a run beside its plain counterpart."""

    def __init__(self, run: Run, coding: Coding | None, wire: torch.dtype | None = None) -> None:
        self.run = run
        self.noise = torch.Generator().manual_seed(3)
        parameters = run.replicas[0][0].stage.parameters
        overlap = "none" if run.cut_after is None else run.merge.value
        sizes = run.num_fragments, overlap
        self.plain = Plain(coding, wire, *sizes, parameters.clone(), torch.zeros_like(parameters))

    def train(self, without: Sequence[Replica] = (), broken: Sequence[Replica] = ()) -> None:
        for slot, replica in enumerate(self.run.replicas[0]):
            if replica in without:
                self.plain.train(replica.peer, torch.zeros_like(self.plain.outer), 0)
                continue
            cut_after = self.run.cut_after
            if cut_after is None:
                self._train(slot, replica, 0, 2 if slot == 2 else 1)
            elif slot == 2:
                self._train(slot, replica, 0, cut_after - 1)  # it has done too little to be cut
            else:
                self._train(slot, replica, 0, cut_after)
            if replica in broken:
                replica.stage.parameters[7] = float("nan")
            if cut_after is not None and slot != 2:
                self.plain.cut(replica.peer)
                replica.stage.cut = replica.stage.parameters.clone()
                replica.member.cut(replica.steps.round, brought_to(self.run, replica))
                self._train(slot, replica, cut_after, slot + 1)

    def _train(self, slot: int, replica: Replica, first: int, num_steps: int) -> None:
        before = replica.stage.parameters.clone()
        for number in range(first, first + num_steps):
            self.run.commit(slot, 10 * replica.steps.round + number)
        # The commit has moved the parameters as well: both take all of it as one change.
        change = torch.randn(len(before), generator=self.noise) * 0.1
        replica.stage.parameters.copy_(before + change)
        self.plain.train(replica.peer, change, 4 * num_steps)

    def check(self, outcome: StageOutcome, replicas: Sequence[Replica]) -> None:
        for replica in replicas:
            assert replica.member.hashes == outcome.hashes
            assert torch.equal(replica.state.base.parameters_N, self.plain.outer)
            assert torch.equal(replica.state.base.momentum_N, self.plain.momentum)
            local = self.plain.local.get(replica.peer, self.plain.outer)
            assert torch.equal(replica.stage.parameters, local)
            assert torch.equal(local, self.plain.outer) or self.plain.fragments > 1 or self.run.cut_after
            if self.plain.coding is not None and self.plain.coding.feedback:
                [residual] = replica.stage.residual
                assert torch.equal(residual, self.plain.residual.get(replica.peer, torch.zeros_like(residual)))
            else:
                assert replica.stage.residual == ()

    def end(self, round: int, outcome: StageOutcome, broken: Sequence[str] = ()) -> None:
        weights = self.plain.end(round, outcome.members, broken)
        assert outcome.weights == tuple(weights)
        present = [replica for replica in self.run.replicas[0] if replica.peer in outcome.members]
        self.check(outcome, present)
        if self.plain.coding is not None:
            payloads = dict(zip(outcome.members, outcome.payloads, strict=True))
            each = zip(outcome.members, weights, strict=True)
            assert {peer for peer, payload in payloads.items() if payload is not None} == {p for p, w in each if w}


async def check_bits(make_run: MakeRun, ring: RingSettings, scene: Callable[[Run], Scene], **case: Any) -> None:
    """Train both, and compare all that there is after each round; in the second one something happens."""
    fragments, event = case["fragments"], case["event"]
    num_elements = NUM_ELEMENTS + (fragments - 1) * 4096
    options = {"ring": ring, "num_elements": num_elements, "num_fragments": fragments, "chunk_bytes": 4096}
    if (overlap := case.get("overlap", "none")) != "none":
        options |= {"cut_after": CUT_AFTER, "merge": Merge(overlap)}
    async with make_run(1, case["num_replicas"], **options) as run:
        pair = scene(run)
        coordinator = await run.lead()
        for round in range(1, max(4, 2 * fragments + 2) + 1):
            changed = round == 2
            victim = run.replicas[0][-1]
            broken = [victim] if changed and event == "not finite" else []
            pair.train(without=[victim] if changed and event == "idle" else (), broken=broken)
            if changed and event == "lost":
                on_message(run, RingPart, victim.peer, lambda source, _target: run.network.kill(source))
            if changed and event == "left out":
                victim.state.faults = 2
            if changed and event == "newcomer":
                run.add_replica(0)
                coordinator.replicas(run.hops)
            outcome = (await finish(run, coordinator, round)).record.stages[0]
            pair.end(round, outcome, [each.peer for each in broken])
            if changed and event == "lost":
                run.replicas[0].remove(victim)
            await until(lambda wanted=round: all(r.member.base_round == wanted for r in run.replicas[0]))
            pair.check(outcome, run.replicas[0])


@pytest.mark.parametrize(tuple(AXES), covering(AXES), ids=lambda value: str(value))
async def test_rounds_have_the_bits_of_plain_arithmetic(
    make_run: MakeRun,
    codec: str,
    over_senders: bool,
    feedback: float,
    fragments: int,
    num_replicas: int,
    event: str,
    overlap: str,
) -> None:
    ring = RingSettings(1024, codec=codec_of(CodecSettings(codec, feedback)), over_senders=over_senders)
    coding = Coding(coded_by(codec), feedback, over_senders)
    case = {"fragments": fragments, "num_replicas": num_replicas, "event": event, "overlap": overlap}
    await check_bits(make_run, ring, lambda run: Scene(run, coding), **case)


@pytest.mark.parametrize(tuple(RING_AXES), covering(RING_AXES), ids=lambda value: str(value))
async def test_rounds_of_a_ring_have_the_bits_of_plain_arithmetic(
    make_run: MakeRun, fragments: int, num_replicas: int, event: str, codec: str
) -> None:
    ring = RingSettings(1024, codec=codec_of(CodecSettings(codec, 0.0)))
    case = {"fragments": fragments, "num_replicas": num_replicas, "event": event}
    await check_bits(make_run, ring, lambda run: Scene(run, None, WIRES[codec]), **case)


@pytest.mark.parametrize("codec", ["none", "int8", "sparse"])
async def test_a_round_whose_fragment_has_no_parameters_averages_the_buffers_alone(
    make_run: MakeRun, codec: str
) -> None:
    ring = RingSettings(1024, codec=codec_of(CodecSettings(codec, 0.0)))
    async with make_run(1, 2, ring=ring, num_elements=10, num_fragments=2) as run:
        coordinator = await run.lead()
        for slot in range(2):
            run.commit(slot, 0)
        outcome = (await finish(run, coordinator, 1)).record.stages[0]
        assert outcome.weights == (4, 4)
        for slot, replica in enumerate(run.replicas[0]):
            assert torch.equal(replica.state.base.parameters_N, torch.arange(10.0))
            assert torch.equal(replica.stage.parameters, torch.arange(10.0) - (slot + 1))
            assert replica.stage.floats.tolist() == [1.5] * 3
            assert replica.stage.integers.tolist() == [2] * 2


async def test_a_member_that_sends_other_bytes_than_it_has_announced_is_left_out(make_run: MakeRun) -> None:
    ring = RingSettings(1024, codec=codec_of(CodecSettings("int8")))
    async with make_run(1, 3, ring=ring, num_elements=NUM_ELEMENTS) as run:
        coordinator = await run.lead()
        for slot in range(3):
            run.commit(slot, 0)
        liar = run.replicas[0][1]
        put = liar.state.put_encoded

        def flipped(into: Tensor, announced: Payload | None) -> None:
            put(into, announced)
            into[100] ^= 1

        liar.state.put_encoded = flipped
        outcome = await finish(run, coordinator, 1)
        assert liar.peer not in outcome.record.stages[0].members
        assert len(outcome.record.stages[0].members) == 2


@pytest.mark.parametrize("payload", [None, Payload("0" * 64, 1 << 62)])
async def test_who_joins_without_what_could_be_its_pseudo_gradient_counts_nothing_and_stops_nobody(
    make_run: MakeRun, payload: Payload | None
) -> None:
    ring = RingSettings(1024, codec=codec_of(CodecSettings("int8", 1.0)))
    async with make_run(1, 3, ring=ring, num_elements=NUM_ELEMENTS) as run:
        coordinator = await run.lead()
        for slot in range(3):
            run.commit(slot, 0)
        liar = run.replicas[0][0]
        brought = liar.state.brought
        liar.state.brought = lambda fragment: (brought(fragment)[0], payload)
        outcome = (await finish(run, coordinator, 1)).record.stages[0]
        assert outcome.epoch == 0
        assert outcome.members == tuple(replica.peer for replica in run.replicas[0])
        # The others have moved by 2 and 3 of equal weights.
        for replica in run.replicas[0]:
            assert replica.member.hashes == outcome.hashes
            moved = torch.arange(NUM_ELEMENTS) - replica.stage.parameters
            assert torch.allclose(moved, torch.full((NUM_ELEMENTS,), 0.5 * 1.9 * 2.5), rtol=0.01)
        assert not liar.stage.residual[0].any()


async def test_one_that_is_late_has_room_for_all_that_the_others_send(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_average, "_SMALL_SUMS", 1)
    ring = RingSettings(1 << 16, codec=codec_of(CodecSettings("int8")))
    # Of eight members seven send a byte an element: more than the four of a contribution, and small sums.
    async with make_run(1, 8, ring=ring, num_elements=60_000) as run:
        coordinator = await run.lead()
        for slot in range(8):
            run.commit(slot, 0)
        gather, arrived = Group.all_gather, anyio.Event()
        others = iter(range(7))

        async def gathered(group: Group, *arguments: Any) -> Any:
            if group._endpoint.peer_id == run.replicas[0][3].peer:
                await arrived.wait()
                for _ in range(100):
                    await anyio.lowlevel.checkpoint()
            elif next(others, None) == 6:
                arrived.set()
            return await gather(group, *arguments)

        monkeypatch.setattr(Group, "all_gather", gathered)
        outcome = (await finish(run, coordinator, 1)).record.stages[0]
        assert (outcome.epoch, len(outcome.members)) == (0, 8)


def test_a_payload_is_announced_by_a_digest_and_a_size() -> None:
    for said in (
        {"digest": "0" * 1_000_000, "num_bytes": 1},
        {"digest": "0" * 64, "num_bytes": -1},
        {"digest": "x" * 64},
    ):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(said), type=Payload)


def test_only_what_a_record_names_makes_the_residual() -> None:
    stage = FakeStage(NUM_ELEMENTS)
    state = ReplicaState(stage, OUTER, codec_of(CodecSettings("2bit", 1.0)))
    stage.parameters -= torch.rand(NUM_ELEMENTS)
    _, first = state.brought()
    stage.parameters -= torch.rand(NUM_ELEMENTS)
    _, second = state.brought()
    assert first is not None
    assert second is not None
    assert first != second
    hashes = state.hashes
    state.swap(hashes, counted=first)
    assert not stage.residual[0].any()
    stage.parameters -= 1.5
    # A life that never closed the round comes to what an equal one has announced.
    other = FakeStage(NUM_ELEMENTS)
    other_state = ReplicaState(other, OUTER, codec_of(CodecSettings("2bit", 1.0)))
    other.parameters -= 1.5
    _, announced = other_state.brought()
    other_state.swap(other_state.hashes, counted=announced)
    state.swap(hashes, counted=announced)
    assert torch.equal(stage.residual[0], other.residual[0])


def test_a_replica_that_goes_on_in_vain_begins_without_moments_where_rounds_do() -> None:
    stage = FakeStage(10)
    state = ReplicaState(stage, OUTER, resets_inner=True)
    state.restore()
    assert stage.forgotten == 1
