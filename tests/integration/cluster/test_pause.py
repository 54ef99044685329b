"""A run that its user pauses: nothing begins and nothing ends, and what it comes to is what it would have come to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import anyio.lowlevel
import pytest
from tests.alongside import alongside, until

from shoal.client.client import Client
from shoal.clock import SystemClock
from shoal.wire.messages.control import StartRound
from shoal.wire.messages.feed import Acknowledge, Lease
from shoal.wire.messages.round import Close
from shoal.wire.messages.step import Open
from shoal_lab import Cluster

from .conftest import MakeCluster, make_config, run_undisturbed
from .test_client_restart import CONFIG

PAUSE_S = 600.0
SLOTS = 2


class LeapingClock(SystemClock):
    """Some minutes pass at once."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def now_s(self) -> float:
        return super().now_s() + self.ahead_s


class User:
    """Pauses a run, sees it stand still for ten minutes, and lets it go on."""

    def __init__(
        self,
        cluster: Cluster,
        clock: LeapingClock,
        meanwhile: Callable[[], Awaitable[None]] = anyio.lowlevel.checkpoint,
    ) -> None:
        self.cluster = cluster
        self.clock = clock
        self.meanwhile = meanwhile
        self.paused = anyio.Event()
        self.is_through = False

    def pause(self) -> None:
        assert self.client._pausing.pause("me")
        self.paused.set()

    async def run(self) -> None:
        await self.paused.wait()
        await until(self.stands)
        await self.meanwhile()
        await until(self.stands)
        before = self.counts()
        self.clock.ahead_s += PAUSE_S
        # Somebody looks whether the round is over, as for a trainer that is done.
        self.client.reports.finished.notify()
        await anyio.wait_all_tasks_blocked()
        await anyio.sleep(0.05)
        assert self.stands()
        assert self.counts() == before
        assert self.client._pausing.resume("me")
        self.is_through = True

    @property
    def client(self) -> Client:
        return self.cluster.client

    def stands(self) -> bool:
        """Whether the trainers of all slots wait for a batch: all that was under way has ended.

        They know the client as well, which takes up the round of the one before it within some seconds.
        """
        waiting = {message.trainer: message.generation for _, message in self.cluster.host.data_service._early}
        slots = self.client.slots
        return len(slots.present) == len(waiting) == SLOTS and waiting == dict(slots.generations)

    def counts(self) -> tuple[int, ...]:
        totals = self.client.ledger.totals
        return totals.progress.round, totals.progress.steps, totals.rounds, len(self.cluster.view.replicas)


@pytest.mark.parametrize(
    ("kind", "after"),
    [
        (StartRound, 0),  # before the first step
        pytest.param(Lease, 5, marks=pytest.mark.slow),
        (Open, 9),  # in a step
        pytest.param(Acknowledge, 11, marks=pytest.mark.slow),
        (Close, 4),  # a round is being averaged
    ],
)
async def test_a_run_that_was_paused_for_ten_minutes_comes_to_the_same(
    make_cluster: MakeCluster, kind: type, after: int
) -> None:
    expected = await run_undisturbed(make_cluster, CONFIG)
    clock = LeapingClock()
    async with make_cluster(CONFIG, clock=clock) as cluster:
        user = User(cluster, clock)
        cluster.when(kind, action=user.pause, after=after)
        async with alongside(user.run):
            result = await cluster.run()
    assert user.is_through
    assert result.summary["seconds_paused"] >= PAUSE_S
    assert result.summary["samples_per_s"] > expected.summary["samples"] / PAUSE_S
    assert result.hashes == expected.hashes
    assert result.audit == expected.audit
    assert result.summary["eval_losses"] == expected.summary["eval_losses"]


@pytest.mark.parametrize("dies", ["client", "data_server", "trainer"])
async def test_a_pause_outlasts_deaths_on_the_clients_host(make_cluster: MakeCluster, dies: str) -> None:
    expected = await run_undisturbed(make_cluster, CONFIG)
    clock = LeapingClock()
    async with make_cluster(CONFIG, clock=clock) as cluster:

        async def kill() -> None:
            killed = cluster.client
            if dies == "client":
                cluster.kill_client()
            elif dies == "trainer":
                cluster.kill_trainer(0)
            # With its client: the next one knows of the pause only from the diary, and has to say it.
            if dies != "trainer":
                cluster.kill_data_server()
                cluster.restart_data_server()
            if dies == "client":
                await until(lambda: cluster.client is not killed)

        user = User(cluster, clock, kill)
        cluster.when(Open, action=user.pause, after=9)
        async with alongside(user.run):
            result = await cluster.run()
    assert user.is_through
    assert result.hashes == expected.hashes
    assert (result.audit.duplicates, result.audit.missing) == (0, 0)


async def test_a_pause_is_no_time_in_which_trainers_are_waited_for(make_cluster: MakeCluster) -> None:
    config = make_config(
        run={"deterministic": False, "first_deadline_s": PAUSE_S / 2}, diloco={"inner_steps": 4, "outer_steps": 3}
    )
    clock = LeapingClock()
    async with make_cluster(config, clock=clock) as cluster:
        user = User(cluster, clock)
        cluster.when(Open, action=user.pause, after=9)
        async with alongside(user.run):
            result = await cluster.run()
    assert user.is_through
    assert (result.audit.duplicates, result.audit.missing) == (0, 0)
    assert result.summary["steps"] == 3 * 4 * SLOTS, "no round has ended without its steps"
    assert max(cluster.client.ledger.totals.durations_s) < PAUSE_S, "later rounds are waited for as if it had not been"
