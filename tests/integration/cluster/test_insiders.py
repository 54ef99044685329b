"""A member with the key says whatever its keys on the wire allow, to every role: no role ends of it.

What it says of training is believed (SECURITY.md), so a run may stand still or be taken over. But each process that is
told something impossible has to go on, and to be there for the others.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, get_args

import anyio
import anyio.lowlevel
import msgspec
import pytest
from msgspec import inspect

from shoal.control.records import MirrorRecord, StageRecord
from shoal.errors import ControlError, RemoteProtocolError, RoundAborted
from shoal.ids import Ballot, PeerId, StepKey
from shoal.runtime.waking import Signal
from shoal.swarm import round_joins, sample_ranges
from shoal.swarm.round_orders import Order
from shoal.transport.base import Received
from shoal.transport.memory import MemoryEndpoint
from shoal.wire.limits import TENSORS_OF
from shoal.wire.messages import Message
from shoal.wire.messages.base import SampleRange
from shoal.wire.messages.control import Heartbeat, RunOver, StartRound, TrainerHello
from shoal.wire.messages.inner import InnerState, TakeInner
from shoal.wire.messages.round import Close, CommitRecord, PrepareRecord, Propose, Record, SignedRecord
from shoal.wire.messages.step import Fence, Open, Opened
from shoal.wire.tensors import WireTensor
from shoal_lab import Cluster
from shoal_lab.process import Process

from .conftest import MakeCluster, make_config

MALLORY = PeerId("mallory")
KINDS = tuple(kind for kind in get_args(Message) if kind not in (Heartbeat, RunOver))
FITTING = ("0" * 64, "step.committed", "server", "loss/train", "a", "stop", "")
"""What some form of a text takes."""


class Nonsense:
    """Messages of all forms, of values that the forms allow: the least, the most, and those of the run."""

    def __init__(self, seed: int, cluster: Cluster) -> None:
        self._random = random.Random(seed)
        self._cluster = cluster

    def message(self, kind: type) -> Any:
        return self._value(inspect.type_info(kind))

    def tensors(self, kind: type) -> list[WireTensor]:
        number = self._random.choice(list(TENSORS_OF.get(kind, range(1))))
        return [self._tensor() for _ in range(number)]

    def _tensor(self) -> WireTensor:
        dtype, size = self._random.choice([("float32", 4), ("uint8", 1), ("int64", 8), ("bool", 1), ("bfloat16", 2)])
        shape = self._random.choice([(), (0,), (1,), (2, 16), (2, 16, 16), (4, 16, 16), (1, 1, 1, 1, 1, 1, 1, 1)])
        count = 1
        for each in shape:
            count *= each
        return WireTensor(dtype, shape, memoryview(self._random.choice([b"\xff", b"\x00", b"a"]) * (count * size)))

    def _peers(self) -> list[str]:
        cluster = self._cluster
        return [MALLORY, cluster.client_peer, *(server.peer for server in cluster.servers), "trainer0", "trainer1", ""]

    def _texts(self) -> list[str]:
        client, server = self._cluster.client, self._cluster.servers[0]
        hashes = [client._coordinator.record_hash, server.replica.member.base.record_hash]
        return [*self._peers(), *hashes, *FITTING, "\0", "\udcff".encode(errors="replace").decode(), "x" * 64]

    def _ballot(self) -> Ballot:
        ballot = self._cluster.client._coordinator.ballot
        number = self._random.choice([0] * 200 + [1, ballot.number, ballot.number + (1 << 31), 1 << 62])
        mine = Ballot(number, MALLORY, self._random.choice([0, 1, 1 << 62]))
        return self._random.choice([ballot, ballot, mine])

    def _key(self) -> StepKey:
        pick = self._random.choice
        entries = [entry.key for server in self._cluster.servers for entry in server.replica.worker.log]
        entries += [key for server in self._cluster.servers for key in server.replica.worker._machine.open]
        known = pick(entries) if entries else StepKey(0, 1, 0, 0)
        changes = {pick(StepKey._fields): pick([0, 1, 2, 3, 1 << 62])}
        if changes.get("trainer", 0) > 4095:
            changes = {}
        return pick([known, known, known._replace(**changes)])

    def _signed(self) -> SignedRecord:
        standing = self._cluster.client._coordinator.standing
        real = None if standing is None else standing.signed
        body = msgspec.msgpack.encode(self.message(Record))
        forged = SignedRecord(body, PeerId(self._random.choice(self._peers())), bytes(64))
        return self._random.choice([real or forged, forged, SignedRecord(b"\x91" * 1000, MALLORY, b"", b"")])

    def _value(self, kind: inspect.Type) -> Any:
        pick = self._random.choice
        match kind:
            case inspect.StructType(cls=cls) if cls is SignedRecord:
                return self._signed()
            case inspect.NamedTupleType(cls=cls) if cls is Ballot:
                return self._ballot()
            case inspect.NamedTupleType(cls=cls) if cls is StepKey:
                return self._key()
            case inspect.StructType():
                return kind.cls(*(self._value(field.type) for field in kind.fields))
            case inspect.NamedTupleType():
                return kind.cls(*(self._value(field.type) for field in kind.fields))
            case inspect.UnionType():
                return self._value(pick(kind.types))
            case inspect.VarTupleType() | inspect.ListType():
                most = 3 if kind.max_length is None else min(3, kind.max_length)
                return tuple(self._value(kind.item_type) for _ in range(pick(range(most + 1))))
            case inspect.DictType():
                return {self._value(kind.key_type): self._value(kind.value_type) for _ in range(pick(range(3)))}
            case inspect.IntType():
                least = -(1 << 63) if kind.ge is None else kind.ge
                most = (1 << 63) if kind.le is None and kind.lt is None else kind.le if kind.lt is None else kind.lt - 1
                round = self._cluster.client._coordinator.round
                return pick([each for each in (least, most, 0, 1, 2, 3, 4, round, round - 1) if least <= each <= most])
            case inspect.FloatType():
                ends = [each for each in (kind.ge, kind.le) if each is not None]
                return float(pick(ends + [0.0, 1.0] + ([] if ends else [float("nan"), float("inf"), -1e308])))
            case inspect.BoolType():
                return pick([True, False])
            case inspect.StrType():
                most = 1 << 20 if kind.max_length is None else kind.max_length
                fits = [text for text in self._texts() if (kind.min_length or 0) <= len(text) <= most]
                return pick([text for text in fits if kind.pattern is None or re.search(kind.pattern, text)])
            case inspect.BytesType():
                most = 64 if kind.max_length is None else kind.max_length
                return pick([b"", b"\x00" * min(32, most), b"\x91" * min(64, most)])
            case inspect.LiteralType():
                return pick(kind.values)
            case inspect.EnumType():
                return pick(list(kind.cls))
            case inspect.NoneType():
                return None
            case _:
                raise AssertionError(kind)


def targets(cluster: Cluster) -> Iterator[MemoryEndpoint]:
    host = cluster.host
    yield host.client_process.endpoint
    yield from (trainer.endpoint for trainer in host.launcher.trainers.values())
    yield from (server.process.endpoint for server in cluster.servers)
    yield from (mirror.process.endpoint for mirror in cluster.mirrors)


async def overhear(process: Process) -> None:
    """Take what is said to it, also that a connection has ended: then it may speak again."""
    async for _ in process.endpoint.events():
        pass


async def is_never_believed(process: Process) -> None:
    """Fail as soon as somebody opens a step for it, or gives it steps to train."""
    async for event in process.endpoint.events():
        if isinstance(event, Received):
            assert not isinstance(event.message, Opened | StartRound), event


async def talk(cluster: Cluster, mallory: Process, seed: int, said: list[Message]) -> None:
    """Say something of every kind to everybody, again and again."""
    nonsense, order = Nonsense(seed, cluster), random.Random(seed)
    cluster.announce(MALLORY, StageRecord(mallory.endpoint.addresses, 9.0, stage=order.choice([0, 1, None])))
    if order.random() < 0.5:
        cluster.announce(MALLORY, MirrorRecord(mallory.endpoint.addresses, 9.0))
    while True:
        for kind in order.sample(KINDS, len(KINDS)):
            for target in list(targets(cluster)):
                message, tensors = nonsense.message(kind), nonsense.tensors(kind)
                said[:] = [*said[-20:], message]
                mallory.endpoint.introduce(target.hop)
                with suppress(RemoteProtocolError):  # what its receiver's decoder refuses goes no further
                    mallory.endpoint.post(target.peer_id, message, tensors)
                await anyio.lowlevel.checkpoint()
        await anyio.sleep(0.001)


@pytest.mark.wrong_arithmetic
@pytest.mark.parametrize("seed", range(6))
async def test_no_role_ends_of_what_a_member_says(make_cluster: MakeCluster, seed: int) -> None:
    config = make_config(diloco={"outer_steps": 3}, health={"lost_state_after_s": 0.3})
    said: list[Message] = []
    async with make_cluster(config) as cluster:
        cluster.start_mirror()
        with anyio.move_on_after(8.0):
            async with anyio.create_task_group() as tasks:
                mallory = Process(cluster.network, MALLORY)
                cluster.network.elsewhere.add(MALLORY)
                tasks.start_soon(overhear, mallory)
                tasks.start_soon(talk, cluster, mallory, seed, said)
                try:
                    await cluster.run()
                except* (ControlError, RoundAborted):
                    pass  # it was told that another client leads, or gets nowhere
                tasks.cancel_scope.cancel()
        ended = [server.process.error for server in cluster.servers]
        ended += [mirror.process.error for mirror in cluster.mirrors]
        ended += [cluster.host.data_process.error]
        assert [error for error in ended if error is not None] == [], said


async def test_a_server_takes_what_only_its_client_says_of_nobody_else(make_cluster: MakeCluster) -> None:
    async with make_cluster(make_config(diloco={"outer_steps": 1})) as cluster:
        await cluster.run()
        monitor = cluster.servers[0].monitor
        for message in (Fence({0: 5}), TakeInner(InnerState(0, "", "", 1))):
            assert not monitor.receive(Received(MALLORY, message))
            assert monitor.receive(Received(cluster.client_peer, message))


async def test_nobody_takes_the_place_of_a_trainer(make_cluster: MakeCluster) -> None:
    """A member opens steps of all slots, of later generations and in those that there are, before the trainers do, and
    says to the client that it is them."""
    async with make_cluster(make_config(diloco={"outer_steps": 2})) as cluster:
        mallory = Process(cluster.network, MALLORY)
        cluster.network.elsewhere.add(MALLORY)

        async def open_steps() -> None:
            number = 0
            while True:
                number += 1
                for server in cluster.servers:
                    base = server.replica.member.base
                    path = [next(s for s in cluster.servers if s.stage == stage) for stage in range(2)]
                    path[server.stage] = server
                    hops = tuple(each.process.endpoint.hop for each in path)
                    mallory.endpoint.introduce(server.process.endpoint.hop)
                    for slot, generation in [(0, 1 << 62), (1, 1), (5, 1)]:
                        key = StepKey(slot, generation, 1000 + number, 0)
                        said = Open(key, base.round + 1, hops, (2, 2), (2, 2), (), base.record_hash)
                        mallory.endpoint.post(server.peer, said)
                mallory.endpoint.introduce(cluster.host.client_process.endpoint.hop)
                for slot, generation in [(0, 1), (1, 1), (0, 2), (1, 2)]:
                    hello = TrainerHello(slot, generation, mallory.endpoint.hop)
                    mallory.endpoint.post(cluster.client_peer, hello)
                await anyio.sleep(0.01)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(is_never_believed, mallory)
            tasks.start_soon(open_steps)
            result = await cluster.run()
            tasks.cancel_scope.cancel()
        keys = {line.entry.key for lines in result.steps.values() for line in lines}
        assert max(key.number for key in keys) < 1000
        assert (result.audit.missing, result.audit.duplicates) == (0, 0)
        assert result.audit.steps_lost == {0: 0, 1: 0}


@pytest.mark.wrong_arithmetic
async def test_a_server_that_makes_up_scattered_samples_loses_its_place_in_the_round_and_nobody_else(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (round_joins, sample_ranges):
        monkeypatch.setattr(module, "MAX_RECORDED", 50)
    async with make_cluster(make_config()) as cluster:
        liar = cluster.servers[-1]
        machine = liar.replica.worker._machine
        tell = machine.join

        def lie() -> None:
            tell()
            samples = tuple(SampleRange(100 * machine.round + each, 0, 1) for each in range(60))
            entry = machine.log[-1]
            key = entry.key._replace(number=1 << 20)
            machine.log.append(msgspec.structs.replace(entry, key=key, samples=samples, num_samples=60))

        monkeypatch.setattr(machine, "join", lie)
        result = await cluster.run()
        out = [{peer for stage in record.stages for peer in stage.members} for record in result.records]
        assert all(liar.peer not in members for members in out)
        assert max(item.pass_number for record in result.records for item in record.samples) < 100
        assert result.audit.missing == 0


async def test_what_a_member_has_overheard_of_rounds_is_worth_nothing_when_it_says_it_again(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All orders of the client, to every server, later ones before earlier ones, and those of old records as well."""
    async with make_cluster(make_config(diloco={"outer_steps": 3})) as cluster:
        mallory = Process(cluster.network, MALLORY)
        cluster.network.elsewhere.add(MALLORY)
        client = cluster.host.client_process.endpoint
        post: Callable[..., None] = client.post
        heard: list[Message] = []
        news = Signal()

        def overheard(peer: PeerId, message: Message, *more: Any) -> None:
            post(peer, message, *more)
            if isinstance(message, Order):
                heard.append(message)
                news.notify()

        async def say_again() -> None:
            while True:
                coming = news.coming
                for server in cluster.servers:
                    for message in reversed(heard[:5] + heard[-10:]):
                        mallory.endpoint.introduce(server.process.endpoint.hop)
                        mallory.endpoint.post(server.peer, message)
                        await anyio.lowlevel.checkpoint()
                await coming.wait()

        monkeypatch.setattr(client, "post", overheard)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(overhear, mallory)
            tasks.start_soon(say_again)
            result = await cluster.run()
            tasks.cancel_scope.cancel()
        assert {type(message) for message in heard} >= {Close, Propose, PrepareRecord, CommitRecord}
        assert [record.round for record in result.records] == [1, 2, 3]
        assert (result.audit.missing, result.audit.duplicates) == (0, 0)
        refused = [server.process.endpoint.counters["protocol.violated"] for server in cluster.servers]
        assert min(refused) > 0
