"""A swarm of two commands trains on, and is joined, while a stranger forges records of every kind in its DHT."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.e2e.hosts import hosts_of, invited
from tests.e2e.launched import END_S, SMALL
from tests.e2e.stranger import attacking, harm_done, processes_of
from tests.unowned_keys import SMALL_ORDER

from shoal.identity import namespace
from shoal_lab.observed import Swarm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_stranger_with_all_keys_that_nobody_owns_ends_no_role_and_a_host_joins_the_true_run(tmp_path: Path) -> None:
    with hosts_of(tmp_path) as hosts:
        client = hosts.run("client", "start_trainer_client.py", *SMALL, "--diloco.outer-steps=10000")
        variable, command = invited(client)
        for host in ("servers", "late"):
            hosts.give_key("client", host)
        shows = namespace(hosts.key("client"), "sandbox")
        # It takes part before the servers do: in a larger DHT only the nodes nearest to a topic are asked for it.
        with attacking(variable["INITIAL_PEERS"].split(","), 0.5, shows) as attack:
            servers = hosts.run("servers", *command, environment=variable)
            client.saw("client_0", "round.recorded", within_s=90.0, round=1)
            swarm = Swarm(client, [servers], 1)
            before, begun_unix_s = processes_of(swarm.hosts), time.time()
            attack.begin()
            attack.had_enough()
            # It trains on, and who comes now is told the true run and its configuration.
            reached = client.events("client_0", "round.recorded")[-1]["round"]
            client.saw("client_0", "round.recorded", round=reached + 2)
            late = hosts.run("late", *command, environment=variable)
            late.saw("server_0", "round.swapped", within_s=2 * END_S)
            assert late.require_log_dir().name.removesuffix(".servers") == client.require_log_dir().name
            assert harm_done(swarm, before, begun_unix_s) == []
            attack.end()
        client.interrupt()
        assert client.ends(END_S) == 130, client.output
        for host in (servers, late):
            assert host.ends(END_S) == 0, host.output
        for host in (client, servers, late):
            host.leaves_nothing()
        summary = client.summary()
    assert attack.stored["the peer has no key of this swarm"] >= 2
    assert attack.stored["unowned_key"] >= 2 * 3 * len(SMALL_ORDER)
    assert {"foreign_key", "replayed", "cut", "prolonged", "signed_again", "kept_longer"} <= set(attack.stored)
    assert (summary["exit"], summary["duplicates"], summary["missing"]) == ("interrupted", 0, 0)
    for reason in ("bad_mac", "bad_expiry", "wrong_signer", "wrong_topic"):
        assert summary["counters"][f"records.dropped{{reason={reason}}}"] > 0, summary["counters"]
