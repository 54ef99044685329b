"""Of which record a replica holds a copy of what its inner optimizer knew, while mirrors read it."""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch
from tests.alongside import alongside, until
from torch import Tensor

from shoal.averaging.contents import Contents
from shoal.averaging.digest_fetch import digest_of, offered
from shoal.averaging.inner_exchange import InnerExchange
from shoal.averaging.inner_fetch import InnerFetch
from shoal.checkpoint.tensor_file import encode_tensors
from shoal.clock import SystemClock
from shoal.ids import PeerId, StageIndex
from shoal.swarm.snapshots import Base
from shoal.swarm.view import Replica, SwarmView
from shoal.transport.base import Received
from shoal.transport.dispatch import dispatch
from shoal.transport.memory import MemoryNetwork
from shoal.wire.messages.inner import InnerState, InnerTaken, TakeInner
from shoal.wire.messages.round import StageHashes

MEMBER, MIRROR, SECOND = PeerId("member"), PeerId("mirror"), PeerId("second")


class Inline:
    async def run(self, function: Callable[..., Any], *arguments: object) -> Any:
        return function(*arguments)


class Desk:
    """A member of records, and mirrors that ask it."""

    def __init__(self) -> None:
        self.network, self.clock = MemoryNetwork(seed=0), SystemClock()
        self.endpoint = self.network.endpoint(MEMBER)
        self.contents = Contents(self.endpoint, self.clock)
        self.num_steps, self.has_mirrors = 0, True
        self.exchange = InnerExchange(
            self.contents,
            0,
            generation=1,
            device=Inline(),
            num_parameters=3,
            capture=lambda: {"step/weight": torch.full((3,), float(self.num_steps))},
            inherit=lambda *_: None,  # type: ignore[arg-type, return-value]
            base=lambda: None,  # type: ignore[arg-type, return-value]
            has_mirrors=lambda: self.has_mirrors,
        )

    async def record(self, round: int, *, is_wanted: bool = False) -> None:
        self.num_steps = 10 * round
        await self.exchange.keep(round, f"record {round}", is_wanted=is_wanted)

    def knew(self, round: int) -> bytes:
        """What a content of that record is."""
        return _content({"step/weight": torch.full((3,), 10.0 * round)})


def _content(tensors: dict[str, Tensor]) -> bytes:
    return encode_tensors(tensors, {"replica": f"{MEMBER}.1"}).numpy().tobytes()


def _noted(event: Received, answers: list[InnerTaken]) -> bool:
    if isinstance(event.message, InnerTaken):
        answers.append(event.message)
    return isinstance(event.message, InnerTaken)


@asynccontextmanager
async def asking(desk: Desk, *peers: PeerId) -> AsyncIterator[list[InnerFetch]]:
    fetches: list[InnerFetch] = []
    async with alongside(desk.exchange.run, desk.contents.run) as tasks:
        tasks.start_soon(dispatch, desk.endpoint, (desk.exchange, desk.contents))
        for peer in peers:
            endpoint = desk.network.endpoint(peer)
            contents = Contents(endpoint, desk.clock)
            view = SwarmView(replicas=(Replica(desk.endpoint.hop, 0.0, stage=StageIndex(0)),))
            fetch = InnerFetch(contents, SimpleNamespace(view=view))  # type: ignore[arg-type]
            tasks.start_soon(contents.run)
            tasks.start_soon(dispatch, endpoint, (fetch, contents))
            fetches.append(fetch)
        yield fetches


async def given(fetch: InnerFetch, round: int) -> bytes | None:
    content = await fetch.fetch(MEMBER, 0, f"record {round}", 3)
    return None if content is None else content.numpy().tobytes()


async def test_the_newest_record_has_a_copy_though_no_checkpoint_of_it_is_wanted_yet() -> None:
    desk = Desk()
    async with asking(desk, MIRROR) as [fetch]:
        await desk.record(1)
        await desk.record(2)
        assert await given(fetch, 1) is None
        assert await given(fetch, 2) == desk.knew(2)
        await desk.record(3)
        assert await given(fetch, 3) == desk.knew(3)


async def test_who_asks_while_the_copy_is_made_gets_it() -> None:
    desk, is_idle, has_asked = Desk(), anyio.Event(), anyio.Event()

    async def run(function: Callable[..., Any], *arguments: object) -> Any:
        await is_idle.wait()
        return function(*arguments)

    desk.exchange.device = SimpleNamespace(run=run)  # type: ignore[assignment]
    receive = desk.exchange.receive

    def heard(event: Received) -> bool:
        has_asked.set()
        return receive(event)

    desk.exchange.receive = heard  # type: ignore[method-assign]
    async with asking(desk, MIRROR) as [fetch], anyio.create_task_group() as tasks:
        tasks.start_soon(desk.record, 1)
        found: list[bytes | None] = []

        async def get() -> None:
            found.append(await given(fetch, 1))

        tasks.start_soon(get)
        await has_asked.wait()
        await anyio.lowlevel.checkpoint()
        is_idle.set()
        await until(lambda: found)
    assert found == [desk.knew(1)]


