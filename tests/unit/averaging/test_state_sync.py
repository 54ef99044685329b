"""Replicas that get the state of a record from others, whatever those do."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest
import torch
from tests.alongside import alongside, until
from tests.leading import finish_round, lead, ready

from shoal.averaging.contents import MAX_REQUESTS, Contents
from shoal.averaging.replica_state import OuterState
from shoal.averaging.state_donor import StateDonor, content_of
from shoal.clock import SystemClock
from shoal.codec.raw import to_wire
from shoal.errors import RemoteProtocolError
from shoal.ids import PeerId
from shoal.swarm.state_keeping import PieceKey
from shoal.swarm.view import NO_BASE
from shoal.transport.base import Received
from shoal.transport.memory import MemoryNetwork
from shoal.wire.messages.transfer import Chunk, Have, Missing, Read, Want

MakeRun = Callable[..., object]
STATE = content_of(0, "hash")


async def one_round(run: object, coordinator: object, round: int) -> object:
    for slot in range(len(run.replicas[0])):
        run.commit(slot, round)
    coordinator.close_round(round, run.slots)
    return await finish_round(coordinator, round)


async def after_a_round(run: object) -> object:
    coordinator = await run.lead()
    await one_round(run, coordinator, 1)
    return coordinator


def join(run: object, coordinator: object, stage: int) -> object:
    replica = run.add_replica(stage)
    coordinator.replicas(run.hops)
    return replica


def messages(caplog: pytest.LogCaptureFixture, event: str) -> list[str]:
    return [record.reason for record in caplog.records if record.getMessage() == event]


def fetched(caplog: pytest.LogCaptureFixture) -> list[tuple[int, bool]]:
    """The round of each state that was fetched, and whether it was got by averages."""
    return [(r.round, r.average) for r in caplog.records if r.getMessage() == "state.fetched"]


async def test_a_newcomer_gets_parameters_momentum_and_buffers_and_takes_part_with_weight_0(make_run: MakeRun) -> None:
    async with make_run(2, 2) as run:
        coordinator = await after_a_round(run)
        newcomer = join(run, coordinator, 0)
        await until(lambda: newcomer.peer in (coordinator.holders or {}))
        other = run.replicas[0][0]
        assert newcomer.member.hashes == other.member.hashes
        for mine, theirs in zip(newcomer.state.base, other.state.base, strict=True):
            assert torch.equal(mine, theirs)
            assert mine.data_ptr() != theirs.data_ptr()
        assert torch.equal(newcomer.stage.parameters, other.stage.parameters)
        assert torch.equal(newcomer.stage.integers, other.stage.integers)
        assert newcomer.steps.round == 2
        run.commit(0, 7)
        coordinator.close_round(2, {r.peer: slot for r, slot in zip(run.replicas[0], (0, 1), strict=False)})
        outcome = await finish_round(coordinator, 2)
        weights = dict(zip(outcome.record.stages[0].members, outcome.record.stages[0].weights, strict=True))
        assert weights == {run.replicas[0][0].peer: 4, run.replicas[0][1].peer: 0, newcomer.peer: 0}
        assert newcomer.member.hashes == other.member.hashes == outcome.record.stages[0].hashes


def lie(replica: object, in_offer: bool) -> None:
    """A donor whose third chunk is wrong; with `in_offer` it says so itself."""
    [held] = replica.contents.offered.values()
    honest = held.chunk
    if not in_offer:
        held.hashes()
    wrong = to_wire(torch.zeros(8, dtype=torch.uint8))
    held.chunk = lambda number: wrong if number == 2 else honest(number)


@pytest.mark.parametrize("in_offer", [False, True])
async def test_a_lying_donor_is_detected_and_named(
    make_run: MakeRun, caplog: pytest.LogCaptureFixture, in_offer: bool
) -> None:
    async with make_run(1, 2) as run:
        coordinator = await after_a_round(run)
        liar, honest = run.replicas[0]
        lie(liar, in_offer)
        # Only the liar can be reached at first.
        run.network.cut(honest.peer, PeerId("R0.2"))
        newcomer = join(run, coordinator, 0)
        await until(lambda: messages(caplog, "state.donor_distrusted") != [])
        assert newcomer.member.base_round == 0
        run.network.heal(honest.peer, PeerId("R0.2"))
        await until(lambda: newcomer.peer in (coordinator.holders or {}))
        [reason] = messages(caplog, "state.donor_distrusted")
        assert liar.peer in reason
        assert newcomer.member.hashes == honest.member.hashes


async def test_a_newcomer_waits_for_a_holder_to_come_back_and_names_the_stage(
    make_run: MakeRun, caplog: pytest.LogCaptureFixture
) -> None:
    async with make_run(2, 1) as run:
        coordinator = await after_a_round(run)
        holder, client = run.replicas[1][0], run.identity.peer_id
        others = [client, run.replicas[0][0].peer, PeerId("R1.1")]
        for other in others:
            run.network.cut(holder.peer, other)
        newcomer = join(run, coordinator, 1)
        await until(lambda: messages(caplog, "state.nobody") != [])
        assert messages(caplog, "state.nobody") == ["stage 1: nobody holds record 1; waiting for a server that does"]
        assert newcomer.member.base_round == 0
        for other in others:
            run.network.heal(holder.peer, other)
        await until(lambda: newcomer.peer in (coordinator.holders or {}))
        assert newcomer.member.hashes == holder.member.hashes
        assert (await one_round(run, coordinator, 2)).record.round == 2


async def test_a_coordinator_that_takes_over_tells_newcomers_what_to_look_for(
    make_run: MakeRun, caplog: pytest.LogCaptureFixture
) -> None:
    async with make_run(2, 1) as run:
        await after_a_round(run)
        holder, client = run.replicas[1][0], run.identity.peer_id
        run.network.kill(client)
        for other in (client, run.replicas[0][0].peer, PeerId("R1.1")):
            run.network.cut(holder.peer, other)
        run.add_replica(1)
        again = run.start_client()
        again.stand()
        await until(lambda: messages(caplog, "state.nobody") != [])
        assert again.stuck == (1,)
        assert again.holders is None
        for other in (client, run.replicas[0][0].peer, PeerId("R1.1")):
            run.network.heal(holder.peer, other)
        assert (await ready(again, 0)).tip.round == 1
        newcomer = run.replicas[1][1]
        await until(lambda: newcomer.peer in (again.holders or {}))
        assert newcomer.member.hashes == holder.member.hashes


async def test_newcomers_alone_do_not_make_the_run_start_again(make_run: MakeRun) -> None:
    async with make_run(1, 1) as run:
        coordinator = await after_a_round(run)
        run.network.kill(run.replicas[0][0].peer)
        join(run, coordinator, 0)
        run.tasks.start_soon(lead, coordinator)
        await until(lambda: coordinator.holders is None)
        await until(lambda: coordinator.stuck == (0,))
        assert coordinator.holders is None


@pytest.mark.parametrize(
    ("is_kept", "last", "cause"), [(True, 3, ""), (False, 3, "link is not the cause"), (False, 4, "too slow")]
)
async def test_a_record_that_is_committed_meanwhile_is_reached_from_the_one_that_is_being_fetched(
    make_run: MakeRun, caplog: pytest.LogCaptureFixture, is_kept: bool, last: int, cause: str
) -> None:
    caplog.set_level("INFO")
    async with make_run(1, 2) as run:
        coordinator = await after_a_round(run)
        newcomer = PeerId("R0.2")
        started: list[str] = []

        def hook(source: PeerId, target: PeerId, message: object) -> None:
            if target == newcomer and isinstance(message, Chunk) and not started:
                started.append(message.name.digest)
                for donor in run.replicas[0][:2]:
                    run.network.cut(donor.peer, newcomer)

        run.network.before_delivery = hook
        joined = join(run, coordinator, 0)
        await until(lambda: started != [])
        for round in range(2, last + 1):
            run.commit(0, 10 * round)
            run.commit(1, 10 * round)
            coordinator.close_round(round, {r.peer: slot for slot, r in enumerate(run.replicas[0][:2])})
            newest = await finish_round(coordinator, round)
        assert newcomer not in newest.record.stages[0].members
        assert joined.member.base_round == 0
        for donor in run.replicas[0][:2]:
            offered = donor.contents.offered
            if is_kept:
                assert len(offered) == 4, "the first state, two averages, the newest state"
            if not is_kept:
                newest_key = content_of(0, donor.member._machine.tip.hash)
                for key in offered.keys() - {newest_key}:
                    del offered[key]
            run.network.heal(donor.peer, newcomer)
        await until(lambda: newcomer in (coordinator.holders or {}))
        assert joined.member.base_round == last
        assert joined.member.hashes == newest.record.stages[0].hashes
        assert fetched(caplog) == ([(1, False), (2, True), (3, True)] if is_kept else [(last, False)])
        reasons = messages(caplog, "state.overtaken")
        assert len(reasons) == (0 if is_kept else 1)
        assert all(cause in reason for reason in reasons)
        await one_round(run, coordinator, last + 1)
        assert joined.member.hashes == run.replicas[0][0].member.hashes


async def test_a_replica_that_missed_one_record_needs_only_its_averages_if_somebody_keeps_them(
    make_run: MakeRun, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with make_run(1, 3) as run:
        coordinator = await after_a_round(run)
        for replica in run.replicas[0]:
            replica.source.donor._keeping.asked(PieceKey(replica.member._machine.tip.hash, False), PeerId("N"))
        faulty = run.replicas[0][0]
        faulty.state.faults = 2
        await one_round(run, coordinator, 2)
        await until(lambda: faulty.peer in (coordinator.holders or {}))
        assert fetched(caplog) == [(2, True)]
        assert faulty.member.hashes == run.replicas[0][1].member.hashes


async def test_averages_that_do_not_lead_to_the_record_are_given_up_for_the_whole_state(
    make_run: MakeRun, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with make_run(1, 3) as run:
        coordinator = await after_a_round(run)
        for replica in run.replicas[0]:
            replica.source.donor._keeping.asked(PieceKey(replica.member._machine.tip.hash, False), PeerId("N"))
            honest = replica.source.donor.hold

            def hold(round: int, digest: str, state: object, average: object = None, honest: object = honest) -> None:
                other = None if average is None else average._replace(parameters_M=average.parameters_M + 1)
                honest(round, digest, state, other)

            replica.source.donor.hold = hold
        faulty = run.replicas[0][0]
        faulty.state.faults = 2
        await one_round(run, coordinator, 2)
        await until(lambda: faulty.peer in (coordinator.holders or {}))
        assert fetched(caplog) == [(2, False)]
        [reason] = messages(caplog, "state.overtaken")
        assert "averages of record 2 have not led to the state" in reason
        assert messages(caplog, "state.donor_distrusted") == []
        assert faulty.member.hashes == run.replicas[0][1].member.hashes


async def test_averages_of_fragments_lead_on_from_a_state_as_averages_of_all_do(
    make_run: MakeRun, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with make_run(1, 3, num_elements=2 * 4096, num_fragments=2) as run:
        coordinator = await after_a_round(run)
        for replica in run.replicas[0]:
            replica.source.donor._keeping.asked(PieceKey(replica.member._machine.tip.hash, False), PeerId("N"))
        faulty = run.replicas[0][0]
        faulty.state.faults = 2
        await one_round(run, coordinator, 2)
        await until(lambda: faulty.peer in (coordinator.holders or {}))
        assert fetched(caplog) == [(2, True)]
        assert faulty.member.hashes == run.replicas[0][1].member.hashes
        assert torch.equal(faulty.stage.parameters, faulty.state.base.parameters_N)
        assert faulty.steps.earlier == ()


async def test_a_member_whose_bits_differed_is_given_the_record_s_state(make_run: MakeRun) -> None:
    async with make_run(1, 3) as run:
        coordinator = await run.lead()
        faulty = run.replicas[0][0]
        faulty.state.faults = 2
        outcome = await one_round(run, coordinator, 1)
        assert faulty.peer not in outcome.record.stages[0].members
        await until(lambda: faulty.peer in (coordinator.holders or {}))
        assert faulty.member.hashes == outcome.record.stages[0].hashes
        assert faulty.peer in (await one_round(run, coordinator, 2)).record.stages[0].members


# -- the donor


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork(seed=0)


async def test_a_donor_gives_only_what_it_holds_and_only_to_its_stage(make_run: MakeRun) -> None:
    async with make_run(1, 1) as run:
        await after_a_round(run)
        donor = run.replicas[0][0]
        digest = donor.member._machine.tip.hash
        held, another, other_stage = content_of(0, digest), content_of(0, "another"), content_of(1, digest)
        asker = run.network.endpoint(PeerId("asker"))
        asker.introduce(run.view.replicas[0].hop)
        for question in (Want(other_stage), Want(another), Read(another, 0), Want(held)):
            asker.post(donor.peer, question)
        answers: list[object] = []
        async for event in asker.events():
            if isinstance(event, Received):
                answers.append(event.message)
                if len(answers) == 4:
                    break
        assert answers[:3] == [Missing(other_stage, NO_BASE), Missing(another, 1), Missing(another, 1)]
        assert isinstance(answers[3], Have)
        assert len(answers[3].chunk_hashes) == 32 * (5 + 5 + 2 + 2)


async def test_a_peer_that_asks_for_too_much_at_a_time_breaks_the_protocol(network: MemoryNetwork) -> None:
    contents = Contents(network.endpoint(PeerId("D")), SystemClock())
    for chunk in range(MAX_REQUESTS):
        contents.receive(Received(PeerId("greedy"), Read(STATE, chunk)))
    contents.receive(Received(PeerId("modest"), Read(STATE, 0)))
    with pytest.raises(RemoteProtocolError, match="at a time"):
        contents.receive(Received(PeerId("greedy"), Read(STATE, MAX_REQUESTS)))


async def test_a_chunk_without_its_bytes_breaks_the_protocol(make_run: MakeRun) -> None:
    async with make_run(1, 1) as run:
        with pytest.raises(RemoteProtocolError, match="one tensor"):
            run.replicas[0][0].contents.receive(Received(PeerId("X"), Chunk(STATE, 0)))


async def test_who_asks_too_early_gets_the_offer_when_there_is_one(network: MemoryNetwork) -> None:
    contents = Contents(network.endpoint(PeerId("D")), SystemClock(), chunk_bytes=8)
    donor = StateDonor(contents, 0)
    asker = network.endpoint(PeerId("A"))
    contents.endpoint.introduce(asker.hop)
    events = asker.events()

    async def answer() -> object:
        async for event in events:
            if isinstance(event, Received):
                return event.message
        return None

    empty = torch.zeros(0)
    async with alongside(contents.run):
        contents.receive(Received(asker.peer_id, Want(STATE)))
        assert await answer() == Missing(STATE, NO_BASE)
        donor.hold(1, "other", OuterState(torch.zeros(3), torch.zeros(3), empty, empty))
        donor.hold(2, STATE.digest, OuterState(torch.zeros(3), torch.zeros(3), empty, empty))
        offer = await answer()
        assert isinstance(offer, Have)
        assert len(offer.chunk_hashes) == 4 * 32


async def test_a_donor_that_is_not_read_from_waits_and_serves_the_others(network: MemoryNetwork) -> None:
    endpoint = network.endpoint(PeerId("D"))
    stalled, sent = PeerId("stalled"), list[PeerId]()

    class Stalling:
        def post(self, peer: PeerId, *_: object) -> None:
            sent.append(peer)

        async def drained(self, peer: PeerId) -> None:
            await (anyio.sleep_forever() if peer == stalled else anyio.lowlevel.checkpoint())

        def __getattr__(self, name: str) -> object:
            return getattr(endpoint, name)

    contents = Contents(Stalling(), SystemClock(), chunk_bytes=8)
    empty = torch.zeros(0)
    StateDonor(contents, 0).hold(1, STATE.digest, OuterState(torch.zeros(100), empty, empty, empty))
    async with alongside(contents.run):
        for peer in (stalled, PeerId("reads")):
            for chunk in range(10):
                contents.receive(Received(peer, Read(STATE, chunk)))
        await until(lambda: sent.count(PeerId("reads")) == 10)
        assert sent.count(stalled) == 1
