"""Hosts on one machine: network namespaces on a switch, each with its own loopback, address and runtime directory.

They share processes' numbers and files, as containers on one volume would, but no socket: Unix sockets lie in a runtime
directory that each host has for itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

# Mounted over the same path on every host, as /tmp is: an address that one host means is not there on another.
_OWN_RUNTIME_DIR = 'mount -t tmpfs -o mode=0700 none "$XDG_RUNTIME_DIR" && exec "$@"'

# Of setns(2), unshare(2), mount(2) and umount(2).
_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x00020000
_MS_REC, _MS_SLAVE, _MNT_DETACH = 0x4000, 0x80000, 2

_NOBODY = "02:00:00:00:00:01"

_SNIFFER = """
import json, select, socket, sys
markers = [m.encode() for m in sys.argv[1:]]
seen, packets = dict.fromkeys(sys.argv[1:], 0), 0
sniffer = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
sniffer.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
print("ready", flush=True)
while True:
    readable, _, _ = select.select([sniffer, sys.stdin], [], [])
    if sniffer in readable:
        packet = sniffer.recv(1 << 17)
        packets += 1
        for name, marker in zip(sys.argv[1:], markers):
            seen[name] += marker in packet
    elif sys.stdin in readable:
        break
print(json.dumps({"packets": packets, "seen": seen}))
"""


def why_impossible() -> str | None:
    """Return why this machine cannot make network namespaces, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2"
    name = f"sh{secrets.token_hex(3)}"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return f"network namespaces cannot be made here: {made.stderr.strip()}" if made.returncode else None


