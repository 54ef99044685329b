"""Cuts a host of servers off: a kind of death that needs hosts of their own (`tests.e2e.namespaces`)."""

from __future__ import annotations

from random import Random

from tests.e2e.namespaces import Lan

from shoal.testing.faults.deaths import Kind, Strike, take_servers
from shoal.testing.observed import Swarm

CUT_S = 8.0


def link_down(lan: Lan) -> Kind:
    """Return the fault that takes the network cable out of a server's host, and puts it in again."""
    return Kind(lambda swarm, random: _cut_link(lan, swarm, random), 3.5, limit_steps=2, held_s=CUT_S)


def _cut_link(lan: Lan, swarm: Swarm, random: Random) -> Strike:
    host = random.choice(swarm.server_hosts)
    name = next(name for name in lan.hosts if f"/{name}/" in str(host.directory))
    servers = [server for server in swarm.servers if server.host is host]
    return take_servers(swarm, servers, lambda _: lan.set_link(name, up=False), lambda: lan.set_link(name, up=True))
