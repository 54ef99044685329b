"""The only host of servers leaves by Ctrl-C: its stages' state is with the client until another host comes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.e2e.hosts import hosts_of, invited
from tests.e2e.launched import END_S, ENDLESS, START_S, until

import shoal
from shoal.averaging.journal import read_records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_next_host_goes_on_from_what_the_last_one_has_handed_over(tmp_path: Path) -> None:
    with hosts_of(tmp_path) as hosts:
        client = hosts.run("client", "start_trainer_client.py", *ENDLESS)
        variable, command = invited(client)
        addresses = client.log_root / "sandbox" / "initial_peers.txt"
        for host in ("first", "second"):
            hosts.give_key("client", host)
        first = hosts.run("first", *command, environment=variable)
        client.saw("client_0", "round.recorded", 2 * START_S, round=2)
        first.interrupt()
        assert first.ends(END_S) == 130, first.output
        first.leaves_nothing()
        assert "this host is the last with stage" in first.output
        for stage in (0, 1):
            assert f"stage {stage} as of round" in first.output
            assert f"the last servers of stage {stage} leave" in client.output
        kept = client.events("client_0", "stage.kept")[-1]["round"]
        second = hosts.run("second", *command, f"--network-initial-peers=@{addresses}")
        until(lambda: client.events("client_0", "round.recorded")[-1]["round"] >= kept + 2, 2 * START_S, "new rounds")
        client.interrupt()
        assert client.ends(END_S) == 130, client.output
        assert second.ends(END_S) == 0, second.output
        summary, log_dir = client.summary(), client.require_log_dir()
    assert (summary["stages_restored"], summary["duplicates"], summary["missing"]) == ([], 0, 0)
    assert "is lost" not in client.output
    records = [record for record, _ in read_records(log_dir)]
    assert all(stage.restored is None for record in records for stage in record.stages)
    assert summary["model_round"] == records[-1].round >= kept + 2
    shoal.load_model(log_dir / "model")


def test_a_second_ctrl_c_leaves_at_once_where_nobody_can_take_the_state(tmp_path: Path) -> None:
    with hosts_of(tmp_path) as hosts:
        client = hosts.run("client", "start_trainer_client.py", *ENDLESS)
        variable, command = invited(client)
        hosts.give_key("client", "first")
        first = hosts.run("first", *command, environment=variable)
        client.saw("client_0", "round.recorded", 2 * START_S, round=1)
        client.lose_host()
        first.interrupt()
        until(lambda: "no client can be reached" in first.output, END_S, "the warning")
        assert first.process.poll() is None
        first.interrupt()
        assert first.ends(END_S) == 130, first.output
        first.leaves_nothing()
