"""Outer steps that are computed before their round is closed: the bits are those without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.alongside import until
from tests.unit.averaging.conftest import MakeRun, Replica, Run, brought_to
from tests.unit.averaging.test_rounds import finish

from shoal.averaging.coordinator import RoundCoordinator
from shoal.averaging.gathered import payload_of
from shoal.averaging.round_average import RingSettings
from shoal.codec.registry import CodecSettings, codec_of
from shoal.ids import PeerId
from shoal.wire.messages import Message
from shoal.wire.messages.round import Staged, StageHashes

NUM_ELEMENTS = 5000
RING = RingSettings(1024, codec=codec_of(CodecSettings("int4")))

Said = Callable[[int], int]
"""How many targets a replica says that it brings, of how many it does."""


def used(run: Run, replica: Replica) -> int:
    """How many outer steps of this replica had been foreseen."""
    endpoint = run.network.find(PeerId("?"), f"memory:{replica.peer}")
    assert endpoint is not None
    return int(endpoint.metrics.totals().get("round.foreseen", 0))


def cut(run: Run, round: int, slot: int, said: Said = lambda targets: targets) -> None:
    """A step, the cut, and more steps the higher the slot is, which count in the round after."""
    replica = run.replicas[0][slot]
    run.commit(slot, 100 * round)
    replica.stage.cut = replica.stage.parameters.clone()
    replica.member.cut(replica.steps.round, said(brought_to(run, replica)))
    for number in range(slot + 1):
        run.commit(slot, 100 * round + 1 + number)


async def train(run: Run, round: int, said: Said = lambda targets: targets) -> None:
    """All replicas train, and what they have encoded gets to the others."""
    replicas = run.replicas[0]
    for slot in range(len(replicas)):
        cut(run, round, slot, said)
    for replica in replicas:
        ahead = replica.member.ahead
        assert ahead is not None
        await until(lambda here=ahead: sum(each.ended.is_set() for each in here._fetches.values()) == len(replicas) - 1)


async def end(run: Run, coordinator: RoundCoordinator, round: int) -> StageHashes:
    """Return what the stage has become."""
    outcome = (await finish(run, coordinator, round)).record.stages[0]
    await until(lambda: all(replica.member.base_round == round for replica in run.replicas[0]))
    assert {replica.member.hashes for replica in run.replicas[0]} == {outcome.hashes}
    return outcome.hashes


async def rounds(make_run: MakeRun, said: Said, *, fragments: int = 1) -> tuple[list[StageHashes], list[int]]:
    """Return what a stage of three replicas becomes, and how many of their outer steps were foreseen."""
    options = {"ring": RING, "num_elements": NUM_ELEMENTS, "cut_after": 1, "num_fragments": fragments}
    async with make_run(1, 3, **options) as run:
        coordinator = await run.lead()
        hashes = []
        for round in range(1, 5):
            await train(run, round, said)
            hashes.append(await end(run, coordinator, round))
        return hashes, [used(run, replica) for replica in run.replicas[0]]


@pytest.mark.parametrize("fragments", [1, 2])
async def test_from_the_second_round_on_the_outer_step_is_foreseen_and_its_bits_are_those_without(
    make_run: MakeRun, fragments: int
) -> None:
    unknown, never = await rounds(make_run, lambda _: 0, fragments=fragments)
    foreseen, always = await rounds(make_run, lambda targets: targets, fragments=fragments)
    assert foreseen == unknown
    assert (never, always) == ([0, 0, 0], [3, 3, 3])


async def test_where_all_have_foretold_what_they_stage_the_record_waits_for_no_word_of_it(make_run: MakeRun) -> None:
    async with make_run(1, 3, ring=RING, num_elements=NUM_ELEMENTS, cut_after=1, num_fragments=2) as run:
        coordinator = await run.lead()
        await train(run, 1)
        await end(run, coordinator, 1)
        for replica in run.replicas[0]:
            post = replica.member.endpoint.post

            def posted(peer: PeerId, message: Message, *rest: Any, post: Callable[..., None] = post) -> None:
                if not isinstance(message, Staged):
                    post(peer, message, *rest)

            replica.member.endpoint.post = posted
        await train(run, 2)
        await until(lambda: all(each.member._averages.foretold(2) is not None for each in run.replicas[0]))
        await end(run, coordinator, 2)
        assert [used(run, replica) for replica in run.replicas[0]] == [1, 1, 1]


async def test_who_says_that_it_brings_what_it_does_not_only_makes_foresight_vain(make_run: MakeRun) -> None:
    unknown, _ = await rounds(make_run, lambda _: 0)
    lied, never = await rounds(make_run, lambda targets: targets + 1)
    assert (lied, never) == (unknown, [0, 0, 0])


async def test_with_another_member_than_in_the_last_round_nothing_is_foreseen(make_run: MakeRun) -> None:
    async with make_run(1, 2, ring=RING, num_elements=NUM_ELEMENTS, cut_after=1) as run:
        coordinator = await run.lead()
        await train(run, 1)
        await end(run, coordinator, 1)
        cut(run, 2, 0)  # the other one announces nothing
        await end(run, coordinator, 2)
        await train(run, 3)
        await end(run, coordinator, 3)
        assert [used(run, replica) for replica in run.replicas[0]] == [1, 1]


async def test_bytes_that_are_no_pseudo_gradient_are_said_by_the_quorum_alone(make_run: MakeRun) -> None:
    async with make_run(1, 3, ring=RING, num_elements=NUM_ELEMENTS, cut_after=1) as run:
        coordinator = await run.lead()
        await train(run, 1)
        await end(run, coordinator, 1)
        liar = run.replicas[0][2]
        encode = liar.state.encode_some

        def other_bytes(*arguments: object) -> bool:
            is_done = encode(*arguments)
            brought = liar.state.brought_payload
            if is_done and brought is not None and brought.payload_P.numel() > 7:
                wrong_P = torch.zeros(7, dtype=torch.uint8)
                liar.state._brought = brought._replace(payload_P=wrong_P, announced=payload_of(wrong_P))
            return is_done

        liar.state.encode_some = other_bytes
        await train(run, 2)
        outcome = (await finish(run, coordinator, 2)).record.stages[0]
        assert liar.peer not in outcome.members
        assert [used(run, replica) for replica in run.replicas[0][:2]] == [0, 0]
