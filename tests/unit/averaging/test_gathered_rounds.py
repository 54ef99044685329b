"""Rounds whose pseudo-gradients are encoded as a whole, beside the same arithmetic written plainly: equal bits.

The cases cover each pair of codec, aggregation, feedback, number of replicas, and what happens. Every replica trains in
its own way: parameters move at random, and the third slot trains twice as much as the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import msgspec
import pytest
import torch
from tests.alongside import until
from tests.reference import payloads
from tests.reference.diloco import Coding, coded_mean
from tests.unit.averaging.conftest import FakeStage, MakeRun, Replica, Run
from tests.unit.averaging.test_rounds import finish, on_message
from torch import Tensor

from shoal.averaging import round_average
from shoal.averaging.replica_state import ReplicaState
from shoal.averaging.round_average import RingSettings
from shoal.codec.registry import CodecSettings, codec_of
from shoal.collective.group import Group
from shoal.optim.outer import OuterSgd
from shoal.wire.messages.collective import RingPart
from shoal.wire.messages.round import Payload, StageOutcome

NUM_ELEMENTS = 4100
LR, MOMENTUM = 0.5, 0.9
OUTER = OuterSgd(LR, MOMENTUM, nesterov=True)

AXES: dict[str, tuple[Any, ...]] = {
    "codec": ("int8", "int4", "int4_e3m0", "2bit", "sparse"),
    "over_senders": (False, True),
    "feedback": (0.0, 0.95, 1.0),
    "num_replicas": (2, 3),
    "event": ("nothing", "lost", "left out", "newcomer", "idle", "not finite"),
}


def covering(axes: dict[str, tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Few cases that have each pair of values of two axes: again and again the one that has most of those left."""
    names = list(axes)
    left = {
        (a, x, b, y)
        for a, b in itertools.combinations(range(len(names)), 2)
        for x in axes[names[a]]
        for y in axes[names[b]]
    }
    every, cases = list(itertools.product(*axes.values())), []
    while left:
        best = max(every, key=lambda case: len(_pairs(case) & left))
        left -= _pairs(best)
        cases.append(best)
    return cases


def _pairs(case: Sequence[Any]) -> set[tuple[Any, ...]]:
    return {(a, case[a], b, case[b]) for a, b in itertools.combinations(range(len(case)), 2)}


def reference_of(name: str) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """What receivers make of values, and which of them are sent."""

    def code(values: Tensor) -> tuple[Tensor, Tensor]:
        received = torch.tensor(payloads.encoded(name, values.tolist()).sent)
        return received, received != 0 if name == "sparse" else torch.ones(len(values), dtype=torch.bool)

    return code


@dataclass
class Plain:
    """The stage in plain arithmetic: what all hold, and each replica's own parameters and residual, by name."""

    coding: Coding
    outer: Tensor
    momentum: Tensor
    local: dict[str, Tensor] = field(default_factory=dict)
    residual: dict[str, Tensor] = field(default_factory=dict)

    def train(self, name: str, change: Tensor) -> None:
        self.local[name] = self.local.get(name, self.outer) + change

    def end(self, members: Sequence[str], weights: Sequence[int], broken: Sequence[str] = ()) -> None:
        """Of the members that have weight; who is broken counts for nothing and forgets its residual."""
        deltas = [self.outer - self.local.get(name, self.outer) for name in members]
        residuals = [self.residual.get(name, torch.zeros_like(self.outer)) for name in members]
        average, residuals = coded_mean(deltas, residuals, [n / sum(weights) for n in weights], self.coding)
        self.residual |= dict(zip(members, residuals, strict=True))
        self.residual |= {name: torch.zeros_like(self.outer) for name in broken}
        self.momentum = self.momentum * MOMENTUM + average
        self.outer = self.outer - (self.momentum * MOMENTUM + average) * LR
        self.local.clear()


class Scene:
    """One stage of a run beside its plain counterpart."""

    def __init__(self, run: Run, coding: Coding) -> None:
        self.run = run
        self.noise = torch.Generator().manual_seed(3)
        parameters = run.replicas[0][0].stage.parameters
        self.plain = Plain(coding, parameters.clone(), torch.zeros_like(parameters))

    def train(self, without: Sequence[Replica] = ()) -> None:
        for slot, replica in enumerate(self.run.replicas[0]):
            if replica in without:
                continue
            for number in range(2 if slot == 2 else 1):
                self.run.commit(slot, 10 * replica.steps.round + number)
            # The commit has moved the parameters as well: both take all of it as one change.
            replica.stage.parameters.copy_(self.plain.outer)
            change = torch.randn(NUM_ELEMENTS, generator=self.noise) * 0.1
            replica.stage.parameters += change
            self.plain.train(replica.peer, change)

    def check(self, outcome: StageOutcome, replicas: Sequence[Replica]) -> None:
        for replica in replicas:
            assert replica.member.hashes == outcome.hashes
            assert torch.equal(replica.state.base.parameters_N, self.plain.outer)
            assert torch.equal(replica.state.base.momentum_N, self.plain.momentum)
            assert torch.equal(replica.stage.parameters, self.plain.outer)
            if self.plain.coding.feedback:
                [residual] = replica.stage.residual
                assert torch.equal(residual, self.plain.residual.get(replica.peer, torch.zeros(NUM_ELEMENTS)))
            else:
                assert replica.stage.residual == ()

    def end(self, outcome: StageOutcome, broken: Sequence[str] = ()) -> None:
        self.plain.end(outcome.members, outcome.weights, broken)
        present = [replica for replica in self.run.replicas[0] if replica.peer in outcome.members]
        self.check(outcome, present)
        payloads = dict(zip(outcome.members, outcome.payloads, strict=True))
        weights = dict(zip(outcome.members, outcome.weights, strict=True))
        assert {peer for peer, payload in payloads.items() if payload is not None} == {
            p for p, w in weights.items() if w
        }


@pytest.mark.parametrize(tuple(AXES), covering(AXES), ids=lambda value: str(value))
async def test_rounds_have_the_bits_of_plain_arithmetic(
    make_run: MakeRun, codec: str, over_senders: bool, feedback: float, num_replicas: int, event: str
) -> None:
    ring = RingSettings(1024, codec=codec_of(CodecSettings(codec, feedback)), over_senders=over_senders)
    async with make_run(1, num_replicas, ring=ring, num_elements=NUM_ELEMENTS) as run:
        scene = Scene(run, Coding(reference_of(codec), feedback, over_senders))
        coordinator = await run.lead()
        for round in (1, 2, 3, 4):
            changed = round == 2
            victim = run.replicas[0][-1]
            scene.train(without=[victim] if changed and event == "idle" else ())
            broken: list[str] = []
            if changed and event == "not finite":
                victim.stage.parameters[7] = float("nan")
                broken.append(victim.peer)
            if changed and event == "lost":
                on_message(run, RingPart, victim.peer, lambda source, _target: run.network.kill(source))
            if changed and event == "left out":
                victim.state.faults = 2
            if changed and event == "newcomer":
                run.add_replica(0)
                coordinator.replicas(run.hops)
            outcome = (await finish(run, coordinator, round)).record.stages[0]
            scene.end(outcome, broken)
            if changed and event == "lost":
                run.replicas[0].remove(victim)
            await until(lambda wanted=round: all(r.member.base_round == wanted for r in run.replicas[0]))
            scene.check(outcome, run.replicas[0])


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
        liar.state.brought = lambda: (brought()[0], payload)
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
