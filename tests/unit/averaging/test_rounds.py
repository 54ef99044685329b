"""Members and coordinator together: what a round ends with, whoever fails in it."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest
import torch
from tests.alongside import until
from tests.leading import finish_round, lead
from tests.unit.averaging.conftest import AUTHORITY

from shoal.averaging.coordinator import RoundCoordinator, RoundOutcome
from shoal.averaging.member import RoundSwapped
from shoal.averaging.signing import Signer
from shoal.errors import RoundAborted
from shoal.identity import Identity, verify
from shoal.ids import Ballot, PeerId, StepKey
from shoal.swarm.passed_orders import PassingRule
from shoal.swarm.records import record_hash
from shoal.swarm.round_effects import ReplicaOut
from shoal.transport.base import PeerLost, Received
from shoal.wire.messages import Message, SampleRange
from shoal.wire.messages.collective import RingPart, RingReady, SharedVector
from shoal.wire.messages.round import CommitRecord, OrderPassed, PrepareRecord, Propose, QuorumTag, Record, RoundState

MakeRun = Callable[..., object]


async def finish(run: object, coordinator: RoundCoordinator, round: int) -> RoundOutcome:
    coordinator.close_round(round, run.slots)
    return await finish_round(coordinator, round)


def on_message(run: object, kind: type[Message], sender: str, action: Callable[[PeerId, PeerId], None]) -> None:
    """Do something at the first delivery of a kind of message by a sender."""
    done: list[bool] = []

    def hook(source: PeerId, target: PeerId, message: Message) -> None:
        if not done and isinstance(message, kind) and source == sender:
            done.append(True)
            action(source, target)

    run.network.before_delivery = hook


async def test_all_replicas_of_a_stage_end_with_the_record_s_bytes(make_run: MakeRun) -> None:
    async with make_run(2, 3) as run:
        coordinator = run.start_client()
        leading = await lead(coordinator)
        assert (leading.tip.round, leading.tip.signed) == (0, None)
        assert leading.holders == {r.peer: s for s, stage in enumerate(run.replicas) for r in stage}
        for slot in range(3):
            run.commit(slot, 0)
        first = await finish(run, coordinator, 1)
        for number, stage in enumerate(run.replicas):
            named = first.record.stages[number]
            assert named.members == tuple(r.peer for r in stage)
            assert named.weights == (4, 4, 4)
            for replica in stage:
                assert replica.member.hashes == named.hashes
                assert replica.steps.round == 2
                assert isinstance(replica.events.receive_nowait(), RoundSwapped)
                # The mean pseudo-gradient is 2; with Nesterov momentum from rest the step is lr * (1 + mu) * 2.
                assert torch.allclose(replica.stage.parameters, torch.arange(10.0) - 0.5 * 1.9 * 2)
                assert torch.allclose(replica.stage.floats, torch.full((3,), 2.0))
                assert replica.stage.integers.tolist() == [3, 3]
        assert first.record.samples == tuple(SampleRange(slot, 0, 4) for slot in range(3))
        logs = run.journal[record_hash(first.signed)]
        assert {peer: (stage, len(log)) for peer, (stage, log) in logs.items()} == {
            r.peer: (s, 1) for s, stage in enumerate(run.replicas) for r in stage
        }
        verify(first.signed.signer, first.signed.body, first.signed.signature)
        run.commit(0, 1)
        second = await finish(run, coordinator, 2)
        assert second.record.previous == record_hash(first.signed)
        assert second.record.stages[0].weights == (4, 0, 0)
        assert second.sent_bytes["pseudo_gradients"] > 0


async def test_members_pass_quorums_and_records_on(make_run: MakeRun) -> None:
    async with make_run(2, 5, passing=PassingRule(least_members=2, num_first=1)) as run:
        coordinator = await run.lead()
        client = run.identity.peer_id
        told: list[type[Message]] = []
        passed: list[PeerId] = []

        def hook(source: PeerId, target: PeerId, message: Message) -> None:
            if source == client:
                told.append(type(message))
            elif isinstance(message, OrderPassed):
                passed.append(target)

        run.network.before_delivery = hook
        for number in range(2):
            run.commit(0, number)
            outcome = await finish(run, coordinator, number + 1)
            assert [len(stage.members) for stage in outcome.record.stages] == [5, 5]
            for stage, its in zip(run.replicas, outcome.record.stages, strict=True):
                assert {replica.member.hashes for replica in stage} == {its.hashes}
        assert not {Propose, PrepareRecord} & set(told)
        assert told.count(OrderPassed) == 8, "of each stage one member, in two rounds a quorum and a record"
        assert {r.peer for stage in run.replicas for r in stage[1:]} <= set(passed)


async def test_a_round_without_training_leaves_the_state_alone(make_run: MakeRun) -> None:
    async with make_run(1, 2) as run:
        coordinator = await run.lead()
        before = run.replicas[0][0].member.hashes
        outcome = await finish(run, coordinator, 1)
        assert outcome.record.stages[0].hashes == before
        assert outcome.record.samples == ()
        assert run.replicas[0][1].member.base_round == 1


async def test_a_spare_stays_current(make_run: MakeRun) -> None:
    async with make_run(1, 2) as run:
        spare = run.replicas[0][1]
        coordinator = await run.lead()
        run.commit(0, 0)
        coordinator.close_round(1, {run.replicas[0][0].peer: 0})
        outcome = await finish_round(coordinator, 1)
        assert outcome.record.stages[0].weights == (4, 0)
        assert spare.member.hashes == run.replicas[0][0].member.hashes


async def test_a_member_that_dies_in_the_ring_is_left_out(make_run: MakeRun) -> None:
    async with make_run(2, 3) as run:
        coordinator = await run.lead()
        for slot in range(3):
            run.commit(slot, 0)
        victim = run.replicas[0][1].peer
        on_message(run, RingPart, victim, lambda source, _target: run.network.kill(source))
        outcome = await finish(run, coordinator, 1)
        first, second = outcome.record.stages
        assert victim not in first.members
        assert first.epoch == 1
        assert (first.steps_lost, second.steps_lost) == (1, 0)
        assert (len(first.members), len(second.members)) == (2, 3)
        # The step is in the record, because its other stage holds it.
        assert outcome.record.samples == tuple(SampleRange(slot, 0, 4) for slot in range(3))
        assert run.replicas[0][0].member.hashes == run.replicas[0][2].member.hashes == first.hashes


async def test_a_member_that_cannot_reach_another_reports_it(make_run: MakeRun) -> None:
    async with make_run(1, 3) as run:
        coordinator = await run.lead()
        run.commit(0, 0)
        first, second, third = (r.peer for r in run.replicas[0])
        run.network.cut(first, second)
        outcome = await finish(run, coordinator, 1)
        assert len(outcome.record.stages[0].members) == 2
        assert third in outcome.record.stages[0].members


async def test_bits_that_flip_once_cost_a_repetition(make_run: MakeRun) -> None:
    async with make_run(1, 3) as run:
        coordinator = await run.lead()
        run.commit(0, 0)
        run.replicas[0][1].state.faults = 1
        outcome = await finish(run, coordinator, 1)
        assert outcome.record.stages[0].epoch == 1
        assert len(outcome.record.stages[0].members) == 3


async def test_a_member_whose_bits_differ_twice_is_out(make_run: MakeRun) -> None:
    async with make_run(1, 3) as run:
        coordinator = await run.lead()
        run.commit(0, 0)
        run.commit(1, 0)  # without it the record would name the bytes of before, which the faulty one has
        faulty = run.replicas[0][0]
        faulty.state.faults = 2
        outcome = await finish(run, coordinator, 1)
        assert faulty.peer not in outcome.record.stages[0].members
        assert faulty.peer not in outcome.holders
        assert faulty.member.base_round == 0
        assert isinstance(faulty.events.receive_nowait(), ReplicaOut)


async def test_a_member_with_broken_memory_leaves_by_itself(make_run: MakeRun) -> None:
    async with make_run(1, 2) as run:
        coordinator = await run.lead()
        run.commit(0, 0)
        broken = run.replicas[0][0]
        broken.state.base_parameters()[0] += 1
        outcome = await finish(run, coordinator, 1)
        assert outcome.record.stages[0].members == (run.replicas[0][1].peer,)
        out = broken.events.receive_nowait()
        assert isinstance(out, ReplicaOut)
        assert "hashes" in out.reason
        assert not broken.contents.offered


@pytest.mark.parametrize("message", [PrepareRecord, CommitRecord])
async def test_a_restarted_client_finishes_the_round(make_run: MakeRun, message: type[Message]) -> None:
    async with make_run(2, 2) as run:
        coordinator = await run.lead()
        run.commit(0, 0)
        run.commit(1, 0)
        client = run.identity.peer_id
        died = anyio.Event()
        count: list[PeerId] = []

        def hook(source: PeerId, target: PeerId, sent: Message) -> None:
            if isinstance(sent, message) and source == client and not died.is_set():
                count.append(target)
                if len(count) == 3:
                    run.network.kill(client)
                    died.set()

        run.network.before_delivery = hook
        coordinator.close_round(1, run.slots)
        await died.wait()
        again = run.start_client()
        leading = await lead(again)
        if leading.tip.round == 0:
            assert message is PrepareRecord
            await finish(run, again, 1)
        else:
            # Who had swapped before says again what it has sent.
            assert leading.sent_bytes["pseudo_gradients"] > 0
            assert leading.tip.hash in run.journal
        hashes = {stage: {r.member.hashes for r in run.replicas[stage]} for stage in range(2)}
        assert all(len(different) == 1 for different in hashes.values())
        assert {r.member.base_round for stage in run.replicas for r in stage} == {1}
        run.commit(0, 1)
        outcome = await finish(run, again, 2)
        assert outcome.record.ballot.generation == 2


async def test_a_step_in_doubt_is_settled_from_all_joins(make_run: MakeRun) -> None:
    async with make_run(2, 1) as run:
        coordinator = await run.lead()
        held = run.commit(0, 0, stages=[0])
        nowhere = StepKey(0, 1, 1, 0)
        doubtful = run.replicas[1][0].steps
        doubtful.in_doubt, doubtful.path = (held, nowhere), [stage[0].peer for stage in run.replicas]
        outcome = await finish(run, coordinator, 1)
        assert doubtful.fates == {held: (True, 0.5, 0.25, False), nowhere: (False, 0.0, 0.0, False)}
        assert [stage.steps_lost for stage in outcome.record.stages] == [0, 0]
        assert outcome.record.samples == (SampleRange(0, 0, 4),)


async def test_a_client_learns_that_another_one_has_taken_over(make_run: MakeRun) -> None:
    async with make_run(1, 1) as run:
        first = run.start_client()
        await lead(first)
        second = run.start_client(Identity.generate())
        await lead(second)
        first.close_round(1, run.slots)
        with pytest.raises(RoundAborted):
            await finish_round(first, 1)
        assert first._machine.highest.peer == second._endpoint.peer_id
        assert (await finish(run, second, 1)).record.round == 1


async def test_the_client_waits_for_a_stage_without_replica(make_run: MakeRun) -> None:
    async with make_run(2, 1) as run:
        run.network.kill(run.replicas[1].pop().peer)
        coordinator = run.start_client()
        run.tasks.start_soon(lead, coordinator)
        await until(lambda: coordinator.stuck == (1,))
        run.add_replica(1)
        coordinator.replicas(run.hops)
        assert (await lead(coordinator)).tip.round == 0


async def test_a_member_that_refers_to_memory_it_does_not_share_is_refused_counted_and_left_out(
    make_run: MakeRun,
) -> None:
    async with make_run(1, 3) as run:
        coordinator = await run.lead()
        run.commit(0, 0)
        hostile, victim = (replica.peer for replica in run.replicas[0][:2])
        endpoints = run.network._endpoints

        def refer(source: PeerId, target: PeerId, message: Message) -> None:
            if isinstance(message, RingPart) and source == hostile and QuorumTag.decoded(message.tag).epoch == 0:
                run.network.before_delivery = None
                lie = SharedVector(descriptor=0, inode=1, offset_bytes=0)
                ready = RingReady(*(getattr(message, name) for name in message.__struct_fields__), count=1, vector=lie)
                endpoints[source].post(target, ready)

        run.network.before_delivery = refer
        outcome = await finish(run, coordinator, 1)
        assert endpoints[victim].metrics.totals()["ring.refused"] == 1
        assert len(outcome.record.stages[0].members) == 2
        assert outcome.record.stages[0].epoch == 1


@pytest.mark.parametrize("has_key", [True, False])
async def test_a_replica_takes_no_record_of_somebody_without_the_swarm_key(make_run: MakeRun, has_key: bool) -> None:
    async with make_run(1, 1) as run:
        coordinator = await run.lead()
        run.commit(0, 0)
        await finish(run, coordinator, 1)
        (replica,) = run.replicas[0]
        other = Identity.generate()
        ballot = Ballot(9, other.peer_id, 1)
        record = Record("run", 5, ballot, "D4", (), (), (), {})
        signed = Signer(other, AUTHORITY if has_key else other, "run").seal(record)
        endpoint = run.network.endpoint(other.peer_id)
        endpoint.introduce(run.hops[replica.peer])
        endpoint.post(replica.peer, CommitRecord(ballot, signed))
        events = [event for event in [await anext(endpoint.events()) for _ in range(2)]]
        answers = [event.message for event in events if isinstance(event, Received)]
        if has_key:
            assert [type(answer) for answer in answers] == [RoundState], "it says why it cannot follow"
        else:
            assert isinstance(events[-1], PeerLost)
            assert "without having the swarm key" in events[-1].reason
        assert replica.member.base_round == 1
