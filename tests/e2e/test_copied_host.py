"""A host whose home folder, or disk, is a copy of another one's takes part as somebody else, and the run goes on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.hosts import end_whole, hosts_of, invited
from tests.e2e.launched import ENDLESS, START_S, Launched, until

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
        both = [(host, f"server_{index}") for host in (original, copy) for index in (0, 1)]
        until(lambda: len({_newest_peer(*each) for each in both} - {""}) == 4, 3 * START_S, "four servers")
        assert "have the same identity" in original.output + copy.output
        until(lambda: all(_swaps(*each) for each in both), 2 * START_S, "a round in which all of them are")
        end_whole(Swarm(client, [original, copy], 1))
        kept = [_keys(hosts.home(host)) for host in ("original", "copy")]
        assert [len(keys) for keys in kept] == [3, 3], "two servers and a scout"
        assert not kept[0] & kept[1]


def _newest_peer(host: Launched, name: str) -> str:
    """Who a server was when it was ready last; empty: it was not yet."""
    return next((event["peer"] for event in reversed(_events(host, name)) if event["event"] == "server.ready"), "")


def _swaps(host: Launched, name: str) -> bool:
    """Whether a server has been given a record since it was ready last."""
    kinds = [event["event"] for event in _events(host, name)]
    return "round.swapped" in kinds[len(kinds) - kinds[::-1].index("server.ready") :]


def _events(host: Launched, name: str) -> list[dict[str, Any]]:
    return [] if host.log_dir is None or not (host.log_dir / f"{name}.log").exists() else host.log(name).read()


def _keys(home: Path) -> set[bytes]:
    return {path.read_bytes() for path in (home / _IDENTITIES).glob("*/*.key")}
