"""The doctor at the door of a small swarm: what is planted there is found, and gone once the remedy is applied.

The swarm is a DHT node with the records of a run, and a client that answers over TLS, all in this process.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from tests.integration import patient_doctor

from shoal.cli import runs_here
from shoal.cli.doctor import examine as examining
from shoal.cli.doctor import host_facts, joined_facts, swarm_facts
from shoal.cli.doctor.diagnosis import CheckResult, Condition, Diagnosis, Judged, skipped
from shoal.cli.doctor.examine import CHECKS, examine
from shoal.cli.doctor.facts import SwarmSeen, nothing_seen
from shoal.clock import Deadline, SystemClock
from shoal.config.load import load_with_origins
from shoal.config.shared import shared_configuration
from shoal.control import initial_peers
from shoal.control.dht import DhtNode
from shoal.control.greeting import Greeter
from shoal.control.records import ClientRecord, Record, RunRecord, StageRecord, Undialled, seal, topic_of
from shoal.control.run_question import RunTeller
from shoal.identity import Identity, create_swarm_key, namespace
from shoal.ids import RunId
from shoal.runtime.hardware import machine_name
from shoal.runtime.run_dir import found_dirs
from shoal.transport.dispatch import dispatch
from shoal.transport.endpoint import open_endpoint
from shoal.wire.handshake import PROTOCOL_VERSION

KEY, PREFIX, CLOCK = b"k" * 32, "ours", SystemClock()
CLIENT, SERVER, STRANGER = Identity(b"c" * 32), Identity(b"s" * 32), Identity(b"x" * 32)
RUN = RunRecord("ours-1", 2, 0.0)
OWN_SERVER = StageRecord((f"unix:{machine_name()}:/nowhere", "tcp:10.0.0.5:7"), 0.0, stage=0, host="box", index=1)
SMALL = load_with_origins(None, ["--model-pipeline.stages=2", "--experiment-prefix=ours"], {})[0]


@pytest.fixture
def short() -> Iterator[Path]:
    """Paths of sockets are short."""
    with tempfile.TemporaryDirectory(prefix="sh", dir="/tmp") as path:
        yield Path(path)


@dataclass
class Host:
    """A host that joins: its key file and its flags."""

    folder: Path

    def __post_init__(self) -> None:
        create_swarm_key(self.key_file, KEY)

    @property
    def key_file(self) -> Path:
        return self.folder / "swarm.key"

    def flags(self, *more: str) -> list[str]:
        given = (f"--log-dir={self.folder / 'logs'}", f"--swarm-key-file={self.key_file}", "--device=cpu")
        return [*given, *(() if any("prefix" in flag for flag in more) else (f"--experiment-prefix={PREFIX}",)), *more]

    async def examined(self, *flags: str, within_s: float = patient_doctor.LONG_S) -> Diagnosis:
        config, origins = load_with_origins(None, self.flags(*flags), {})
        return await examine(config, origins, within_s=within_s)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """Give a healthy host on which nothing else runs, and which has time for everything."""

    async def left_out(*_arguments: object) -> Judged:
        return skipped("torch takes seconds to load")

    monkeypatch.setattr(runs_here, "found_dirs", lambda: found_dirs(tmp_path))
    monkeypatch.setattr(examining, "stage_room", left_out)
    for module, limits in patient_doctor.PATIENT.items():
        for name in limits:
            monkeypatch.setattr(module, name, patient_doctor.LONG_S)
    return Host(tmp_path)


async def announce(node: DhtNode, identity: Identity, record: Record, version: int = PROTOCOL_VERSION) -> None:
    """Store a record under any identity."""
    topic, expires_unix_s = topic_of(record), CLOCK.unix_s() + 100.0
    name = namespace(KEY, PREFIX)
    assert topic is not None
    assert node._node is not None
    value = seal(identity, name, topic, record, sequence=1, expires_unix_s=expires_unix_s, version=version)
    assert await node._node.store(f"{name}/{topic}", value, expires_unix_s, subkey=str(identity.peer_id))


@dataclass
class Door:
    """A peer of a swarm, and the client that it may announce."""

    node: DhtNode
    client: ClientRecord

    @property
    def maddr(self) -> str:
        return self.node.maddrs[0]


@asynccontextmanager
async def swarm(folder: Path, *, announces_run: bool = True) -> AsyncGenerator[Door]:
    """Give a peer of a swarm with a client that answers."""
    async with (
        await DhtNode.create(
            CLIENT, namespace=namespace(KEY, PREFIX), state_dir=folder, clock=CLOCK, greeter=Greeter(KEY, PREFIX)
        ) as node,
        open_endpoint(
            identity=CLIENT,
            run_id=RunId(RUN.run_id),
            role="client",
            unix_path=folder / "client",
            swarm_key=KEY,
            tcp=("127.0.0.1", 0),
        ) as endpoint,
        anyio.create_task_group() as tasks,
    ):
        teller = RunTeller(endpoint, shared_configuration(SMALL), lambda: CLIENT.peer_id)
        tasks.start_soon(dispatch, endpoint, (teller,))
        door = Door(node, ClientRecord(endpoint.addresses, 0.0))
        if announces_run:
            await announce(node, CLIENT, RUN)
            await announce(node, CLIENT, door.client)
        yield door
        tasks.cancel_scope.cancel()


def check(found: Diagnosis, name: str) -> CheckResult:
    [result] = [each for each in found.checks if each.name == name]
    return result


def finding(found: Diagnosis, name: str, evidence: str, remedy: str, condition: str = "failed") -> None:
    result = check(found, name)
    assert result.verdict == condition, found
    assert evidence in result.evidence
    assert remedy in result.remedy


@pytest.mark.slow
async def test_a_healthy_host_at_a_healthy_swarm_has_no_finding_and_one_without_memory_for_a_stage_has_one(
    short: Path, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examining, "stage_room", host_facts.stage_room)
    async with swarm(short) as door:
        flags = (f"--initial-peers={door.maddr}", "--num-servers=1")
        cramped = await host.examined(*flags, "--servers.max-memory-bytes=16MiB")
        finding(cramped, "host.memory", "may take 16 MiB, and the smallest stage needs", "start fewer servers")
        assert [each.name for each in cramped.findings] == ["host.memory"]
        found = await host.examined(*flags)
    assert found.findings == ()
    assert found.verdict is Condition.OK
    assert [each.name for each in found.checks] == [each.name for each in CHECKS]
    skipped = {each.name for each in found.of(Condition.SKIPPED)}
    assert skipped == {"host.compiler", "host.checkpoint_dir", "host.ports", "host.hub", "swarm.dialled_back"}
    assert os.listdir(host.folder) == ["swarm.key"], "nothing is left of the examination"


@pytest.mark.slow
async def test_another_key_and_another_prefix_are_found_at_the_door_and_well_once_they_are_right(
    short: Path, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with swarm(short) as door:
        peers = f"--initial-peers={door.maddr}"
        # Of another swarm nothing is seen, however long one looks.
        monkeypatch.setattr(joined_facts, "_READ_S", 0.1)
        found = await host.examined(peers, "--experiment-prefix=theirs")
        finding(found, "swarm.prefix", "experiment_prefix = ours, not theirs", "--experiment-prefix ours")
        assert [each.name for each in found.findings] == ["swarm.prefix"]
        host.key_file.write_bytes(b"o" * 32)
        found = await host.examined(peers)
        finding(found, "swarm.key", "another swarm key than this host", "`shoal key fingerprint`")
        assert [each.name for each in found.findings] == ["swarm.key"]
        host.key_file.unlink()
        found = await host.examined(peers)
        finding(found, "key.file", "there is no swarm key", "scp ")
        assert check(found, "swarm.peers").verdict is Condition.OK, "for that no key is needed"
        assert check(found, "swarm.key").evidence == "without a swarm key nothing can be read"
        create_swarm_key(host.key_file, KEY)
        monkeypatch.setattr(joined_facts, "_READ_S", patient_doctor.LONG_S)
        assert (await host.examined(peers)).findings == ()


@pytest.mark.slow
async def test_a_swarm_without_a_run_is_found(short: Path, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined_facts, "_READ_S", 0.1)
    async with swarm(short, announces_run=False) as door:
        found = await host.examined(f"--initial-peers={door.maddr}")
        finding(found, "swarm.run", "announces no run called ours", "see on the client's host whether it runs")
        assert check(found, "swarm.client").verdict is Condition.SKIPPED
        await announce(door.node, CLIENT, RUN, version=PROTOCOL_VERSION - 1)
        found = await host.examined(f"--initial-peers={door.maddr}")
        finding(found, "swarm.protocol", "upgrade the other side", "the same version of shoal")
        assert [each.name for each in found.findings] == ["swarm.protocol"]


@pytest.mark.slow
async def test_a_client_that_is_not_where_it_says_and_keys_set_against_its_run_are_found(
    short: Path, host: Host
) -> None:
    async with swarm(short, announces_run=False) as door:
        await announce(door.node, CLIENT, RUN)
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            nowhere = ClientRecord((f"tcp:127.0.0.1:{closed.getsockname()[1]}",), 0.0)
            await announce(door.node, STRANGER, nowhere)
            found = await host.examined(f"--initial-peers={door.maddr}")
        finding(found, "swarm.client", "refused", "open the client's TCP port")
        assert [each.name for each in found.findings] == ["swarm.client"]
    async with swarm(short) as door:
        found = await host.examined(f"--initial-peers={door.maddr}", "--diloco.inner-steps=7")
        finding(found, "swarm.shared", "diloco.inner_steps = 7 (--diloco.inner-steps)", "leave these keys out")
        assert [each.name for each in found.findings] == ["swarm.shared"]


@pytest.mark.slow
async def test_a_server_of_this_host_that_the_client_cannot_dial_is_found(short: Path, host: Host) -> None:
    async with swarm(short, announces_run=False) as door:
        undialled = (Undialled(SERVER.peer_id, "10.0.0.5:7: refused"),)
        await announce(door.node, CLIENT, msgspec.structs.replace(door.client, undialled=undialled))
        await announce(door.node, SERVER, OWN_SERVER)
        await announce(door.node, CLIENT, RUN)
        found = await host.examined(f"--initial-peers={door.maddr}")
        finding(found, "swarm.dialled_back", "cannot dial server 1@box: 10.0.0.5:7: refused", "--network.data-port")
        assert [each.name for each in found.findings] == ["swarm.dialled_back"]
    async with swarm(short) as door:
        await announce(door.node, SERVER, OWN_SERVER)
        found = await host.examined(f"--initial-peers={door.maddr}")
        assert check(found, "swarm.dialled_back").verdict is Condition.OK
        assert found.findings == ()


@pytest.mark.slow
async def test_of_several_peers_each_that_is_no_way_in_is_found(short: Path, host: Host) -> None:
    async with swarm(short) as door:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            refused = f"/ip4/127.0.0.1/tcp/{closed.getsockname()[1]}/p2p/{STRANGER.peer_id}"
            stranger = door.maddr.replace(CLIENT.peer_id, STRANGER.peer_id)
            unnamed = f"/dns4/no-such-host.invalid/tcp/50000/p2p/{STRANGER.peer_id}"
            bad = {
                refused: ("refused: that host is there, but nothing listens", "see whether the run is up"),
                stranger: (f"another peer is there, {CLIENT.peer_id}", "take the one that the client's host prints"),
                unnamed: ("the name no-such-host.invalid is not known", "check how it is written"),
            }
            found = await host.examined(f"--initial-peers={','.join(bad)}")
            for evidence, remedy in bad.values():
                finding(found, "swarm.peers", evidence, remedy)
            assert check(found, "swarm.joined").evidence == "the initial peers cannot be joined at"
            found = await host.examined(f"--initial-peers={','.join((*bad, door.maddr))}")
            finding(found, "swarm.peers", "1 of 4 initial peers can be joined at", "check how it", "warning")
            assert check(found, "swarm.run").verdict is Condition.OK


async def test_a_peer_that_drops_what_is_sent_to_it_is_found_by_the_limit_that_everything_has(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_arguments: object) -> Any:
        await anyio.sleep_forever()

    monkeypatch.setattr(swarm_facts, "look", never)
    for slow in ("addresses_of", "daemon_file", "devices_of", "hub_for"):
        monkeypatch.setattr(examining, slow, never)
    found = await host.examined("--initial-peers=/ip4/192.0.2.1/tcp/50000", within_s=0.3)
    finding(found, "swarm.peers", "192.0.2.1 port 50000: no answer within 0 s", "see whether the run is up there")
    for name in ("host.addresses", "host.p2pd", "host.devices", "host.hub"):
        assert check(found, name).verdict is Condition.SKIPPED
        assert "not known within 0 s" in check(found, name).evidence
    # What needs nobody is known all the same.
    assert check(found, "key.form").verdict is Condition.OK
    assert check(found, "host.log_dir").verdict is Condition.OK


@pytest.mark.slow
async def test_a_swarm_that_says_nothing_more_is_left_when_the_time_is_over(
    short: Path, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def never(_node: DhtNode, what: str, *_more: object) -> Any:
        asked.append(what)
        over.set()
        await anyio.sleep_forever()

    over = anyio.Event()
    monkeypatch.setattr(joined_facts, "why_unreachable", lambda hop, _contexts: never(door.node, hop.peer))
    async with swarm(short) as door, anyio.create_task_group() as tasks:
        flags = host.flags(f"--initial-peers={door.maddr}")
        config, origins = load_with_origins(None, flags, {})
        facts = nothing_seen(6.0)
        tasks.start_soon(examining._see, facts, config, origins, Deadline.after(CLOCK, patient_doctor.LONG_S))
        await over.wait()
        tasks.cancel_scope.cancel()
    assert asked == [CLIENT.peer_id]
    assert isinstance(facts.swarm, SwarmSeen)
    assert isinstance(facts.client, Judged)
    assert facts.client.evidence == "the swarm has not said within 6 s what goes on there"


def test_the_limits_of_all_that_waits_add_up_to_eight_seconds() -> None:
    closing_s = 1.0
    starting_s = 1.0
    assert starting_s + examining.WITHIN_S + closing_s <= 8.0
    assert host_facts._DAEMON_TRIED_S < examining.WITHIN_S
    assert host_facts.NAME_S + host_facts._HUB_TIMEOUT_S <= examining.WITHIN_S
    assert initial_peers.DIAL_TIMEOUT_S < examining.WITHIN_S


@pytest.mark.slow
@pytest.mark.parametrize(("offset_s", "condition"), [(3600.0, "failed"), (-10.0, "warning"), (0.0, "ok")])
async def test_a_clock_that_is_off_is_found_and_by_how_much(
    short: Path, host: Host, offset_s: float, condition: str
) -> None:
    async with swarm(short) as door:
        command = [sys.executable, patient_doctor.__file__, str(offset_s), str(patient_doctor.LONG_S)]
        flags = host.flags(f"--initial-peers={door.maddr}")
        done = await anyio.run_process(
            [*command, *flags], env=os.environ | {"XDG_RUNTIME_DIR": str(short)}, stderr=None
        )
    found = msgspec.json.decode(done.stdout, type=Diagnosis)
    result = check(found, "swarm.clock")
    assert result.verdict == condition, result
    if offset_s:
        said_s = float(result.evidence.partition(" is ")[2].split()[0])
        assert said_s == pytest.approx(abs(offset_s), abs=2.0)
        assert "timedatectl set-ntp true" in result.remedy
        assert ("behind" in result.evidence) is (offset_s > 0)
