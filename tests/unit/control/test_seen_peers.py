"""A client tells who is in the swarm, and who has asked sees the same as in a registry."""

from __future__ import annotations

import msgspec
from tests.unit.control.test_swarm_status import ANSWER, CLIENT, LABELS, MIRRORS, SERVERS, _hop, _run

from shoal.control.seen_peers import seen_peers, view_of
from shoal.control.swarm_status import swarm_status
from shoal.ids import PeerId
from shoal.swarm.view import Candidate, ClientPeer, MirrorPeer, SwarmView
from shoal.wire.frame import encode_frame
from shoal.wire.messages.base import Hop
from shoal.wire.messages.control import MAX_SEEN

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


def test_thousands_of_peers_with_the_longest_addresses_fit_into_an_answer_and_none_of_a_kind_keeps_the_others_out() -> (
    None
):
    def hops(role: str, address: str) -> list[Hop]:
        return [Hop(PeerId(f"{role} {number}".ljust(128)), (address,) * 16) for number in range(MAX_SEEN + 1)]

    short = SwarmView(
        candidates=tuple(Candidate(hop, 0.0) for hop in hops("server", "tcp:203.0.113.7:4000")),
        clients=tuple(ClientPeer(hop, 0.0) for hop in hops("client", "a" * 512)),
        mirrors=tuple(MirrorPeer(hop, 1) for hop in hops("mirror", "a" * 512)),
        labels=LABELS,
    )
    told = msgspec.structs.replace(ANSWER, peers=seen_peers(short))
    assert encode_frame(told).num_bytes < 16 << 20
    counts = [sum(peer.role == role for peer in told.peers) for role in ("client", "server", "mirror")]
    assert counts[0] == counts[2] >= 400
    assert counts[1] == MAX_SEEN
