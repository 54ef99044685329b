"""What is said of a run, from what the registry and its client say."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from shoal.control.swarm_status import EventStatus, SwarmStatus, lines_of, swarm_status
from shoal.ids import PeerId, StageIndex
from shoal.swarm.view import NO_BASE, Candidate, ClientPeer, MirrorPeer, PeerLabel, Replica, Run, SwarmView
from shoal.wire.messages.base import Hop
from shoal.wire.messages.control import RunStatus, ServerNumbers

SCHEMA = Path(__file__).parents[3] / "docs" / "status.schema.json"
NUMBERS = (
    ServerNumbers(PeerId("peer-a"), 1.0, 1234, 30.0, 0.75, 0.2104, 7 << 20, 8 << 20, 512 << 20),
    ServerNumbers(PeerId("peer-bb"), 14.0, 40, memory_bytes=1024 << 20),
    ServerNumbers(PeerId("peer-idle"), 5.9, memory_bytes=1 << 20),
)
ANSWER = RunStatus("training round 7 of 9", 7, 9, 1234, 5000, 2.5, 2.25, 60.0, 1.0, (0, 1), NUMBERS)


def _hop(name: str) -> Hop:
    return Hop(PeerId(f"peer-{name}"), (f"unix:m:/{name}", f"tcp:10.0.0.{len(name)}:5000", "tcp:[2001:db8::1]:5000"))


def _replica(name: str, stage: int, base_round: int = 6, *, serving: bool = True) -> Replica:
    return Replica(_hop(name), 0.0, stage=StageIndex(stage), base_round=base_round, serving=serving)


def _run(**fields: object) -> Run:
    return msgspec.convert({"run_id": "r-1", "num_stages": 2, "client": "peer-c", **fields}, Run)


CLIENT = ClientPeer(_hop("c"), 0.0, undialled=((PeerId("peer-bad"), "10.0.0.3:5000: refused"),))
LABELS = {PeerId(f"peer-{name}"): PeerLabel("server", f"box-{name}", 0) for name in ("a", "bb", "bad", "idle")}
MIRRORS = (MirrorPeer(_hop("nas"), 5), MirrorPeer(_hop("empty")))
LABELS[MIRRORS[0].peer] = PeerLabel("mirror", "nas")
LABELS[CLIENT.peer] = PeerLabel("client", "desk")
SERVERS = (_replica("a", 0), _replica("bb", 0, 5), _replica("bad", 1), _replica("new", 1, NO_BASE, serving=False))


def test_a_run_with_a_client_is_said_in_words_and_numbers() -> None:
    view = SwarmView(SERVERS, (Candidate(_hop("idle"), 0.0),), (CLIENT,), MIRRORS, run=_run(), labels=LABELS)
    status = swarm_status("sandbox", view, ANSWER, "")
    assert list(lines_of(status)) == [
        "run r-1 (sandbox): training round 7 of 9",
        "round 7/9  step 1,234  loss 2.500  eval loss 2.250  samples/s 60.0  last step 1 s ago",
        "stage 0  server 0@box-a (10.0.0.1) serving  1,234 steps  30.0 samples/s  busy 75%  0.21 s a step  sent 7 MiB"
        "  received 8 MiB  memory 512 MiB",
        "         server 0@box-bb (10.0.0.2) serving  14 s ago:  40 steps  memory 1,024 MiB",
        "stage 1  server 0@box-bad (10.0.0.3) undialled (10.0.0.3:5000: refused)",
        "         peer ...peer-new (10.0.0.3) joining",
        "without a stage  server 0@box-idle (10.0.0.4) waiting for a stage  memory 1 MiB",
        "mirror  mirror@nas (10.0.0.3) holds round 5",
        "mirror  peer ...er-empty (10.0.0.5) does not hold all stages yet",
        "trainers  0, 1",
        "client  client@desk at 10.0.0.1:5000, [2001:db8::1]:5000",
    ]
    assert status.client is not None
    names = [status.client.name, status.stages[0].replicas[0].name, status.waiting_servers[0].name]
    assert names == ["client@desk", "server 0@box-a", "server 0@box-idle"]
    assert [(replica.age_s, replica.steps) for stage in status.stages for replica in stage.replicas] == [
        (1.0, 1234),
        (14.0, 40),
        (None, None),
        (None, None),
    ]
    assert [replica.held_round for stage in status.stages for replica in stage.replicas] == [6, 5, 6, -1]
    assert msgspec.json.decode(msgspec.json.encode(status), type=SwarmStatus) == status


def test_a_client_of_a_local_run_is_one_that_other_hosts_cannot_reach() -> None:
    client = ClientPeer(Hop(CLIENT.peer, ("unix:m:/c",)), 0.0)
    view = SwarmView(SERVERS, clients=(client,), run=_run(), labels=LABELS)
    last = list(lines_of(swarm_status("sandbox", view, ANSWER, "")))[-1]
    assert last == "client  client@desk, which other hosts cannot reach"


@pytest.mark.parametrize(
    ("clients", "run", "state"),
    [
        ((), _run(kept=True), "no client; 2 servers hold round 6, 1 server holds round 5"),
        ((CLIENT,), _run(), "the client does not answer; 2 servers hold round 6, 1 server holds round 5"),
        ((), _run(ended=True), "has ended"),
    ],
)
def test_without_a_client_it_is_said_who_holds_what(clients: tuple[ClientPeer, ...], run: Run, state: str) -> None:
    view = SwarmView(SERVERS, clients=clients, run=run)
    status = swarm_status("sandbox", view, None, "refused" if clients else "")
    assert status.state == state
    assert (status.round, status.loss, status.trainers) == (None, None, None)
    last = list(lines_of(status))[-1]
    assert last.endswith("does not answer: refused") if clients else last.endswith("peer-new (10.0.0.3) joining")


def test_what_has_happened_lately_is_said_and_not_what_the_numbers_show() -> None:
    told = [
        EventStatus(
            number=n, unix_s=float(n), level="WARNING", event="incident.opened", says=f"{n}", routine=n % 2 == 0
        )
        for n in range(20)
    ]
    status = msgspec.structs.replace(
        swarm_status("sandbox", SwarmView(run=_run(kept=True)), None, ""), events=tuple(told)
    )
    assert list(lines_of(status))[3:] == [
        "events  00:00:11Z  11",
        *(f"        00:00:{number}Z  {number}" for number in (13, 15, 17, 19)),
    ]


def test_a_stage_without_servers_is_said() -> None:
    status = swarm_status("sandbox", SwarmView(run=_run(kept=True)), None, "")
    assert list(lines_of(status)) == [
        "run r-1 (sandbox): no client; no server holds anything",
        "stage 0  no server",
        "stage 1  no server",
    ]


def test_the_schema_is_the_one_that_is_documented() -> None:
    said = json.dumps(msgspec.json.schema(SwarmStatus), indent=2) + "\n"
    assert SCHEMA.read_text() == said, f"the form has changed; only add keys, then write into {SCHEMA.name}:\n{said}"
