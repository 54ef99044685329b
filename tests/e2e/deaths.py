"""Cuts hosts off from each other: kinds of death that need hosts of their own (`tests.e2e.namespaces`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from random import Random

from tests.e2e.namespaces import Lan

from shoal_lab.faults.deaths import Kind, Strike, take_servers
from shoal_lab.launched import Launched
from shoal_lab.observed import Swarm

CUT_S = 12.0
PARTITION_S = 20.0
FLAPPING_S = 30.0
_FLAP_S = 0.5


def link_down(lan: Lan) -> Kind:
    """Return the fault that takes the network cable out of a server's host, and puts it in again."""

    def strike(swarm: Swarm, random: Random) -> Strike:
        host, name = _one_of(swarm, lan, random)
        return _take(swarm, [host], lambda: lan.set_link(name, up=False), lambda: lan.set_link(name, up=True))

    return Kind(strike, 3.5, limit_steps=2, held_s=CUT_S)


def link_mute(lan: Lan) -> Kind:
    """Return the fault that loses all that a server's host sends: it hears the others, and they do not hear it."""

    def strike(swarm: Swarm, random: Random) -> Strike:
        host, name = _one_of(swarm, lan, random)
        return _lose(lan, swarm, [host], [(name, other) for other in lan.hosts if other != name])

    return Kind(strike, 3.5, limit_steps=2, held_s=CUT_S)


def link_deaf(lan: Lan) -> Kind:
    """Return the fault that loses all that a server's host is sent: the others hear it, and it does not hear them."""

    def strike(swarm: Swarm, random: Random) -> Strike:
        host, name = _one_of(swarm, lan, random)
        return _lose(lan, swarm, [host], [(other, name) for other in lan.hosts if other != name])

    return Kind(strike, 3.5, limit_steps=2, held_s=CUT_S)


def link_pair(lan: Lan) -> Kind:
    """Return the fault that two hosts of servers do not reach each other, while the client reaches both."""

    def strike(swarm: Swarm, random: Random) -> Strike:
        host, name = _one_of(swarm, lan, random)
        others = [_name(lan, other) for other in swarm.server_hosts if other is not host]
        ways = [way for other in others for way in ((name, other), (other, name))]
        return _anyway(_lose(lan, swarm, [host], ways))

    return Kind(strike, None, held_s=PARTITION_S)


def partition(lan: Lan) -> Kind:
    """Return the fault that divides the hosts: the client and one host of servers on one side, the other one apart."""

    def strike(swarm: Swarm, random: Random) -> Strike:
        host, name = _one_of(swarm, lan, random)
        return _lose(lan, swarm, [host], _between(lan, {name}))

    return Kind(strike, 3.5, limit_steps=2, held_s=PARTITION_S)


def client_apart(lan: Lan) -> Kind:
    """Return the fault that divides the hosts: all servers on one side, the client on the other; nobody trains."""

    def strike(swarm: Swarm, _: Random) -> Strike:
        hosts = swarm.server_hosts
        return _lose(lan, swarm, hosts, _between(lan, {_name(lan, host) for host in hosts}))

    return Kind(strike, None, held_s=PARTITION_S)


def flapping(lan: Lan) -> Kind:
    """Return the fault that takes the cable out of a server's host and puts it in again, once a second."""

    def strike(swarm: Swarm, random: Random) -> Strike:
        host, name = _one_of(swarm, lan, random)
        over = threading.Event()
        flaps = threading.Thread(target=_flap, args=(lan, name, over))

        def mend() -> None:
            over.set()
            flaps.join()

        return _anyway(_take(swarm, [host], flaps.start, mend))

    return Kind(strike, None, held_s=FLAPPING_S)


LINK_KINDS: dict[str, Callable[[Lan], Kind]] = {
    "link-down": link_down,
    "link-mute": link_mute,
    "link-deaf": link_deaf,
    "link-pair": link_pair,
    "partition": partition,
    "client-apart": client_apart,
    "flapping": flapping,
}
"""Faults of the links of a swarm with a client's host and two hosts of servers, each with replicas of all stages."""


def _flap(lan: Lan, name: str, over: threading.Event) -> None:
    up = False
    while not over.is_set():
        lan.set_link(name, up=up)
        up = not up
        over.wait(_FLAP_S)
    lan.set_link(name, up=True)


def _anyway(strike: Strike) -> Strike:
    """Nobody is away: over whom trainers step is up to them."""
    strike.counts = lambda _: True
    return strike


def _lose(lan: Lan, swarm: Swarm, hosts: Sequence[Launched], ways: Sequence[tuple[str, str]]) -> Strike:
    """Lose whatever goes these ways."""

    def set_all(*, is_open: bool) -> None:
        for sender, receiver in ways:
            lan.set_way(sender, receiver, is_open=is_open)

    return _take(swarm, hosts, lambda: set_all(is_open=False), lambda: set_all(is_open=True))


def _take(swarm: Swarm, hosts: Sequence[Launched], cut: Callable[[], None], mend: Callable[[], None]) -> Strike:
    servers = [server for server in swarm.servers if server.host in hosts]
    return take_servers(swarm, servers, lambda _: cut(), mend)


def _between(lan: Lan, side: Collection[str]) -> list[tuple[str, str]]:
    return [(one, other) for one in lan.hosts for other in lan.hosts if (one in side) != (other in side)]


def _one_of(swarm: Swarm, lan: Lan, random: Random) -> tuple[Launched, str]:
    host = random.choice(swarm.server_hosts)
    return host, _name(lan, host)


def _name(lan: Lan, host: Launched) -> str:
    return next(name for name in lan.hosts if f"/{name}/" in str(host.directory))
