"""Two hosts on one machine with a long, narrow and lossy line between them, which the kernel's own TCP has to cross.

Each host is a network namespace whose only way out is a TUN device. This program, started once a line, holds both
devices, and carries packets from one to the other as such a line would: so many bits a second each way, one queue
before it, half of the round trip on the way, and some packets lost at random. Linux's own emulation (netem) is not in
every kernel; a TUN device is.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import random
import secrets
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_MTU = 1500
_HOSTS = ("near", "far")


@dataclass(frozen=True)
class LineKind:
    """What a line is like, each way.

    Attributes:
        mbit_per_s: of IP packets, in millions of bits.
        round_trip_s: of a small packet on the empty line.
        loss: share of the packets that are lost.
        queue_s: time for which packets wait at most before the line; what comes then is lost.
        seed: of the losses.
    """

    mbit_per_s: float = 20.0
    round_trip_s: float = 0.15
    loss: float = 0.0
    queue_s: float = 0.15
    seed: int = 0


@dataclass(frozen=True)
class FarHosts:
    """The hosts `near` and `far` at the ends of a line."""

    tag: str

    def address(self, host: str) -> str:
        """Return the host's address."""
        return f"10.78.0.{_HOSTS.index(host) + 1}"

    def prefix(self, host: str) -> tuple[str, ...]:
        """Return what runs a command on the host."""
        return ("ip", "netns", "exec", f"{self.tag}-{host}")


@contextlib.contextmanager
def far_hosts(kind: LineKind) -> Iterator[FarHosts]:
    """Make both hosts and the line (root); nothing of them is left afterwards."""
    made = FarHosts(f"sh{secrets.token_hex(3)}")
    names = [f"{made.tag}-{host}" for host in _HOSTS]
    line: subprocess.Popen[str] | None = None
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        command = [sys.executable, __file__, json.dumps({"namespaces": names, "kind": asdict(kind)})]
        line = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert line.stdout is not None
        assert line.stdout.readline() == "ready\n"
        for name, host in zip(names, _HOSTS, strict=True):
            _ip("-n", name, "address", "add", f"{made.address(host)}/24", "dev", "line")
            _ip("-n", name, "link", "set", "line", "mtu", str(_MTU), "up")
        yield made
    finally:
        if line is not None:
            line.communicate("")
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


class _OneWay:
    """What is on its way from one device to the other."""

    def __init__(self, kind: LineKind, receiver: int, seed: int) -> None:
        self._kind = kind
        self._receiver = receiver
        self._chance = random.Random(seed)
        self._free_s = 0.0
        self._under_way: deque[tuple[float, bytes]] = deque()

    def take(self, packet: bytes, now_s: float) -> None:
        """Queue a packet, unless the queue is full or the packet is one of those that get lost."""
        begins_s = max(now_s, self._free_s)
        if begins_s - now_s > self._kind.queue_s:
            return
        self._free_s = begins_s + len(packet) * 8 / (self._kind.mbit_per_s * 1e6)
        # It is lost on the line, not before it: it has used it.
        if self._chance.random() >= self._kind.loss:
            self._under_way.append((self._free_s + self._kind.round_trip_s / 2, packet))

    def deliver(self, now_s: float) -> float | None:
        """Write what has arrived; return when the next packet does."""
        while self._under_way and self._under_way[0][0] <= now_s:
            with contextlib.suppress(OSError):  # the host is gone, or its device is down
                os.write(self._receiver, self._under_way.popleft()[1])
        return self._under_way[0][0] if self._under_way else None


def _device_in(namespace: str, own_fd: int) -> int:
    """Return the descriptor of a new TUN device `line` of a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}", "rb") as there:
        if libc.setns(there.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
    try:
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", b"line", _IFF_TUN | _IFF_NO_PI))
    finally:
        libc.setns(own_fd, _CLONE_NEWNET)
    return device


def main() -> None:
    """Be the line, until the standard input ends."""
    wanted = json.loads(sys.argv[1])
    kind = LineKind(**wanted["kind"])
    with open("/proc/self/ns/net", "rb") as own:
        near, far = (_device_in(name, own.fileno()) for name in wanted["namespaces"])
    ways = {near: _OneWay(kind, far, kind.seed), far: _OneWay(kind, near, kind.seed + 1)}
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    poll = select.epoll()
    for descriptor in (sys.stdin.fileno(), near, far):
        poll.register(descriptor, select.EPOLLIN)
    while True:
        dues = [due for way in ways.values() if (due := way.deliver(time.monotonic())) is not None]
        # epoll counts in milliseconds, and rounds up.
        wait_s = max(0.0, min(dues) - time.monotonic()) if dues else -1
        for descriptor, _ in poll.poll(wait_s):
            if descriptor == sys.stdin.fileno():
                return
            with contextlib.suppress(BlockingIOError):
                while True:
                    ways[descriptor].take(os.read(descriptor, 1 << 16), time.monotonic())


if __name__ == "__main__":
    main()
