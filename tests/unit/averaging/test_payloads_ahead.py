"""Payloads that are given before a round is closed: most are there in the quorum, and what is not is fetched in it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import msgspec
import pytest
import torch
from tests.alongside import until
from tests.unit.averaging.conftest import MakeRun, Replica, Run, brought_to
from tests.unit.averaging.test_rounds import finish

from shoal.averaging.digest_fetch import offered
from shoal.averaging.gathered import payload_of
from shoal.averaging.payloads_ahead import PayloadsAhead
from shoal.averaging.round_average import RingSettings
from shoal.codec.registry import CodecSettings, codec_of
from shoal.ids import PeerId
from shoal.swarm.view import SwarmView
from shoal.transport.base import Received
from shoal.wire.messages import Message, Traffic
from shoal.wire.messages.round import Close, Payload, PayloadReady
from shoal.wire.messages.transfer import Chunk, ContentKind, ContentName

NUM_ELEMENTS = 300_000
"""As int8 more than one chunk."""
RING = RingSettings(1024, codec=codec_of(CodecSettings("int8")))


def ahead_of(replica: Replica) -> PayloadsAhead:
    assert replica.member.ahead is not None
    return replica.member.ahead


def cut(run: Run, slot: int, number: int = 0) -> None:
    """One step, the cut, and one more step."""
    replica = run.replicas[0][slot]
    run.commit(slot, number)
    replica.stage.cut = replica.stage.parameters.clone()
    replica.member.cut(replica.steps.round, brought_to(run, replica))
    run.commit(slot, number + 1)


def coming(replica: Replica) -> dict[PeerId, bool]:
    """Whose payloads are on their way to it, and whether they are here."""
    return {peer: fetch.ended.is_set() for peer, fetch in ahead_of(replica)._fetches.items()}


@asynccontextmanager
async def overlapping(make_run: MakeRun, num_slots: int) -> AsyncIterator[tuple[Run, list[Message]]]:
    """A stage whose replicas are cut after one step, and what is sent about payloads."""
    sent: list[Message] = []

    def hook(_source: PeerId, _target: PeerId, message: Message) -> None:
        if isinstance(message, PayloadReady | Close | Chunk):
            sent.append(message)

    async with make_run(1, num_slots, ring=RING, num_elements=NUM_ELEMENTS, cut_after=1) as run:
        run.network.before_delivery = hook
        yield run, sent


async def test_what_was_cut_is_with_all_others_before_the_round_is_closed(make_run: MakeRun) -> None:
    async with overlapping(make_run, 3) as (run, sent):
        coordinator = await run.lead()
        for round in (1, 2):
            sent.clear()
            for slot in range(3):
                cut(run, slot, 10 * round)
            everybody = {replica.peer for replica in run.replicas[0]}
            for replica in run.replicas[0]:
                others = dict.fromkeys(everybody - {replica.peer}, True)
                await until(lambda here=replica, due=others: coming(here) == due)
            assert sum(isinstance(each, Chunk) for each in sent) == 3 * 2 * 2
            sent.clear()
            outcome = (await finish(run, coordinator, round)).record.stages[0]
            assert outcome.weights == ((4, 4, 4), (8, 8, 8))[round - 1]
            assert [type(each) for each in sent] == [Close] * 3, "no values are sent once it is closed"
            await until(lambda wanted=round: all(r.member.base_round == wanted for r in run.replicas[0]))
            assert not any(coming(replica) for replica in run.replicas[0])
            assert not any(name.kind is ContentKind.PAYLOAD for r in run.replicas[0] for name in r.contents.offered)
        # It counts as what it is, and not as state.
        sent_bytes = run.network.find(PeerId("?"), f"memory:{run.replicas[0][0].peer}").sent_bytes
        assert sent_bytes[Traffic.PSEUDO_GRADIENTS] > 2 * 2 * NUM_ELEMENTS


async def test_who_has_done_too_little_to_be_cut_gives_what_it_has_when_it_joins(make_run: MakeRun) -> None:
    async with overlapping(make_run, 3) as (run, sent):
        coordinator = await run.lead()
        cut(run, 0)
        cut(run, 1)
        # The third one has done nothing that would make it be cut, though it has moved.
        run.replicas[0][2].steps.cuts = run.cuts
        run.commit(2, 0)
        outcome = (await finish(run, coordinator, 1)).record.stages[0]
        assert (outcome.epoch, outcome.weights) == (0, (4, 4, 4))
        assert len({r.member.hashes for r in run.replicas[0]}) == 1
        ready = [each for each in sent if isinstance(each, PayloadReady)]
        assert len({each.payload.digest for each in ready}) == 3
        # Its step behind the cut is carried over by who was cut, and by nobody else.
        base = run.replicas[0][0].state.base.parameters_N
        for slot, replica in enumerate(run.replicas[0]):
            moved = base - replica.stage.parameters
            assert torch.allclose(moved, torch.full_like(moved, (slot + 1.0) * (slot < 2)), atol=0.05)


@pytest.mark.parametrize("contradicts_itself", [False, True])
async def test_one_that_gives_other_bytes_than_it_has_announced_is_left_out(
    contradicts_itself: bool, make_run: MakeRun
) -> None:
    async with overlapping(make_run, 3) as (run, _):
        coordinator = await run.lead()
        liar = run.replicas[0][1]
        give = ahead_of(liar).give

        def lies(payload: torch.Tensor, announced: Payload, num_targets: int = 0) -> None:
            give(payload, announced, num_targets)
            other = payload.clone()
            other[5000] ^= 1
            hashes = offered(payload).hashes() if contradicts_itself else None
            for name in liar.contents.offered:
                if name.kind is ContentKind.PAYLOAD:
                    liar.contents.offered[name] = offered(other, hashes=hashes)

        ahead_of(liar).give = lies
        for slot in range(3):
            cut(run, slot)
        outcome = (await finish(run, coordinator, 1)).record.stages[0]
        assert liar.peer not in outcome.members
        assert len(outcome.members) == 2


async def test_only_replicas_of_the_stage_are_believed_and_no_more_than_a_payload_can_have(make_run: MakeRun) -> None:
    async with overlapping(make_run, 2) as (run, _):
        await run.lead()
        me, other = run.replicas[0]
        stranger = run.network.endpoint(PeerId("stranger"))
        payload = Payload("0" * 64, 1000)
        sender = run.network.find(PeerId("?"), f"memory:{other.peer}")
        assert sender is not None
        base = me.member.base
        stranger.introduce(run.hops[me.peer])
        stranger.post(me.peer, PayloadReady(1, base.record_hash, 0, payload))
        sender.introduce(run.hops[me.peer])
        for wrong in (
            PayloadReady(1, base.record_hash, 1, payload),
            PayloadReady(2, base.record_hash, 0, payload),
            PayloadReady(1, "another record", 0, payload),
            PayloadReady(1, base.record_hash, 0, Payload("0" * 64, 1 << 40)),
        ):
            sender.post(me.peer, wrong)
            await until(lambda due=wrong: ahead_of(me)._ready.get(other.peer) == due or due.stage == 1)
            assert not coming(me)
        sender.post(me.peer, PayloadReady(1, base.record_hash, 0, payload))
        await until(lambda: coming(me) == {other.peer: False})
        assert ahead_of(me)._ready.keys() == {other.peer}


def test_a_payload_has_bytes() -> None:
    """Of nothing there would be no chunk that could be wrong."""
    with pytest.raises(msgspec.ValidationError, match=r"`int` >= 1"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(Payload("0" * 64, 0)), type=Payload)


async def test_what_the_quorum_names_is_waited_for_whatever_is_announced_meanwhile(make_run: MakeRun) -> None:
    async with overlapping(make_run, 2) as (run, _):
        await run.lead()
        me, other = run.replicas[0]
        content = torch.arange(1000, dtype=torch.uint8)
        joined_with = payload_of(content)
        ahead = ahead_of(me)
        ahead._endpoint.introduce(run.hops[other.peer])
        get = ahead.ask(other.peer, joined_with)
        ready = PayloadReady(1, me.member.base.record_hash, 0, Payload("1" * 64, 1000))
        assert ahead.receive(Received(other.peer, ready))
        other.contents.offer(ContentName(ContentKind.PAYLOAD, 0, joined_with.digest), offered(content))
        with anyio.fail_after(20):
            assert torch.equal(await get(), content)


async def test_who_has_left_is_not_asked(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    async with overlapping(make_run, 2) as (run, _):
        await run.lead()
        me, other = run.replicas[0]
        ahead_of(me).ask(other.peer, Payload("1" * 64, 1000))
        fetch = ahead_of(me)._fetches[other.peer]
        assert fetch.peers() == {other.peer: None}
        monkeypatch.setattr(Run, "view", SwarmView())
        assert fetch.peers() == {}


async def test_a_replica_that_has_trained_nothing_gives_nothing(make_run: MakeRun) -> None:
    async with overlapping(make_run, 2) as (run, sent):
        coordinator = await run.lead()
        for round in (1, 2):
            cut(run, 0, 10 * round)
            await finish(run, coordinator, round)
        ready = [each for each in sent if isinstance(each, PayloadReady)]
        assert [each.round for each in ready] == [1, 2], "of the replica that trains"


async def test_what_is_announced_by_one_that_is_a_record_ahead_is_fetched_when_that_is_there(make_run: MakeRun) -> None:
    async with overlapping(make_run, 2) as (run, _):
        coordinator = await run.lead()
        me, other = run.replicas[0]
        for slot in range(2):
            run.commit(slot, 0)
        end, early = ahead_of(me).end, list[PayloadReady]()

        def late() -> None:
            # The other one has swapped, trained and been cut before this one has swapped.
            base = me.member.base
            early.append(PayloadReady(base.round + 1, base.record_hash, 0, Payload("1" * 64, 1000)))
            ahead_of(me)._ready[other.peer] = early[0]
            end()

        ahead_of(me).end = late
        await finish(run, coordinator, 1)
        await until(lambda: bool(early))
        assert coming(me) == {other.peer: False}
        assert ahead_of(me)._fetches[other.peer].payload == early[0].payload


async def test_a_server_that_comes_back_to_its_stage_asks_anew_for_what_was_on_its_way(make_run: MakeRun) -> None:
    async with overlapping(make_run, 2) as (run, _):
        await run.lead()
        me, other = run.replicas[0]
        sender = run.network.find(PeerId("?"), f"memory:{other.peer}")
        assert sender is not None
        sender.introduce(run.hops[me.peer])
        sender.post(me.peer, PayloadReady(1, me.member.base.record_hash, 0, Payload("0" * 64, 1000)))
        await until(lambda: coming(me) == {other.peer: False})
        [fetch] = ahead_of(me)._fetches.values()
        await me.member.resume()
        [again] = ahead_of(me)._fetches.values()
        assert again is not fetch, "whoever was fetching it is no more"
