"""Attacks a swarm from outside and from inside until its standard input ends; says "enough" after some of each kind.

Arguments: JSON object with `ports` (TCP, on loopback), `initial_peers`, `swarm_key` (hex), `prefix`, `state_dir`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from shoal.clock import SystemClock
from shoal.control.dht import DhtNode
from shoal.control.records import ClientRecord, GoneRecord, MirrorRecord, MonitorRecord, RunRecord, StageRecord, seal
from shoal.identity import Identity, namespace
from shoal.ids import RunId
from shoal.transport.tls import tls_contexts
from shoal.wire.handshake import PROTOCOL_VERSION, Hello, encode_handshake

TIMEOUT_S = 3.0
KINDS = ("garbage", "wrong_key", "other_run", "other_version", "silence", "record")
ENOUGH = 6
PICKLE = b"cfractions\nFraction\n(I1\nI3\ntR."
"""Whoever loads it makes an object of a class of its choice."""
EVIL = ("tcp:127.0.0.1:9",)


class Attacker:
    """Threads that dial the ports, and a node of the DHT that stores forged records."""

    def __init__(self, aims: dict[str, Any]) -> None:
        self.aims = aims
        self.key = bytes.fromhex(aims["swarm_key"])
        self.over = threading.Event()
        self.done: Counter[str] = Counter()
        self._is_told = False

    def flood(self) -> None:
        """Take one kind of attack after the other to every port."""
        kinds: list[Callable[[socket.socket], None]] = [
            self.garbage,
            self.wrong_key,
            self.other_run,
            self.other_version,
            self.silence,
        ]
        while not self.over.is_set():
            for port in self.aims["ports"]:
                for kind in kinds:
                    with suppress(OSError), socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as one:
                        kind(one)
                    self.did(kind.__name__)
                    self.over.wait(0.01)

    def did(self, kind: str) -> None:
        """Count an attack; says so once there have been some of each kind."""
        self.done[kind] += 1
        if not self._is_told and all(self.done[each] >= ENOUGH for each in KINDS):
            self._is_told = True
            sys.stdout.write("enough\n")
            sys.stdout.flush()

    def garbage(self, one: socket.socket) -> None:
        one.sendall(PICKLE + os.urandom(2000))
        one.recv(100)

    def silence(self, one: socket.socket) -> None:
        one.settimeout(0.2)
        one.recv(100)

    def wrong_key(self, one: socket.socket) -> None:
        self.greet(one, os.urandom(32), PROTOCOL_VERSION)

    def other_run(self, one: socket.socket) -> None:
        self.greet(one, self.key, PROTOCOL_VERSION)

    def other_version(self, one: socket.socket) -> None:
        self.greet(one, self.key, PROTOCOL_VERSION + 1)

    def greet(self, one: socket.socket, key: bytes, version: int) -> None:
        identity = Identity.generate()
        with tls_contexts(identity, key).client.wrap_socket(one) as secure:
            secure.sendall(encode_handshake(Hello(RunId("evil"), identity.peer_id, "evil", (), 1, 2, 0), version))
            while secure.recv(1000):
                pass

    async def forge(self) -> None:
        """Store records in the names of all peers that this insider can see, and under its own name for others."""
        swarm, clock, me = namespace(self.key, self.aims["prefix"]), SystemClock(), Identity.generate()
        topics = ("monitor", "mirror", "run", "client", "stage.0", "stage.1")
        async with await DhtNode.create(
            me,
            namespace=swarm,
            state_dir=Path(self.aims["state_dir"]),
            clock=clock,
            initial_peers=self.aims["initial_peers"],
        ) as node:
            raw: Any = node._node
            while not self.over.is_set():
                victims = {(o.topic, o.peer) for o in await node.get(topics)}
                validator, raw.protocol.record_validator = raw.protocol.record_validator, None
                expires = clock.unix_s() + 100
                for topic, peer in victims:
                    for record in (_evil(topic), GoneRecord()):
                        value = seal(me, swarm, topic, record, sequence=1 << 52, expires_unix_s=expires)
                        for forged in (value, b"junk", os.urandom(9000), PICKLE):
                            await raw.store(f"{swarm}/{topic}", forged, expires, subkey=str(peer))
                            self.did("record")
                raw.protocol.record_validator = validator
                # What it has kept itself would hide the true ones from it.
                raw.protocol.storage = type(raw.protocol.storage)()
                await anyio.sleep(0.3)


def _evil(topic: str) -> Any:
    match topic:
        case "monitor":
            return MonitorRecord(EVIL, 0.0)
        case "mirror":
            return MirrorRecord(EVIL, 0.0, held_round=9999)
        case "client":
            return ClientRecord(EVIL, 0.0)
        case "run":
            return RunRecord("evil", 2, 0.0)
        case _:
            return StageRecord(EVIL, 0.0, stage=int(topic.removeprefix("stage.")))


async def main() -> None:
    attacker = Attacker(json.loads(sys.argv[1]))
    async with anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(anyio.to_thread.run_sync, attacker.flood)
        tasks.start_soon(attacker.forge)
        await anyio.to_thread.run_sync(sys.stdin.read)
        attacker.over.set()


if __name__ == "__main__":
    anyio.run(main, backend_options={"use_uvloop": True})
