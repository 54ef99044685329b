"""A server that is killed for good: another one takes its place, in the same process, and the run ends well."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.e2e.launched import END_S, ENDLESS, START_S, Launched, until
from tests.e2e.test_hosts import _key, hosts_of, invited

import shoal
from shoal.averaging.journal import read_records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Server:
    """One server, as its log tells."""

    run: Launched
    name: str

    @property
    def stage(self) -> int | None:
        """Where it is now."""
        events = [*self.run.events(self.name, "server.ready"), *self.run.events(self.name, "server.moved")]
        return events[-1]["stage"] if events else None

    @property
    def pids(self) -> list[int]:
        """Of all processes that were started for it."""
        role = self.name.replace("_", ":")
        return [event["pid"] for event in self.run.events("launcher", "role.started") if event["role"] == role]


def test_the_gap_of_a_host_that_is_gone_is_filled_by_one_server_in_the_same_process(tmp_path: Path) -> None:
    with hosts_of(tmp_path) as hosts:
        client = hosts.run("client", "start_trainer_client.py", *ENDLESS, "--num-servers=5")
        variable, command = invited(client)
        addresses = client.log_root / "sandbox" / "initial_peers.txt"
        common = (f"--network-initial-peers=@{addresses}", f"--swarm-key-file={_key(hosts)}")
        number = command.index("--num-servers") + 1

        def host_of(name: str, num_servers: int) -> list[Server]:
            own = [*command[:number], str(num_servers), *command[number + 1 :]]
            run = hosts.run(name, *own, *common, environment=variable)
            return [Server(run, f"server_{index}") for index in range(num_servers)]

        # Two are alone on their hosts, one at each stage: with either host goes a server that nobody starts again.
        alone = [*host_of("first", 1), *host_of("second", 1)]
        until(lambda: sorted(map(str, _stages(alone))) == ["0", "1"], 2 * START_S, "a server at each stage")
        servers = [*alone, *host_of("third", 3)]
        for server in servers:
            server.run.saw(server.name, "server.ready", 2 * START_S)
        client.saw("client_0", "round.recorded", 2 * START_S, round=2)
        # Servers that could not see each other when they chose have moved by now; two of five are at one stage.
        until(lambda: _are_placed(servers, alone), START_S, "servers at their stages")
        before = _stages(servers)
        weak = min((0, 1), key=before.count)
        [gone] = [index for index in range(len(alone)) if before[index] == weak]
        num_moves = len(client.events("client_0", "move.ended"))
        servers[gone].run.kill()
        until(lambda: len(client.events("client_0", "move.ended")) > num_moves, 2 * START_S, "a move")
        reached = client.events("client_0", "round.recorded")[-1]["round"]
        client.saw("client_0", "round.recorded", round=reached + 2)
        client.interrupt()
        assert client.ends(END_S) == 130, client.output
        alive = {i: server for i, server in enumerate(servers) if i != gone}
        for run in {id(server.run): server.run for server in alive.values()}.values():
            assert run.ends(END_S) == 0, run.output
        after = _stages(servers)
        last = {i: server.run.events(server.name, "round.swapped")[-1] for i, server in alive.items()}
        pids = {i: server.pids for i, server in alive.items()}
        ended = client.events("client_0", "move.ended")[num_moves:]
        summary = client.summary()
        assert client.log_dir is not None
        # Fetched from other hosts although the client was interrupted; what is loaded hashes to the last record.
        assert f"model: {client.log_dir / 'model'}" in client.output, client.output
        shoal.load_model(client.log_dir / "model")
        records = [record for record, _ in read_records(client.log_dir)]
    # Exactly one moved, to the stage that had lost one, and all are the processes that were started first.
    moved = [i for i in alive if after[i] != before[i]]
    assert [(before[i], after[i]) for i in moved] == [(1 - weak, weak)]
    assert [(event["from_stage"], event["to_stage"]) for event in ended] == [(1 - weak, weak)]
    assert all(len(each) == 1 for each in pids.values())
    assert (
        f"moves from stage {1 - weak} to stage {weak}: stage {weak} has fewer servers than the others" in client.output
    )
    assert summary["model_round"] == records[-1].round
    assert summary["servers_moved"] == num_moves + 1
    assert (summary["exit"], summary["duplicates"], summary["missing"]) == ("interrupted", 0, 0)
    # All replicas of a stage hold the same bytes, at the stages where they are now.
    for i, swapped in last.items():
        [outcome] = [stage for stage in records[swapped["round"] - 1].stages if stage.stage == after[i]]
        assert swapped["round"] >= reached + 2
        assert swapped["parameters"] == outcome.hashes.parameters
    assert ended[0]["peer"] in records[-1].stages[weak].members
    assert [len(stage.members) for stage in records[-1].stages] == [2, 2]


def _are_placed(servers: list[Server], alone: list[Server]) -> bool:
    stages = _stages(servers)
    return sorted(map(stages.count, (0, 1))) == [2, 3] and set(_stages(alone)) == {0, 1}


def _stages(servers: list[Server]) -> list[int | None]:
    return [server.stage for server in servers]
