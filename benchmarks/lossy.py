#!/usr/bin/env python3
"""Send tensors over a line with delay and loss, with the kernel's own TCP, and measure how much of it is used.

    python benchmarks/lossy.py                                    20 Mbit/s, 150 ms, 0.5 % loss
    python benchmarks/lossy.py --mbit 100 --ms 60 --loss 0.001 --seconds 60 --json lossy.json

Two hosts in network namespaces (root) with a TUN device each; a program of ours carries the packets between them
(tests/e2e/far_line.py). `shoal` is a connection as between servers of two hosts, mutual TLS included, which sends
tensors of 256 kB as fast as it can; `cubic` and `bbr` are plain sockets with that congestion control, which the kernel
of the sender decides. The rate counts what has arrived after the first five seconds. A small message is said
ten times a second meanwhile: the time until it is heard is measured too.

Exit code: 0 if shoal uses at least 0.7 of the line; else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anyio
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.e2e.far_line import FarHosts, LineKind, far_hosts

from shoal.clock import SystemClock
from shoal.identity import Identity
from shoal.ids import RunId, StepKey
from shoal.transport.base import Received
from shoal.transport.dispatch import dispatch
from shoal.transport.endpoint import open_endpoint
from shoal.wire.messages import Hop, Traffic
from shoal.wire.messages.step import Forward, Refused
from shoal.wire.tensors import WireTensor

GOAL = 0.7
PORT = 47000
TENSOR_BYTES = 256_000
SKIPPED_S = 5.0
KEY = StepKey(0, 0, 0, 0)
NEAR, FAR = Identity(b"near".ljust(32, b"\0")), Identity(b"far".ljust(32, b"\0"))


class _Inbox:
    """What the receiver has heard.

    Attributes:
        arrived: when, and how many bytes of tensors, since the first one.
        said_ms: how old small messages were.
    """

    def __init__(self) -> None:
        self.arrived: list[tuple[float, int]] = []
        self.said_ms: list[float] = []

    def receive(self, event: Received) -> bool:
        """Note it."""
        now_s = time.monotonic()
        if isinstance(event.message, Refused):
            self.said_ms.append((now_s - float(event.message.reason)) * 1e3)
        else:
            self.arrived.append((now_s, sum(tensor.num_bytes for tensor in event.tensors)))
        return True

    def peer_lost(self, peer: object) -> None:
        """Nothing waits for it."""


def rate_of(arrived: list[tuple[float, int]]) -> float:
    """Return the Mbit/s of what has arrived after the first seconds."""
    begun_s = arrived[0][0] + SKIPPED_S
    late = [(at_s, num_bytes) for at_s, num_bytes in arrived if at_s >= begun_s]
    return sum(num_bytes for _, num_bytes in late[1:]) * 8 / 1e6 / (late[-1][0] - late[0][0])


async def receive(address: str, seconds: float) -> dict[str, Any]:
    """Listen, and return what has come."""
    async with open_endpoint(
        identity=FAR, run_id=RunId("lossy"), role="far", unix_path=None, swarm_key=bytes(32), tcp=(address, PORT)
    ) as endpoint:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        inbox = _Inbox()
        with anyio.move_on_after(seconds + 5.0):
            await dispatch(endpoint, [inbox])
        return {"mbit": rate_of(inbox.arrived), "said_ms": inbox.said_ms}


async def send(address: str, seconds: float) -> None:
    """Send tensors, and small messages between them."""
    clock = SystemClock()
    async with open_endpoint(
        identity=NEAR, run_id=RunId("lossy"), role="near", unix_path=None, swarm_key=bytes(32)
    ) as endpoint:
        endpoint.introduce(Hop(FAR.peer_id, (f"tcp:{address}:{PORT}",)))
        tensor = WireTensor("uint8", (TENSOR_BYTES,), memoryview(bytes(TENSOR_BYTES)))

        async def talk() -> None:
            while True:
                endpoint.post(FAR.peer_id, Refused(KEY, repr(time.monotonic())))
                await clock.sleep_s(0.1)

        with anyio.move_on_after(seconds):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(talk)
                while True:
                    endpoint.post(FAR.peer_id, Forward(KEY, 0), (tensor,), Traffic.STATE)
                    await endpoint.drained(FAR.peer_id)


def receive_raw(address: str, seconds: float) -> dict[str, Any]:
    """Take what one plain connection brings."""
    arrived: list[tuple[float, int]] = []
    with socket.create_server((address, PORT)) as server:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        taken, _ = server.accept()
        taken.settimeout(seconds)
        with taken, contextlib.suppress(TimeoutError):
            until_s = time.monotonic() + seconds
            while time.monotonic() < until_s and (got := taken.recv(1 << 18)):
                arrived.append((time.monotonic(), len(got)))
    return {"mbit": rate_of(arrived)}


def send_raw(address: str, seconds: float, congestion: str) -> None:
    """Send over one plain connection."""
    block = bytes(1 << 16)
    with socket.socket() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
        sock.connect((address, PORT))
        sock.settimeout(seconds)
        until_s = time.monotonic() + seconds
        with contextlib.suppress(TimeoutError, ConnectionError):  # the receiver may have seen enough
            while time.monotonic() < until_s:
                sock.sendall(block)


def measure(hosts: FarHosts, way: str, seconds: float) -> dict[str, Any]:
    """Send one way, and return what the receiver has measured."""
    command = (sys.executable, __file__, "--end")
    to = (f"--address={hosts.address('far')}", f"--seconds={seconds}", f"--way={way}")
    with subprocess.Popen(
        [*hosts.prefix("far"), *command, "receive", *to], stdout=subprocess.PIPE, text=True
    ) as receiver:
        assert receiver.stdout is not None
        if receiver.stdout.readline() != "ready\n":
            raise SystemExit("the receiver does not listen")
        subprocess.run([*hosts.prefix("near"), *command, "send", *to], check=True)
        return json.loads(receiver.stdout.read())


def end(arguments: argparse.Namespace) -> None:
    """Be one end of a measurement."""
    address, seconds, way = arguments.address, arguments.seconds, arguments.way
    if arguments.end == "send":
        if way == "shoal":
            anyio.run(send, address, seconds, backend_options={"use_uvloop": True})
        else:
            send_raw(address, seconds, way)
    else:
        found = (
            anyio.run(receive, address, seconds, backend_options={"use_uvloop": True})
            if way == "shoal"
            else receive_raw(address, seconds)
        )
        sys.stdout.write(json.dumps(found) + "\n")


def main() -> int:
    """Measure, print, and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=20.0, help="of the line, each way")
    parser.add_argument("--ms", type=float, default=150.0, help="of a round trip")
    parser.add_argument("--loss", type=float, default=0.005, help="share of the packets")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each measurement")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures there")
    for own in ("--end", "--address", "--way"):
        parser.add_argument(own, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.end:
        end(arguments)
        return 0
    rates: dict[str, list[float]] = {"shoal": [], "bbr": [], "cubic": []}
    said_ms: list[float] = []
    for turn in range(arguments.repeat):
        kind = LineKind(arguments.mbit, arguments.ms / 1e3, arguments.loss, arguments.ms / 1e3, seed=2 * turn)
        for way, found in rates.items():
            with far_hosts(kind) as hosts:
                measured = measure(hosts, way, arguments.seconds)
            found.append(measured["mbit"])
            said_ms += measured.get("said_ms", [])
    table = Table("", "Mbit/s", "range", "of the line")
    for way, found in rates.items():
        middle = statistics.median(found)
        table.add_row(way, f"{middle:.1f}", f"{min(found):.1f} .. {max(found):.1f}", f"{middle / arguments.mbit:.2f}")
    console = Console()
    console.print(
        f"{arguments.mbit:g} Mbit/s, {arguments.ms:g} ms, {arguments.loss:.2%} loss, {arguments.repeat} times"
    )
    console.print(table)
    p99_ms = statistics.quantiles(said_ms, n=100)[-1]
    console.print(f"small messages meanwhile: half within {statistics.median(said_ms):.0f} ms, p99 {p99_ms:.0f} ms")
    share = statistics.median(rates["shoal"]) / arguments.mbit
    if arguments.json is not None:
        figures = {"rates_mbit": rates, "share": share, "said_p99_ms": p99_ms}
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if share >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
