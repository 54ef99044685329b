"""Real DHT nodes: the processes of a host share one, and when it is gone one of them has the next."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.alongside import alongside

from shoal.clock import SystemClock
from shoal.control import host_node, node_service
from shoal.control.dht import DhtNode
from shoal.control.host_node import HostNode, NodePlace, beside, served
from shoal.control.record_checker import RecordChecker
from shoal.control.records import StageRecord, seal
from shoal.control.registry import Registry
from shoal.errors import BootstrapError
from shoal.identity import Identity, namespace
from shoal.runtime.process_info import command_line, descendants
from shoal.telemetry.registry import MetricRegistry

NAMESPACE = namespace(b"k" * 32, "test")
CLOCK = SystemClock()


def num_p2pd(pid: int) -> int:
    return sum("p2pd" in command_line(stat.pid)[0] for stat in descendants(pid) if stat.state != "Z")


async def start(
    directory: Path,
    identity: Identity,
    peers: Sequence[str],
    gone: Sequence[str] = (),
    *,
    strays: bool = False,
    at: str = "/ip4/127.0.0.1/tcp/0",
) -> DhtNode:
    return await DhtNode.create(
        identity,
        namespace=NAMESPACE,
        state_dir=directory,
        clock=CLOCK,
        initial_peers=tuple(peers),
        host_maddrs=(at,),
        bootstrap_timeout_s=5.0,
        strays=strays,
        gone=gone,
    )


@asynccontextmanager
async def joined(directory: Path, identity: Identity) -> AsyncIterator[HostNode]:
    async with opened(directory, identity) as node:
        await node.join(20.0)
        yield node


@asynccontextmanager
async def opened(directory: Path, identity: Identity, known: Sequence[str] = ()) -> AsyncIterator[HostNode]:
    checker = RecordChecker(NAMESPACE, str.encode, CLOCK, MetricRegistry())

    async def start_own(peers: Sequence[str], gone: Sequence[str]) -> DhtNode:
        return await start(directory, identity, peers, gone, strays=True)

    def tell(maddrs: tuple[str, ...]) -> None:
        assert maddrs

    async with HostNode(directory, identity.peer_id, checker, CLOCK, start_own, known, tuple, tell) as node:
        yield node


async def test_a_host_has_one_node_and_the_next_one_when_it_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="shoal")
    first, second, third = (Identity.generate() for _ in range(3))
    stop_serving = anyio.Event()

    async def serve(node: DhtNode) -> None:
        async with served(node, NodePlace(tmp_path)):
            await stop_serving.wait()

    async with await start(tmp_path, first, ()) as monitor, alongside(partial(serve, monitor)):
        gone = monitor.maddrs
        await anyio.wait_all_tasks_blocked()
        # Whoever uses a node ends before the node.
        async with opened(tmp_path, second, gone) as one, opened(tmp_path, third, gone) as other, alongside() as tasks:
            for node in (one, other):
                await node.join(20.0)
            assert num_p2pd(os.getpid()) == 1
            assert one.maddrs == other.maddrs == gone
            registries = [
                Registry(node, identity, NAMESPACE, 2, CLOCK) for node, identity in ((one, second), (other, third))
            ]
            for stage, registry in enumerate(registries):
                tasks.start_soon(registry.run)
                registry.advertise(StageRecord(("unix:/a",), 1.0, stage=stage))
            for registry in registries:
                await registry.membership.wait_for(lambda view: view.num_replicas(2) == (1, 1))
            found = await monitor.get(("stage.0", "stage.1"))
            assert {record.peer for record in found} == {second.peer_id, third.peer_id}
            stop_serving.set()
            await monitor.aclose()
            with anyio.fail_after(60.0):
                # What was stored is gone with the node: both are announced anew, and found.
                for registry in registries:
                    registry.membership.lost(second.peer_id)
                    registry.membership.lost(third.peer_id)
                for registry in registries:
                    await registry.membership.wait_for(lambda view: view.num_replicas(2) == (1, 1))
            assert num_p2pd(os.getpid()) == 1
            assert one.maddrs == other.maddrs != gone
            assert sum(record.getMessage() == "dht.taken_over" for record in caplog.records) == 1


async def test_a_role_that_is_cancelled_still_says_that_it_is_gone(tmp_path: Path) -> None:
    first, second = Identity.generate(), Identity.generate()
    async with await start(tmp_path, first, ()) as monitor, anyio.create_task_group() as tasks:
        watcher = Registry(monitor, first, NAMESPACE, 2, CLOCK)
        tasks.start_soon(watcher.run)
        role = anyio.CancelScope()

        async def serve() -> None:
            async with served(monitor, NodePlace(tmp_path)):
                await anyio.Event().wait()

        async def live() -> None:
            with role:
                async with joined(tmp_path, second) as node:
                    registry = Registry(node, second, NAMESPACE, 2, CLOCK)
                    async with anyio.create_task_group() as own:
                        own.start_soon(registry.run)
                        registry.advertise(StageRecord(("unix:/a",), 1.0, stage=0))
                        try:
                            await anyio.Event().wait()
                        finally:
                            await registry.withdraw()

        tasks.start_soon(serve)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(live)
        with anyio.fail_after(60.0):
            await watcher.membership.wait_for(lambda view: view.num_replicas(2) == (1, 0))
            role.cancel()
            await watcher.membership.wait_for(lambda view: view.num_replicas(2) == (0, 0))
        tasks.cancel_scope.cancel()
    assert num_p2pd(os.getpid()) == 0


async def test_whoever_comes_to_a_host_without_a_node_has_it(tmp_path: Path) -> None:
    first, second = Identity.generate(), Identity.generate()
    async with joined(tmp_path, first) as one, joined(tmp_path, second) as other:
        assert isinstance(one._node, DhtNode)
        assert other.maddrs == one.maddrs


async def test_another_process_is_given_time_to_start_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = NodePlace(tmp_path)
    assert holder.hold()
    assert holder.hold(), "as long as it wants"
    checker, peer = RecordChecker(NAMESPACE, str.encode, CLOCK, MetricRegistry()), Identity.generate().peer_id
    never: Any = None  # no node of its own is started
    async with HostNode(tmp_path, peer, checker, CLOCK, never, (), tuple, never) as node:
        with pytest.raises(BootstrapError, match="is being started by another process"):
            await node.revive()
    monkeypatch.setattr(host_node, "_START_PATIENCE_S", 0.0)
    async with joined(tmp_path, Identity.generate()) as node, joined(tmp_path, Identity.generate()) as other:
        assert node.alive
        assert other.maddrs == node.maddrs
        assert num_p2pd(os.getpid()) == 1
    holder.release()


async def test_the_place_of_a_process_that_is_frozen_is_passed_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_service, "_WORD_TIMEOUT_S", 0.5)
    frozen = NodePlace(tmp_path)
    assert frozen.hold()
    async with (
        await anyio.create_unix_listener(frozen.socket_path),
        joined(tmp_path, Identity.generate()) as node,
        joined(tmp_path, Identity.generate()) as other,
    ):
        assert node.alive
        assert other.maddrs == node.maddrs
        assert num_p2pd(os.getpid()) == 1
    frozen.release()


async def test_a_monitor_that_comes_back_to_a_node_of_another_role_joins_it(tmp_path: Path) -> None:
    async with joined(tmp_path, Identity.generate()) as node:
        place = NodePlace(tmp_path)
        assert await beside(place, CLOCK) == node.maddrs
        async with await start(tmp_path, Identity.generate(), await beside(place, CLOCK)) as monitor:
            assert monitor.alive
            async with served(monitor, place):
                assert await beside(NodePlace(tmp_path), CLOCK) == node.maddrs, "one serves"
    alone = NodePlace(tmp_path)
    assert await beside(alone, CLOCK) == ()
    assert not NodePlace(tmp_path).hold(), "it is about to serve"
    alone.release()


async def test_the_first_peers_are_not_waited_for_by_whoever_knows_better(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    async with await start(there, Identity.generate(), ()) as node:
        gone_for_good = (*node.maddrs, "/no/address", "neither")
    first, second, third = (Identity.generate() for _ in range(3))
    async with await start(here, first, ()) as monitor, opened(here, third, gone_for_good) as after:
        async with served(monitor, NodePlace(here)):
            await after.join(20.0)
        await monitor.aclose()
        with anyio.fail_after(60.0):
            while not (after.alive and isinstance(after._node, DhtNode)):
                try:
                    await after.revive()
                except BootstrapError:
                    await anyio.sleep(0.1)
        async with opened(here, second, gone_for_good) as other:
            await other.join(20.0)
            assert other.maddrs == after.maddrs


async def test_whoever_takes_over_finds_the_node_of_before_when_it_is_there_again(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    first, second = Identity.generate(), Identity.generate()
    async with await start(there, first, ()) as node:
        gone = node.maddrs
    async with await start(here, second, (), gone) as after:
        assert after.alive, "nobody is waited for"
        async with await start(there, first, (), at=gone[0].partition("/p2p/")[0]) as back:
            expiry = CLOCK.unix_s() + 30
            record = StageRecord(("unix:/a",), 1.0, stage=0)
            value = seal(second, NAMESPACE, "stage.0", record, sequence=1, expires_unix_s=expiry)
            with anyio.fail_after(25.0):
                while not await back.get(("stage.0",)):
                    await after.get(("stage.0",))
                    await after.store("stage.0", value, expiry)
                    expiry += 0.001
                    value = seal(second, NAMESPACE, "stage.0", record, sequence=1, expires_unix_s=expiry)
                    await anyio.sleep(0.1)


async def test_who_takes_over_and_reaches_nobody_looks_for_the_others(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    far = Identity.generate()
    async with await start(there, far, ()) as node:
        known = node.maddrs
    async with opened(here, Identity.generate(), known) as alone:
        with pytest.raises(BootstrapError, match="reaches nobody yet"):
            await alone.revive()
        async with await start(there, far, (), at=known[0].partition("/p2p/")[0]):
            with anyio.fail_after(20.0):
                while not alone.alive:
                    try:
                        await alone.revive()
                    except BootstrapError:
                        await anyio.sleep(0.1)