def _prefix_of(namespace: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", namespace, "sh", "-c", _OWN_RUNTIME_DIR, "sh")


def namespace_of(prefix: Sequence[str]) -> str | None:
    """Return the namespace in which a command runs that has this prefix; None unless that is the prefix of a `Lan`."""
    return prefix[3] if len(prefix) > 3 and tuple(prefix) == _prefix_of(prefix[3]) else None


def enter(namespace: str, runtime_dir: str) -> None:
    """Do what that prefix does for a command: have this process, which has one thread, be on the host.

    Raises:
        OSError: there is no such namespace, or this process may not.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def require(failed: int) -> None:
        if failed:
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")

    with open(f"/run/netns/{namespace}", "rb") as there:
        require(libc.setns(there.fileno(), _CLONE_NEWNET))
    require(libc.unshare(_CLONE_NEWNS))
    require(libc.mount(b"", b"/", b"none", _MS_SLAVE | _MS_REC, None))
    # It shows the devices of the network in which it was mounted.
    require(libc.umount2(b"/sys", _MNT_DETACH))
    require(libc.mount(namespace.encode(), b"/sys", b"sysfs", 0, None))
    require(libc.mount(b"none", runtime_dir.encode(), b"tmpfs", 0, b"mode=0700"))


@dataclass(frozen=True)
class Lan:
    """Hosts that can reach each other, and nobody else."""

    tag: str
    hosts: tuple[str, ...]

    def address(self, host: str) -> str:
        """Return the host's address."""
        return f"10.77.0.{self.hosts.index(host) + 1}"

    def prefix(self, host: str) -> tuple[str, ...]:
        """Return what runs a command on the host; its environment has to have XDG_RUNTIME_DIR."""
        return _prefix_of(self.namespace(host))

    def namespace(self, host: str) -> str:
        """Return the name of the host's namespace."""
        return f"{self.tag}-{host}"

    def add_home(self, host: str, address: str) -> None:
        """Give the host a second network of its own, which leads nowhere else; others may use the same address."""
        name = self.namespace(host)
        _ip("-n", name, "link", "add", "home", "type", "veth", "peer", "name", "nobody")
        _ip("-n", name, "address", "add", f"{address}/24", "dev", "home")
        for link in ("home", "nobody"):
            _ip("-n", name, "link", "set", link, "up")

    def add_address(self, host: str, address: str) -> None:
        """Give the host one more address in the common network."""
        _ip("-n", self.namespace(host), "address", "add", f"{address}/24", "dev", "eth0")

    def move(self, host: str, address: str) -> None:
        """Give the host another address in the common network in place of its only one, as DHCP may."""
        _ip("-n", self.namespace(host), "address", "flush", "dev", "eth0", "scope", "global")
        self.add_address(host, address)

    def set_link(self, host: str, *, up: bool) -> None:
        """Put the host's network cable in, or take it out."""
        _ip("-n", self.namespace(host), "link", "set", "eth0", "up" if up else "down")

    def set_way(self, sender: str, receiver: str, *, is_open: bool) -> None:
        """Let what one host sends to another arrive, or get lost on its way without a word; the way back is another.

        It is sent to a hardware address that nobody has, so this needs no filter that a kernel might lack.
        """
        neighbour = (self.address(receiver), "dev", "eth0")
        if is_open:
            _ip("-n", self.namespace(sender), "neighbour", "del", *neighbour)
        else:
            lost = ("lladdr", _NOBODY, "nud", "permanent")
            _ip("-n", self.namespace(sender), "neighbour", "replace", *neighbour, *lost)

    def set_rate(self, host: str, rate: str | None) -> None:
        """Let the host's link carry so much each way ("1mbit"); None: as much as it can."""
        ends = ((self.namespace(host), "eth0"), (self.namespace("switch"), f"port{self.hosts.index(host)}"))
        for name, device in ends:
            queue = ("dev", device, "root")
            if rate is None:
                _tc("-n", name, "qdisc", "del", *queue)
            else:
                _tc("-n", name, "qdisc", "add", *queue, "tbf", "rate", rate, "burst", "16kb", "latency", "400ms")

    def link_bytes(self, host: str) -> tuple[int, int]:
        """Return the bytes that the host's only link has received and sent."""
        [link] = _json("-n", self.namespace(host), "-s", "link", "show", "eth0")
        return link["stats64"]["rx"]["bytes"], link["stats64"]["tx"]["bytes"]

    @contextlib.contextmanager
    def sniffed(self, *markers: str) -> Iterator[dict[str, Any]]:
        """Look at every packet that passes the switch; afterwards, the counts are in what this yields."""
        found: dict[str, Any] = {}
        command = ["ip", "netns", "exec", self.namespace("switch"), sys.executable, "-c", _SNIFFER, *markers]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sniffer:
            assert sniffer.stdout is not None
            try:
                assert sniffer.stdout.readline() == "ready\n"
                yield found
                output, _ = sniffer.communicate("", timeout=20)
                found.update(json.loads(output))
            finally:
                sniffer.kill()

    def say_in_clear(self, sender: str, receiver: str, text: str) -> None:
        """Send a datagram that anybody on the way can read."""
        send = (
            "import socket, sys; socket.socket(type=socket.SOCK_DGRAM).sendto(sys.argv[2].encode(), (sys.argv[1], 9))"
        )
        command = ["ip", "netns", "exec", self.namespace(sender), sys.executable, "-c", send]
        subprocess.run([*command, self.address(receiver), text], check=True)


@contextlib.contextmanager
def lan(*hosts: str) -> Iterator[Lan]:
    """Make the hosts and the switch between them; nothing of them is left afterwards."""
    made = Lan(f"sh{secrets.token_hex(3)}", hosts)
    try:
        switch = made.namespace("switch")
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for number, host in enumerate(hosts):
            name, port = made.namespace(host), f"port{number}"
            _ip("netns", "add", name)
            _ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
            _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "address", "add", f"{made.address(host)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
        yield made
    finally:
        for host in (*hosts, "switch"):
            subprocess.run(["ip", "netns", "del", made.namespace(host)], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    _done("ip", *arguments)


def _tc(*arguments: str) -> None:
    _done("tc", *arguments)


def _done(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def _json(*arguments: str) -> Any:
    return json.loads(subprocess.run(["ip", "-j", *arguments], capture_output=True, text=True, check=True).stdout)
