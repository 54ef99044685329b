"""A client tells who is in the swarm, and who has asked sees the same as in a registry."""

from __future__ import annotations

import msgspec
from tests.unit.control.test_swarm_status import ANSWER, CLIENT, LABELS, MIRRORS, SERVERS, _hop, _run

from shoal.control.seen_peers import seen_peers, view_of
from shoal.control.swarm_status import swarm_status
from shoal.swarm.view import Candidate, ClientPeer, SwarmView

WAITING = ClientPeer(_hop("second"), 0.0, waits=True)
VIEW = SwarmView(
    SERVERS, (Candidate(_hop("idle"), 0.0),), (CLIENT, WAITING), MIRRORS, run=_run(client=CLIENT.peer), labels=LABELS
)


def test_what_the_client_tells_shows_the_run_as_its_registry_does() -> None:
    answer = msgspec.structs.replace(ANSWER, num_stages=2, peers=seen_peers(VIEW))
    answer = msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=type(answer))
    told = view_of(answer, "r-1", CLIENT.hop)
    assert swarm_status("sandbox", told, answer, "") == swarm_status("sandbox", VIEW, answer, "")
    assert told.clients[1:] == (WAITING,)


def test_who_has_answered_is_the_client_whatever_it_says_of_itself() -> None:
    hop = _hop("other")
    told = view_of(msgspec.structs.replace(ANSWER, num_stages=1, peers=seen_peers(VIEW)), "r-1", hop)
    assert (told.clients[0].hop, told.clients[0].waits) == (hop, False)
    assert {client.peer for client in told.clients[1:]} == {CLIENT.peer, WAITING.peer}