async def test_what_is_larger_than_a_stage_can_know_is_neither_made_room_for_nor_taken() -> None:
    desk = Desk()
    huge = InnerState(0, "0" * 64, "1" * 64, 1 << 60)
    async with asking(desk, MIRROR) as [fetch]:
        answers: list[InnerTaken] = []
        fetch.receive = lambda event: _noted(event, answers)
        fetch._endpoint.introduce(desk.endpoint.hop)
        fetch._endpoint.post(MEMBER, TakeInner(huge))
        await until(lambda: answers)
    [taken] = answers
    assert taken.digest == huge.digest
    assert taken.refused.startswith(f"it has {1 << 60} bytes")


async def test_what_is_wrong_with_a_content_is_said_in_an_answer_that_can_be_sent() -> None:
    desk = Desk()
    desk.exchange.base = lambda: Base(1, "1" * 64, StageHashes("", "", ""))
    entry = {"dtype": "x" * (1 << 20), "shape": [], "data_offsets": [0, 0]}
    header = json.dumps({"weight": entry}).encode()
    content = torch.frombuffer(bytearray(struct.pack("<Q", len(header)) + header), dtype=torch.uint8)
    offers = offered(content)
    inner = InnerState(0, "1" * 64, digest_of(offers.hashes()), content.nbytes)
    async with asking(desk, MIRROR) as [fetch]:
        answers: list[InnerTaken] = []
        fetch.receive = lambda event: _noted(event, answers)
        fetch._contents.offer(inner.name, offers)
        fetch._endpoint.introduce(desk.endpoint.hop)
        fetch._endpoint.post(MEMBER, TakeInner(inner))
        await until(lambda: answers)
    assert "is damaged (KeyError: 'xxx" in answers[0].refused


async def test_a_member_that_says_it_knows_more_than_its_stage_can_is_not_read() -> None:
    desk = Desk()
    async with asking(desk, MIRROR) as [fetch]:
        await desk.record(1)
        desk.exchange._named = lambda kept: InnerState(0, kept.record_hash, "1" * 64, 1 << 60)
        assert await given(fetch, 1) is None


@pytest.mark.parametrize("owner", ["member", ".1", "member.", "member.x", f"member.{'1' * 5000}", f"{'m' * 200}.1"])
async def test_whose_a_content_was_has_to_be_said_in_a_form_that_can_be(owner: str) -> None:
    desk = Desk()
    desk.exchange.base = lambda: Base(1, "record 1", StageHashes("", "", ""))
    content = encode_tensors({"step/weight": torch.zeros(3)}, {"replica": owner})
    inner = InnerState(0, "record 1", "1" * 64, content.nbytes)
    assert await desk.exchange._inherited(inner, content) == "it does not say whose it is"


async def test_without_mirrors_nothing_is_copied_but_what_is_wanted() -> None:
    desk = Desk()
    desk.has_mirrors = False
    async with asking(desk, MIRROR) as [fetch]:
        await desk.record(1)
        assert await given(fetch, 1) is None
        await desk.record(2, is_wanted=True)
        await desk.record(9)
        assert await given(fetch, 2) == desk.knew(2)


async def test_what_is_wanted_is_held_until_it_is_read_and_then_gives_way_to_the_newest() -> None:
    desk = Desk()
    async with asking(desk, MIRROR) as [fetch]:
        await desk.record(1, is_wanted=True)
        await desk.record(2)
        assert await given(fetch, 1) == desk.knew(1), "a mirror on a slow link asks late"
        await desk.record(3)
        assert await given(fetch, 1) is None
        assert await given(fetch, 3) == desk.knew(3)


async def test_what_nobody_asks_for_in_time_gives_way_too() -> None:
    desk = Desk()
    async with asking(desk, MIRROR) as [fetch]:
        await desk.record(1, is_wanted=True)
        for round in (2, 3):
            await desk.record(round)
        assert desk.exchange._kept is not None
        assert desk.exchange._kept.round == 1
        await desk.record(4)
        assert await given(fetch, 4) == desk.knew(4), "the mirror has gone on to newer records"


async def test_whoever_has_asked_and_not_read_it_all_is_waited_for_unless_it_is_lost() -> None:
    desk = Desk()
    async with asking(desk, MIRROR, SECOND) as [fetch, second]:
        await desk.record(1, is_wanted=True)
        second.reserve(MEMBER, 0, "record 1")
        await until(lambda: SECOND in desk.exchange._unread)
        assert await given(fetch, 1) == desk.knew(1)
        await desk.record(2)
        assert await given(second, 1) == desk.knew(1)
        second.reserve(MEMBER, 0, "record 1")
        await until(lambda: SECOND in desk.exchange._unread)
        desk.network.kill(SECOND)
        await until(lambda: SECOND not in desk.exchange._unread)
        await desk.record(3)
        assert await given(fetch, 3) == desk.knew(3)


def test_an_inner_state_to_go_on_with_is_taken_of_the_client_alone() -> None:
    """Whoever gives one may give a thousand, each as large as the stage allows."""
    desk = Desk()
    desk.exchange.is_client = lambda peer: peer == SECOND
    take = TakeInner(InnerState(0, "record 1", "0" * 64, 1))
    assert not desk.exchange.receive(Received(MIRROR, take))
    assert desk.exchange.receive(Received(SECOND, take))
