"""Real DHT nodes: records travel, forged ones do not, and no p2pd outlives its owner."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import anyio
import anyio.to_thread
import pytest
from hivemind.dht.node import DHTNode
from hivemind.p2p import PeerID
from hivemind.proto import p2pd_pb2
from tests.alongside import alongside, until

from shoal.clock import SystemClock
from shoal.control import dht, dht_daemon
from shoal.control.dht import DhtNode
from shoal.control.dht_lookup import Stored
from shoal.control.record_holders import SOME
from shoal.control.records import MAX_RECORD_BYTES, Rejection, StageRecord, seal
from shoal.control.registry import Registry
from shoal.errors import BootstrapError, ConfigError, RecordRejected
from shoal.identity import Identity, namespace

NAMESPACE = namespace(b"k" * 32, "test")
CLOCK = SystemClock()
STAGE = StageRecord(("unix:/a",), 1.0, stage=0)


async def _node(state_dir: Path, identity: Identity, peers: tuple[str, ...] = ()) -> DhtNode:
    return await DhtNode.create(identity, namespace=NAMESPACE, state_dir=state_dir, clock=CLOCK, initial_peers=peers)


def _sealed(identity: Identity, expires_unix_s: float, swarm: str = NAMESPACE) -> bytes:
    return seal(identity, swarm, "stage.0", STAGE, sequence=1, expires_unix_s=expires_unix_s)


async def test_three_nodes_share_records_and_drop_forged_ones(tmp_path: Path) -> None:
    alice, bob, mallory = (Identity.generate() for _ in range(3))
    async with await _node(tmp_path, alice) as first:
        peers = await first.visible_maddrs()
        assert first.peer_id == alice.peer_id
        assert peers
        assert all(maddr.endswith(f"/p2p/{alice.peer_id}") for maddr in peers)
        async with await _node(tmp_path, bob, peers) as second, await _node(tmp_path, mallory, peers) as third:
            expiry = CLOCK.unix_s() + 30
            assert await second.store("stage.0", _sealed(bob, expiry), expiry)
            for node in (first, second, third):
                assert [r.peer for r in await node.get(("stage.0",))] == [bob.peer_id]
            # Bob's record under Mallory's name, one of another swarm, and Mallory's own with a longer life.
            later = expiry + 5
            assert not await third.store("stage.0", _sealed(bob, later), later)
            assert not await third.store("stage.0", _sealed(mallory, later, "other"), later)
            assert not await third.store("stage.0", _sealed(mallory, expiry), later)
            raw = third._node
            assert raw is not None
            # Without our checks at the sender: the others refuse it as well.
            raw.protocol.record_validator = None
            forged = _sealed(mallory, later)
            await raw.store(f"{NAMESPACE}/stage.0", forged, later, subkey=str(alice.peer_id))
            await raw.store(f"{NAMESPACE}/stage.0", 5, later, subkey=str(alice.peer_id))
            for node in (first, second):
                assert [r.peer for r in await node.get(("stage.0",))] == [bob.peer_id]
                assert node.checker.rejected[Rejection.WRONG_SIGNER] >= 1
                assert node.checker.rejected[Rejection.MALFORMED] >= 1
            with pytest.raises(RecordRejected, match="bytes"):
                await second.store("stage.0", b"x" * (MAX_RECORD_BYTES + 1), expiry)
    assert not os.listdir(tmp_path), "no socket and no key is left"


async def test_registries_see_each_other_and_hivemind_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG, logger="shoal")
    identities = [Identity.generate() for _ in range(3)]
    async with await _node(tmp_path, identities[0]) as first:
        peers = await first.visible_maddrs()
        async with (
            await _node(tmp_path, identities[1], peers) as second,
            await _node(tmp_path, identities[2], peers) as third,
        ):
            registries = [
                Registry(node, identity, NAMESPACE, 2, CLOCK)
                for node, identity in zip((first, second, third), identities, strict=True)
            ]
            async with alongside() as tasks:
                for i, registry in enumerate(registries):
                    tasks.start_soon(registry.run)
                    registry.advertise(StageRecord(("unix:/a",), float(i), stage=i % 2))
                for registry in registries:
                    await registry.membership.wait_for(lambda v: v.num_replicas(2) == (2, 1))
                await registries[1].withdraw()
                await registries[0].membership.wait_for(lambda v: v.missing_stages(2) == (1,))
    for level in (logging.INFO, logging.WARNING):
        logging.getLogger("hivemind.dht.node").log(level, "from hivemind")
    # pytest itself hears it twice where hivemind's logger did not pass on what it is told when this test began.
    heard = {(r.levelname, r.getMessage()) for r in caplog.records if r.name.startswith("hivemind")}
    assert heard == {("WARNING", "from hivemind")}, "warnings go through our handlers, the rest nowhere"
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


async def test_what_a_process_of_the_host_has_just_got_does_for_the_next_one_that_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, topics = Identity.generate(), ("stage.0", "stage.1")
    monkeypatch.setattr(dht, "_ALONE_S", 0.0)
    async with await _node(tmp_path, alice) as node:
        expiry = CLOCK.unix_s() + 30
        assert await node.store("stage.0", _sealed(alice, expiry), expiry)
        asked: list[tuple[object, ...]] = []
        asks = node._asked

        async def counted(*wanted: Any) -> Any:
            asked.append(wanted)
            return await asks(*wanted)

        monkeypatch.setattr(node, "_asked", counted)
        for holders, age_s, number in (
            (SOME, 0.0, 1),
            (SOME, 1000.0, 1),
            (None, 1000.0, 2),  # everybody was not asked yet
            (SOME, 1000.0, 2),
            (SOME, 0.0, 3),
            (SOME, 1000.0, 3),
        ):
            assert [r.peer for r in await node.get(topics, holders, age_s)] == [alice.peer_id]
            assert len(asked) == number, (holders, age_s)
        assert await node.get(("stage.1",), SOME, 1000.0) == (), "that is another question"
        assert len(asked) == 4
        await node.revive()
        await node.get(("stage.1",), SOME, 1000.0)
        assert len(asked) == 5, "a p2pd that was started again has not answered yet"


@pytest.mark.parametrize(("age_s", "number"), [(1000.0, 1), (0.0, 3)])
async def test_what_processes_of_the_host_ask_at_the_same_time_is_asked_once(
    age_s: float, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, asked, may_answer = Identity.generate(), list[int](), anyio.Event()
    monkeypatch.setattr(dht, "_ALONE_S", 0.0)
    async with await _node(tmp_path, alice) as node:
        expiry = CLOCK.unix_s() + 30
        assert await node.store("stage.0", _sealed(alice, expiry), expiry)

        async def counted(*wanted: Any) -> Any:
            asked.append(1)
            await may_answer.wait()
            return await DhtNode._asked(node, *wanted)

        monkeypatch.setattr(node, "_asked", counted)
        found: list[int] = []

        async def read() -> None:
            found.append(len(await node.get(("stage.0",), SOME, age_s)))

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(read)
            await anyio.wait_all_tasks_blocked()
            may_answer.set()
    assert found == [1, 1, 1]
    assert len(asked) == number, "who wants to know how it is now asks, whoever has asked before"


class _FirstHangs:
    """Of what a node asks the first question has no answer until it is told so, and then none at all."""

    def __init__(self, node: DhtNode, monkeypatch: pytest.MonkeyPatch) -> None:
        self.over, self.number, self._asks = anyio.Event(), 0, node._asked
        monkeypatch.setattr(node, "_asked", self._asked)

    async def _asked(self, *wanted: Any) -> Any:
        self.number += 1
        if self.number == 1:
            await self.over.wait()
            return None
        return await self._asks(*wanted)


@pytest.mark.parametrize("is_given_up", [True, False])
async def test_a_question_without_an_answer_keeps_nobody_waiting_who_has_asked_the_same(
    is_given_up: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, found = Identity.generate(), list[int]()
    monkeypatch.setattr(dht, "_ALONE_S", 0.0)
    async with await _node(tmp_path, alice) as node, anyio.create_task_group() as tasks:
        expiry = CLOCK.unix_s() + 30
        assert await node.store("stage.0", _sealed(alice, expiry), expiry)
        asked, patience = _FirstHangs(node, monkeypatch), anyio.CancelScope()

        async def read() -> None:
            found.append(len(await node.get(("stage.0",), SOME, 1000.0)))

        async def read_with_patience() -> None:
            with patience:
                await read()

        tasks.start_soon(read_with_patience)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        assert (asked.number, found) == (1, [])
        if is_given_up:
            patience.cancel()
        else:
            asked.over.set()
        await until(lambda: 1 in found)
    assert found == ([1] if is_given_up else [0, 1])
    assert asked.number == 2


async def test_who_wants_a_newer_answer_does_not_wait_for_an_older_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice = Identity.generate()
    monkeypatch.setattr(dht, "_ALONE_S", 0.0)
    async with await _node(tmp_path, alice) as node:
        expiry = CLOCK.unix_s() + 30
        assert await node.store("stage.0", _sealed(alice, expiry), expiry)
        asked = _FirstHangs(node, monkeypatch)
        async with alongside(lambda: node.get(("stage.0",), SOME, 1000.0)):
            await anyio.wait_all_tasks_blocked()
            assert asked.number == 1
            assert [r.peer for r in await node.get(("stage.0",), SOME, 0.0)] == [alice.peer_id]


async def test_nobody_waits_for_what_a_p2pd_was_asked_that_was_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice = Identity.generate()
    monkeypatch.setattr(dht, "_ALONE_S", 0.0)
    async with await _node(tmp_path, alice) as node:
        asked = _FirstHangs(node, monkeypatch)
        async with alongside(lambda: node.get(("stage.0",), SOME, 1000.0)):
            await anyio.wait_all_tasks_blocked()
            assert asked.number == 1
            await node.revive()
            expiry = CLOCK.unix_s() + 30
            assert await node.store("stage.0", _sealed(alice, expiry), expiry)
            assert [r.peer for r in await node.get(("stage.0",), SOME, 1000.0)] == [alice.peer_id]


async def test_a_node_that_has_known_no_other_asks_its_p2pd_now_and_then_whether_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, bob, asked = Identity.generate(), Identity.generate(), list[int]()

    async def counted(daemon: Any) -> bool:
        asked.append(1)
        return await dht_daemon.answers(daemon)

    monkeypatch.setattr(dht, "answers", counted)
    async with await _node(tmp_path, alice) as node:
        expiry = CLOCK.unix_s() + 30
        assert await node.store("stage.0", _sealed(alice, expiry), expiry)
        monkeypatch.setattr(dht, "_ALONE_S", 1000.0)
        for _ in range(3):
            assert [r.peer for r in await node.get(("stage.0",), None)] == [alice.peer_id]
        assert len(asked) == 1
        monkeypatch.setattr(dht, "_ALONE_S", 0.0)
        await node.get(("stage.0",), None)
        assert len(asked) == 2
        monkeypatch.setattr(dht, "_ALONE_S", 1000.0)
        await _lose_daemon(node)
        assert await node.get(("stage.0",), None) == ()
        assert len(asked) == 3, "it runs no more"
        await node.revive()
        assert await node.get(("stage.0",), None) == ()
        assert len(asked) == 4, "it was started again"
        assert await node.store("stage.0", _sealed(alice, expiry), expiry)
        async with await _node(tmp_path, bob, await node.visible_maddrs()) as other:
            assert await other.store("stage.0", _sealed(bob, expiry), expiry)
            assert {r.peer for r in await node.get(("stage.0",), None)} == {alice.peer_id, bob.peer_id}
        assert len(asked) == 5, "it knows another one"
        assert node._node is not None
        table = node._node.protocol.routing_table
        for uid in tuple(table.peer_id_to_uid.values()):
            del table[uid]
        await node.get(("stage.0",), None)
        assert len(asked) == 6, "it has known another one, and looks for it"


async def test_a_node_that_is_alone_neither_searches_nor_looks_around_and_looks_now_and_then_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, looks = Identity.generate(), list[int]()
    async with await _node(tmp_path, alice) as node:
        visible_maddrs = node.visible_maddrs

        async def counted() -> tuple[str, ...]:
            looks.append(1)
            return await visible_maddrs()

        async def needless(*_arguments: object, **_options: object) -> None:
            raise AssertionError("nobody is there who could be asked")

        monkeypatch.setattr(node, "visible_maddrs", counted)
        for name in ("store", "get_many_by_id"):
            monkeypatch.setattr(node._node, name, needless)
        monkeypatch.setattr(node._daemon, "list_peers", needless)
        for later_s in (30, 31):
            expiry = CLOCK.unix_s() + later_s
            assert await node.store("stage.0", _sealed(alice, expiry), expiry)
            for holders in (SOME, None):
                assert [r.expires_unix_s for r in await node.get(("stage.0",), holders)] == [expiry]
        assert not await node.store("stage.0", _sealed(alice, expiry), expiry), "it has that already"
        assert len(looks) == 1


async def test_nodes_that_have_forgotten_each_other_find_each_other_again(tmp_path: Path) -> None:
    alice, bob = Identity.generate(), Identity.generate()
    async with (
        await _node(tmp_path, alice) as first,
        await _node(tmp_path, bob, await first.visible_maddrs()) as second,
    ):
        for node in (first, second):
            assert await node.get(("stage.0",)) == ()
        # As when each has not answered the other one once: hivemind asks only who is in its table.
        for node in (first, second):
            assert node._node is not None
            table = node._node.protocol.routing_table
            [uid] = table.peer_id_to_uid.values()
            del table[uid]
        expiry = CLOCK.unix_s() + 30
        await second.store("stage.0", _sealed(bob, expiry), expiry)
        while not await first.get(("stage.0",)):
            await CLOCK.sleep_s(0.1)


async def test_initial_peers_that_do_not_answer_are_named(tmp_path: Path) -> None:
    nobody = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}"
    with pytest.raises(BootstrapError, match="tcp/1/p2p"):
        await DhtNode.create(
            Identity.generate(),
            namespace=NAMESPACE,
            state_dir=tmp_path,
            clock=CLOCK,
            initial_peers=[nobody],
            bootstrap_timeout_s=0.5,
        )


async def test_a_port_that_another_program_listens_on_is_refused(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        maddr = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="is taken"):
            await DhtNode.create(
                Identity.generate(), namespace=NAMESPACE, state_dir=tmp_path, clock=CLOCK, host_maddrs=[maddr]
            )


async def test_cancelling_a_node_while_it_starts_leaves_no_process(tmp_path: Path) -> None:
    # The fixture `leaves_nothing_behind` looks for children.
    were_cancelled: list[bool] = []
    for delay_s in (0.0, 0.02, 0.1):
        with anyio.move_on_after(delay_s) as timer:
            node = await _node(tmp_path, Identity.generate())
            await node.aclose()
        # The last one may be faster than that.
        were_cancelled.append(timer.cancelled_caught)
    assert any(were_cancelled)


async def test_a_node_that_finds_nobody_but_itself_compares_clocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Behind(SystemClock):
        def unix_s(self) -> float:
            return super().unix_s() - 3600.0

    bob = Identity.generate()
    async with (
        await _node(tmp_path, Identity.generate()) as first,
        await _node(tmp_path, bob, await first.visible_maddrs()) as second,
    ):
        expiry = CLOCK.unix_s() + 60
        assert await second.store("stage.0", _sealed(bob, expiry), expiry)
        monkeypatch.setattr(dht, "SystemClock", Behind)
        assert [r.peer for r in await second.get(("stage.0",))] == [bob.peer_id]
        assert second.clock_difference_s == pytest.approx(3600.0, abs=60)


async def test_an_answer_to_a_call_that_was_given_up_makes_no_node_deaf(tmp_path: Path) -> None:
    async with await _node(tmp_path, Identity.generate()) as node:
        control = _control(node)
        messages: Any = p2pd_pb2
        to_itself = messages.CallUnaryRequest(peer=PeerID.from_base58(node.peer_id).to_bytes(), proto="", data=b"")
        # hivemind's own call, in the moment in which it has been cancelled and is not forgotten yet.
        call, answer = uuid4(), asyncio.Future[bytes]()
        control._pending_calls[call] = answer
        answer.cancel()
        await control._pending_messages.put(
            messages.PersistentConnectionRequest(callId=call.bytes, callUnary=to_itself)
        )
        await node.get(("stage.0",))
        await CLOCK.sleep_s(0.2)
        await node.get(("stage.0",))
        assert node.alive


async def test_a_store_that_is_under_way_while_its_node_is_revived_ends_quietly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice = Identity.generate()
    async with (
        await _node(tmp_path, Identity.generate()) as first,
        await _node(tmp_path, alice, await first.visible_maddrs()) as second,
    ):
        expiry = CLOCK.unix_s() + 30
        told, ended = anyio.Event(), anyio.Event()
        stored: list[bool] = []

        async def store(*_arguments: object) -> Stored:
            told.set()
            await ended.wait()
            return Stored(taken=False, everywhere=False)

        async def renew() -> None:
            stored.append(await second.store("stage.0", _sealed(alice, expiry), expiry))

        assert second._lookup is not None
        monkeypatch.setattr(second._lookup, "store", store)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(renew)
            await told.wait()
            await second._end()
            ended.set()
        assert stored == [False]
        await second.revive()
        assert await second.store("stage.0", _sealed(alice, expiry), expiry)


@pytest.mark.parametrize("holders", [None, SOME])
@pytest.mark.parametrize("cause", ["killed", "stopped", "reader", "writer"])
async def test_a_node_that_gets_no_answer_from_its_p2pd_says_so_and_can_be_revived(
    cause: str, holders: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dht_daemon, "ANSWER_TIMEOUT_S", 0.5)
    alice, bob = Identity.generate(), Identity.generate()
    async with (
        await _node(tmp_path, alice) as first,
        await _node(tmp_path, bob, await first.visible_maddrs()) as second,
    ):
        expiry = CLOCK.unix_s() + 60
        assert await first.store("stage.0", _sealed(alice, expiry), expiry)
        assert second.alive
        (pid,) = _daemons(bob.peer_id)
        match cause:
            case "killed":
                os.kill(pid, signal.SIGKILL)
            case "stopped":
                os.kill(pid, signal.SIGSTOP)
            case _:
                control = _control(second)
                (control._read_task if cause == "reader" else control._write_task).cancel()
        while second.alive:  # p2pd may still have given one answer
            await second.get(("stage.0",), holders)
        monkeypatch.undo()
        await second.revive()
        assert second.alive
        assert pid not in _daemons(bob.peer_id)
        assert [r.peer for r in await second.get(("stage.0",))] == [alice.peer_id]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_a_p2pd_that_dies_or_hangs_while_its_node_begins_is_an_error(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, create = Identity.generate(), DHTNode.create
    struck: list[int] = []

    async def strike(*arguments: Any, **settings: Any) -> DHTNode:
        struck.extend(_daemons(alice.peer_id))
        os.kill(struck[0], number)
        # On a busy machine a thread of it that has not noticed yet may still answer all that a node asks.
        await anyio.to_thread.run_sync(os.waitid, os.P_PID, struck[0], os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        return await create(*arguments, **settings)

    monkeypatch.setattr(DHTNode, "create", strike)
    with pytest.raises(BootstrapError, match=r"p2pd has ended|p2pd did not answer|Connection reset"):
        await DhtNode.create(
            alice, namespace=NAMESPACE, state_dir=tmp_path, clock=CLOCK, initial_peers=(), bootstrap_timeout_s=3.0
        )
    assert struck
    assert not _daemons(alice.peer_id)


def _control(node: DhtNode) -> Any:
    return cast(Any, node._daemon)._client.control


async def test_a_revived_node_is_found_where_it_was_and_finds_the_others_without_initial_peers(tmp_path: Path) -> None:
    first_key, second_key, third_key = (Identity.generate() for _ in range(3))
    async with await _node(tmp_path, first_key) as first:
        maddrs = await first.visible_maddrs()
        async with await _node(tmp_path, second_key, maddrs) as second:
            expiry = CLOCK.unix_s() + 30
            assert await second.store("stage.0", _sealed(second_key, expiry), expiry)
            await first.get(("stage.0",))
            await _lose_daemon(first)
            # It knows no initial peer, and has forgotten what it stored.
            await first.revive()
            assert await first.visible_maddrs() == maddrs
            assert [r.peer for r in await first.get(("stage.0",))] == [second_key.peer_id]
            async with await _node(tmp_path, third_key, maddrs) as third:
                assert [r.peer for r in await third.get(("stage.0",))] == [second_key.peer_id]


async def test_a_node_finds_back_by_its_neighbours_when_the_initial_peer_is_gone(tmp_path: Path) -> None:
    first_key, second_key, third_key = (Identity.generate() for _ in range(3))
    async with await _node(tmp_path, first_key) as first:
        maddrs = await first.visible_maddrs()
        async with (
            await _node(tmp_path, second_key, maddrs) as second,
            await _node(tmp_path, third_key, maddrs) as third,
        ):
            expiry = CLOCK.unix_s() + 30
            assert await second.store("stage.0", _sealed(second_key, expiry), expiry)
            assert await third.get(("stage.0",))
            await third.get(("stage.0",))
            await first.aclose()
            await _lose_daemon(third)
            await third.revive()
            assert [r.peer for r in await third.get(("stage.0",))] == [second_key.peer_id]


@pytest.mark.parametrize("at_once", [False, True])
async def test_nodes_that_begin_anew_when_the_initial_peer_is_gone_for_good_find_each_other(
    tmp_path: Path, at_once: bool
) -> None:
    first_key, second_key, third_key = (Identity.generate() for _ in range(3))
    async with await _node(tmp_path, first_key) as first:
        maddrs = await first.visible_maddrs()
        async with (
            await _node(tmp_path, second_key, maddrs) as second,
            await _node(tmp_path, third_key, maddrs) as third,
        ):
            expiry = CLOCK.unix_s() + 120
            assert await second.store("stage.0", _sealed(second_key, expiry), expiry)
            for node in (second, third):
                assert await node.get(("stage.0",))
            await first.aclose()
            for node in (second, third):
                await _lose_daemon(node)
            if at_once:
                async with anyio.create_task_group() as tasks:
                    for node in (second, third):
                        tasks.start_soon(_tried, node)
            else:
                with pytest.raises(BootstrapError, match="none of the initial peers answered"):
                    await second.revive()
                assert not second.alive, "it is up, but has found nobody"
                await _tried(third)
            with anyio.fail_after(120):
                while not (second.alive and third.alive):
                    for node in (second, third):
                        await _tried(node)
            assert await second.store("stage.0", _sealed(second_key, expiry + 1), expiry + 1)
            assert [r.peer for r in await third.get(("stage.0",))] == [second_key.peer_id]


async def _tried(node: DhtNode) -> None:
    with suppress(BootstrapError):
        if not node.alive:
            await node.revive()


async def test_a_node_alone_is_revived_alone_and_elsewhere_if_its_port_is_taken(tmp_path: Path) -> None:
    async with await _node(tmp_path, Identity.generate()) as node:
        (maddr,) = await node.visible_maddrs()
        await _lose_daemon(node)
        with socket.create_server(("127.0.0.1", int(maddr.split("/")[4]))):
            await node.revive()
            assert await node.visible_maddrs() != (maddr,)
        # And if those whom it knew are gone, it begins anew.
        async with await _node(tmp_path, Identity.generate(), await node.visible_maddrs()) as other:
            await other.get(("stage.0",))
            await node.get(("stage.0",))
        await _lose_daemon(node)
        with pytest.raises(BootstrapError):
            await node.revive()
        await node.revive()
        assert node.alive


async def test_a_node_whose_host_gets_another_address_is_there_and_without_a_network_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dht, "LOOK_EVERY_S", 0.0)
    key = Identity.generate()
    async with await _node(tmp_path, key) as node:
        (loopback,) = node.maddrs
        moved = loopback.replace("127.0.0.1", "192.0.2.7")
        looks = {(): loopback, (loopback, moved): moved, (moved,): moved, (loopback,): moved}
        for number, (seen, expected) in enumerate(looks.items(), 1):

            async def visible_maddrs(seen: tuple[str, ...] = seen) -> tuple[str, ...]:
                return seen

            monkeypatch.setattr(node, "visible_maddrs", visible_maddrs)
            expires_unix_s = CLOCK.unix_s() + 10 * number
            await node.store("stage.0", _sealed(key, expires_unix_s), expires_unix_s)
            assert node.maddrs == (expected,)


async def _lose_daemon(node: DhtNode) -> None:
    (pid,) = _daemons(node.peer_id)
    os.kill(pid, signal.SIGKILL)
    while node.alive:
        await CLOCK.sleep_s(0.01)


def test_p2pd_ends_by_itself_when_its_owner_is_killed(tmp_path: Path) -> None:
    program = f"""
        import anyio, sys
        from pathlib import Path
        from shoal.clock import SystemClock
        from shoal.control.dht import DhtNode
        from shoal.identity import Identity
        async def main():
            identity = Identity.generate()
            await DhtNode.create(identity, namespace="n", state_dir=Path({str(tmp_path)!r}), clock=SystemClock())
            print(identity.peer_id, flush=True)
            await anyio.sleep_forever()
        anyio.run(main, backend_options={{"use_uvloop": True}})
    """
    owner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    peer_id = owner.stdout.readline().strip()
    owner.stdout.close()
    assert len(_daemons(peer_id)) == 1
    owner.kill()
    owner.wait()
    deadline_s = CLOCK.now_s() + 4
    while _daemons(peer_id) and CLOCK.now_s() < deadline_s:
        pass
    assert not _daemons(peer_id)


def _daemons(peer_id: str) -> list[int]:
    """Return the p2pd processes that run under this identity."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes()
        except OSError:
            continue
        if b"p2pd" in arguments and f"{peer_id}.key".encode() in arguments:
            found.append(int(path.parent.name))
    return found
