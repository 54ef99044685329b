"""The copies of a mirror: what is fetched when, how much of it, and what is left for later."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch
from tests.alongside import alongside, until
from torch import nn

from shoal.averaging import stage_fetch
from shoal.averaging.contents import Contents
from shoal.averaging.replica_state import Contribution, OuterState, outer_optimizer, outer_step
from shoal.averaging.stage_fetch import StageFetch
from shoal.averaging.state_donor import StateDonor
from shoal.checkpoint.model_layout import StageLayout
from shoal.clock import SystemClock
from shoal.config.diloco import OuterOptimConfig
from shoal.ids import Ballot, PeerId, StageIndex
from shoal.mirror.copies import StageCopies
from shoal.optim.flat import FlatLayout
from shoal.optim.fragments import Fragment
from shoal.runtime.waking import Signal
from shoal.swarm.round_effects import Fetch
from shoal.swarm.view import Replica, SwarmView
from shoal.transport.base import Received
from shoal.transport.dispatch import dispatch
from shoal.transport.memory import MemoryEndpoint, MemoryNetwork
from shoal.wire.messages.round import Record
from shoal.wire.messages.transfer import ContentKind, Want

LAYOUT = StageLayout.of(nn.Linear(3, 2))
WITH_STEP_SIZES = LAYOUT._replace(
    parameters=FlatLayout.of_named(
        [("units.head.linear.bias", torch.empty(6)), ("units.head.linear.input_quantiser.step", torch.empty(2))]
    )
)
STATE_BYTES, AVERAGE_BYTES = 64, 32
OUTER_CONFIG = OuterOptimConfig(sgd_lr=0.5, sgd_momentum=0.9, sgd_nesterov=True)
NO_BUFFERS = torch.empty(0), torch.empty(0, dtype=torch.int64)


def state(value: float) -> OuterState:
    return OuterState(torch.full((8,), value), torch.full((8,), -1.0), *NO_BUFFERS)


def order(round: int, of: OuterState, chain: str = "", previous_chain: str | None = None) -> Fetch:
    """To fetch the state of record `round` of a chain."""
    before = f"{chain if previous_chain is None else previous_chain}{round - 1}"
    record = Record("run", round, Ballot(1, PeerId("C"), 1), before, (), (), (), {})
    return Fetch(record, f"{chain}{round}", of.hashes())


class SameThread:
    """Computes where a device's thread would."""

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


class Wants:
    """Notes what is asked for, before the contents answer."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ContentKind]] = []

    def receive(self, event: Received) -> bool:
        if isinstance(event.message, Want):
            self.seen.append((event.message.name.stage, event.message.name.kind))
        return False

    def peer_lost(self, peer: PeerId) -> None: ...


class Seen:
    """A membership whose view is set by hand."""

    def __init__(self, servers: Sequence[MemoryEndpoint]) -> None:
        replicas = (Replica(each.hop, 0.0, stage=StageIndex(stage)) for stage, each in enumerate(servers))
        self.view = SwarmView(tuple(replicas))
        self.changes = Signal()

    async def changed(self) -> SwarmView:
        await self.changes.wait()
        return self.view


@dataclass
class Host:
    """A mirror's copies, and a server of each stage."""

    copies: StageCopies
    fetch: StageFetch
    donors: list[StateDonor]
    contents: list[Contents]
    wants: Wants
    seen: Seen
    memory: SimpleNamespace
    notices: list[str]
    held: list[tuple[int, str]]
    offers: Contents
    tasks: Any = None
    serving: list[int] = field(default_factory=list)

    def serve(self, stage: int) -> None:
        self.tasks.start_soon(self.contents[stage].run)

    async def until_held(self, *held: tuple[int, str]) -> None:
        await until(lambda: self.held[-len(held) :] == list(held))


@asynccontextmanager
async def host(*serving: int, layout: StageLayout = LAYOUT, num_fragments: int = 1) -> AsyncIterator[Host]:
    network, clock = MemoryNetwork(seed=0), SystemClock()
    mine = network.endpoint(PeerId("mirror"))
    servers = [network.endpoint(PeerId(f"server{stage}")) for stage in range(2)]
    contents = [Contents(server, clock, chunk_bytes=8) for server in servers]
    offers, seen, wants = Contents(mine, clock, chunk_bytes=8), Seen(servers), Wants()
    fetch = StageFetch(offers, seen, num_fragments=num_fragments)  # type: ignore[arg-type]
    held, notices, memory = list[tuple[int, str]](), list[str](), SimpleNamespace(free_bytes=0)
    copies = StageCopies(
        contents=offers,
        fetch=fetch,
        membership=seen,  # type: ignore[arg-type]
        outer=OUTER_CONFIG,
        device=SameThread(),
        read_layouts=lambda: [layout, layout],
        free_bytes=lambda: memory.free_bytes,
        on_held=lambda *each: held.append(each),
        on_idle=lambda: None,
        notice=notices.append,
    )
    donors = [StateDonor(each, stage) for stage, each in enumerate(contents)]
    made = Host(copies, fetch, donors, contents, wants, seen, memory, notices, held, offers)
    async with alongside(offers.run, copies.run) as tasks:
        made.tasks = tasks
        tasks.start_soon(dispatch, mine, (fetch, offers))
        for server, each in zip(servers, contents, strict=True):
            tasks.start_soon(dispatch, server, (wants, each))
        for stage in serving:
            made.serve(stage)
        yield made


