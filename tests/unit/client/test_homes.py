"""A round's pipelines: how long one is waited for that is gone since the round before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import anyio
import anyio.lowlevel
from tests.alongside import until

from shoal.client.homes import Homes
from shoal.ids import PeerId, StageIndex
from shoal.swarm.view import Replica, SwarmView
from shoal.wire.messages.base import Hop

FOREVER_S = 1e9


class Swarm:
    """The replicas that are there, and the homes that are made of them."""

    def __init__(self, *names: str) -> None:
        self.is_asked_often = False
        membership = SimpleNamespace(view=SwarmView(), eager=self._eager)
        self.homes = Homes(
            num_stages=2,
            endpoint=cast(Any, None),
            coordinator=cast(Any, SimpleNamespace(holders=None)),
            membership=cast(Any, membership),
            trainers=cast(Any, SimpleNamespace(present={})),
            reassignment=cast(Any, SimpleNamespace(usable=lambda _view, _holders: self.view)),
        )
        self.has(*names)

    @contextlib.contextmanager
    def _eager(self) -> Iterator[None]:
        self.is_asked_often = True
        yield
        self.is_asked_often = False

    def has(self, *names: str) -> None:
        """Replicas named after their stages, as in a0 b1."""
        self.view = SwarmView(
            tuple(
                Replica(Hop(PeerId(name), (f"unix:/{name}",)), 0.0, stage=StageIndex(int(name[1])))
                for name in sorted(names, key=lambda name: name[1])
            )
        )
        self.homes.tell_trainers()


async def test_the_first_round_begins_with_what_is_there() -> None:
    swarm = Swarm("a0", "b1", "c1")
    await swarm.homes.form(FOREVER_S)
    assert [pipeline.peers for pipeline in swarm.homes.pipelines] == [("a0", "b1")]


async def test_a_spare_that_comes_a_moment_later_trains_in_the_round() -> None:
    swarm = Swarm("a0", "b1", "c0", "d1")
    await swarm.homes.form(0.0)
    swarm.has("a0", "b1", "c0")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(swarm.homes.form, FOREVER_S)
        await until(lambda: swarm.is_asked_often)
        swarm.has("a0", "b1", "c0", "e1")
    assert {pipeline.peers for pipeline in swarm.homes.pipelines} == {("a0", "b1"), ("c0", "e1")}


async def test_who_does_not_come_back_is_waited_for_once_and_not_for_long() -> None:
    swarm = Swarm("a0", "b1", "c0", "d1")
    await swarm.homes.form(0.0)
    swarm.has("a0", "b1", "c0")
    await swarm.homes.form(0.04)
    assert len(swarm.homes.pipelines) == 1
    await swarm.homes.form(FOREVER_S)
    assert len(swarm.homes.pipelines) == 1


async def test_a_change_that_also_cancels_the_round_comes_before_the_round_begins() -> None:
    swarm, cancelled = Swarm("a0", "b1"), anyio.Event()
    await swarm.homes.form(0.0)
    swarm.has("a0")
    has_begun = False

    async def begin() -> None:
        nonlocal has_begun
        await swarm.homes.form(0.0)
        has_begun = True

    async with anyio.create_task_group() as round, anyio.create_task_group() as watch:

        async def watched() -> None:
            await cancelled.wait()
            round.cancel_scope.cancel()

        round.start_soon(begin)
        watch.start_soon(watched)
        await anyio.wait_all_tasks_blocked()
        swarm.has("a0", "e1")
        cancelled.set()
    assert not has_begun


async def test_without_any_pipeline_it_is_waited_for_however_long() -> None:
    swarm = Swarm("a0", "b1")
    await swarm.homes.form(0.0)
    swarm.has("a0")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(swarm.homes.form, 0.04)
        with anyio.move_on_after(0.1) as scope:
            await anyio.sleep_forever()
        assert scope.cancelled_caught
        assert not swarm.homes.pipelines
        swarm.has("a0", "e1")
    assert [pipeline.peers for pipeline in swarm.homes.pipelines] == [("a0", "e1")]


async def test_whoever_trainers_are_told_of_in_a_round_is_remembered_until_the_next_one() -> None:
    swarm = Swarm("a0", "b1")
    swarm.homes._endpoint = cast(Any, SimpleNamespace(post=lambda *_: None))
    swarm.homes._trainers.present[0] = Hop(PeerId("trainer"), ())
    await swarm.homes.form(0.0)
    swarm.has("a0", "b1", "c1")
    swarm.has("a0", "b1")
    assert swarm.homes.named == {"a0", "b1", "c1"}
    await swarm.homes.form(0.0)
    swarm.has("a0", "b1")
    assert swarm.homes.named == {"a0", "b1"}
