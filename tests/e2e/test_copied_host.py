"""A host whose home folder, or disk, is a copy of another one's takes part as somebody else, and the run goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.e2e.hosts import end_whole, hosts_of, invited
from tests.e2e.launched import ENDLESS, START_S, until

from shoal_lab.observed import Swarm

pytestmark = pytest.mark.timeout(600)

_IDENTITIES = ".config/shoal/identities"


@pytest.mark.slow
def test_of_two_hosts_with_the_same_identities_one_takes_others_and_both_serve(tmp_path: Path) -> None:
    with hosts_of(tmp_path) as hosts:
        client = hosts.run("client", "start_trainer_client.py", *ENDLESS, "--log-level=debug", "--num-servers=2")
        variable, command = invited(client)
        hosts.give_key("client", "original")
        original = hosts.run("original", *command, environment=variable)
        swarm = Swarm(client, [original], 1)
        until(swarm.is_training, 2 * START_S, "training")
        # As where a virtual machine was cloned: what a machine is known by is the same too.
        shutil.copytree(hosts.home("original") / ".config", hosts.home("copy") / ".config")
        copy = hosts.run("copy", *command, environment=variable)
        until(lambda: copy.output.count("have the same identity") == 2, 2 * START_S, "a word on both servers")
        for index in (0, 1):
            name = f"server_{index}"
            known = original.saw(name, "server.ready")["peer"]
            peers = until(
                lambda name=name: [e["peer"] for e in copy.events(name, "server.ready")][1:], START_S, "again"
            )
            assert known not in peers
            until(lambda name=name: copy.events(name, "round.swapped"), 2 * START_S, "a round with a new identity")
        end_whole(Swarm(client, [original, copy], 1))
        [one, other] = [sorted(host.glob("**/*.key")) for host in (hosts.home("original"), hosts.home("copy"))]
        assert not {path.read_bytes() for path in one if "server_" in path.name} & {
            path.read_bytes() for path in other if "server_" in path.name
        }