@pytest.mark.parametrize("layout", [LAYOUT, WITH_STEP_SIZES], ids=["plain", "with step sizes"])
async def test_what_is_held_is_offered_and_leads_on_by_the_averages_of_one_round(layout: StageLayout) -> None:
    async with host(0, layout=layout) as mirror:
        first = state(1.0)
        average = Contribution(torch.full((8,), 0.25), *NO_BUFFERS)
        second = outer_step(outer_optimizer(OUTER_CONFIG, layout.parameters), first, average)
        mirror.donors[0].hold(1, "1", first)
        mirror.copies.order(0, order(1, first))
        await mirror.until_held((0, "1"))
        assert mirror.fetch.fetched_bytes == STATE_BYTES
        mirror.donors[0].hold(2, "2", second, average)
        mirror.copies.order(0, order(2, second))
        await mirror.until_held((0, "1"), (0, "2"))
        assert mirror.fetch.fetched_bytes == STATE_BYTES + AVERAGE_BYTES
    assert "2" in {name.digest for name in mirror.offers.offered}
    assert "1" not in {name.digest for name in mirror.offers.offered}


async def test_the_averages_of_a_fragment_lead_on_as_well() -> None:
    async with host(0, num_fragments=2) as mirror:
        # All elements are in the first fragment, which the second round averages, and the third one nothing.
        first = state(1.0)
        second = outer_step(
            outer_optimizer(OUTER_CONFIG, LAYOUT.parameters),
            first,
            Contribution(torch.full((8,), 0.25), *NO_BUFFERS),
            Fragment(0, 2),
        )
        third = second._replace(momentum_N=second.momentum_N.clone())
        mirror.donors[0].hold(1, "1", first)
        mirror.copies.order(0, order(1, first))
        await mirror.until_held((0, "1"))
        mirror.donors[0].hold(2, "2", second, Contribution(torch.full((8,), 0.25), *NO_BUFFERS))
        mirror.copies.order(0, order(2, second))
        await mirror.until_held((0, "1"), (0, "2"))
        mirror.donors[0].hold(3, "3", third, Contribution(torch.empty(0), *NO_BUFFERS))
        mirror.copies.order(0, order(3, third))
        await mirror.until_held((0, "2"), (0, "3"))
        assert mirror.fetch.fetched_bytes == STATE_BYTES + AVERAGE_BYTES


async def test_one_stage_is_fetched_at_a_time() -> None:
    async with host(1) as mirror:
        for stage in range(2):
            mirror.donors[stage].hold(1, "1", state(1.0))
            mirror.copies.order(stage, order(1, state(1.0)))
        await until(lambda: mirror.wants.seen)
        await anyio.wait_all_tasks_blocked()
        assert mirror.wants.seen == [(0, ContentKind.STATE)]
        mirror.serve(0)
        await mirror.until_held((0, "1"), (1, "1"))


async def test_what_nobody_gives_waits_for_a_change_and_the_other_stages_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stage_fetch, "_LOOK_S", 0.001)
    monkeypatch.setattr(stage_fetch, "_NOBODY_S", 0.005)
    async with host(0, 1) as mirror:
        for stage in range(2):
            mirror.copies.order(stage, order(1, state(1.0)))
        mirror.donors[1].hold(1, "1", state(1.0))
        await mirror.until_held((1, "1"))
        assert mirror.copies._in_vain.keys() == {0}
        mirror.donors[0].hold(1, "1", state(1.0))
        mirror.seen.changes.notify()
        await mirror.until_held((1, "1"), (0, "1"))


async def test_a_newer_record_of_the_chain_waits_until_what_is_under_way_is_here() -> None:
    async with host() as mirror:
        mirror.copies.order(0, order(1, state(1.0)))
        await until(lambda: mirror.wants.seen)
        mirror.copies.order(0, order(2, state(2.0)))
        mirror.donors[0].hold(1, "1", state(1.0))
        mirror.serve(0)
        await mirror.until_held((0, "1"))
        mirror.donors[0].hold(2, "2", state(2.0))
        await mirror.until_held((0, "1"), (0, "2"))


@pytest.mark.parametrize("is_restored", [True, False])
async def test_a_record_that_does_not_follow_is_fetched_in_place_of_what_is_under_way(
    is_restored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_fetch, "_NOBODY_S", math.inf)
    async with host(0) as mirror:
        mirror.copies.order(0, order(1, state(1.0), "a"))
        await until(lambda: mirror.wants.seen)
        other = order(2, state(2.0), "b", "a" if is_restored else "b")
        mirror.copies.order(0, Fetch(other.record, other.record_hash, other.hashes, starts_anew=is_restored))
        mirror.donors[0].hold(2, "b2", state(2.0))
        await mirror.until_held((0, "b2"))


async def test_a_host_without_the_memory_takes_no_state_and_says_so_once_until_it_has_it() -> None:
    async with host(0, 1) as mirror:
        needed_bytes = 2 * STATE_BYTES + 2 * STATE_BYTES
        mirror.memory.free_bytes = needed_bytes - 1
        for stage in range(2):
            mirror.donors[stage].hold(1, "1", state(1.0))
            mirror.copies.order(stage, order(1, state(1.0)))
        await until(lambda: mirror.notices)
        await anyio.wait_all_tasks_blocked()
        said = "\n".join(mirror.notices)
        assert said.count("the mirror takes no state") == 1
        assert "run `shoal mirror` on a host that has it" in said
        assert mirror.wants.seen == []
        mirror.memory.free_bytes = needed_bytes
        mirror.donors[0].hold(2, "2", state(2.0))
        mirror.copies.order(0, order(2, state(2.0)))
        await mirror.until_held((0, "2"))
