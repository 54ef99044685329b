"""Who is in the swarm, as one peer tells it to another that has no registry: a `SwarmView` and back. Pure.

client: view --seen_peers--> RunStatus.peers --view_of--> the view of who asked
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

import msgspec

from shoal.ids import PeerId, StageIndex
from shoal.swarm.view import NO_BASE, Candidate, ClientPeer, MirrorPeer, PeerLabel, Replica, Run, SwarmView
from shoal.wire.messages.base import Hop
from shoal.wire.messages.control import MAX_SEEN, MAX_SEEN_BYTES, RunStatus, SeenPeer


def seen_peers(view: SwarmView) -> tuple[SeenPeer, ...]:
    """Return clients, servers and mirrors of a view, at most `MAX_SEEN` and `MAX_SEEN_BYTES` of each kind, with the
    reasons that its first client gives for not dialling servers."""
    undialled = dict(view.clients[0].undialled) if view.clients else {}
    servers = (*view.replicas, *view.candidates)
    return (
        *_few(_named(view, each.hop, "client") for each in view.clients),
        *_few(_server(view, each, undialled) for each in servers),
        *_few(_named(view, each.hop, "mirror", each.held_round) for each in view.mirrors),
    )


def _few(peers: Iterable[SeenPeer]) -> Iterator[SeenPeer]:
    """Yield the first ones of a kind."""
    left_bytes = MAX_SEEN_BYTES
    for each in islice(peers, MAX_SEEN):
        left_bytes -= len(msgspec.msgpack.encode(each))
        if left_bytes < 0:
            return
        yield each


def _server(view: SwarmView, server: Candidate, undialled: Mapping[PeerId, str]) -> SeenPeer:
    label = view.labels.get(server.peer)
    is_replica = isinstance(server, Replica)
    return SeenPeer(
        hop=server.hop,
        role="server",
        host=None if label is None else label.host,
        index=None if label is None else label.index,
        stage=server.stage if is_replica else None,
        serving=is_replica and server.serving,
        held_round=server.base_round if is_replica else NO_BASE,
        problem=undialled.get(server.peer, ""),
    )


def _named(view: SwarmView, hop: Hop, role: str, held_round: int = NO_BASE) -> SeenPeer:
    label = view.labels.get(hop.peer)
    return SeenPeer(hop, role, None if label is None else label.host, held_round=held_round)


def view_of(answer: RunStatus, run_id: str, client: Hop) -> SwarmView:
    """Return the view of the client that has answered.

    Args:
        client: where it was reached; it is the run's client, whatever it says of others.
    """
    servers = tuple(_servers(answer))
    found = {each.hop.peer: each.hop for each in answer.peers if each.role == "client"}
    problems = tuple((each.hop.peer, each.problem) for each in answer.peers if each.problem)
    others = [hop for hop in found.values() if hop.peer != client.peer]
    leading = ClientPeer(found.get(client.peer, client), 0.0, undialled=problems)
    mirrors = (MirrorPeer(each.hop, each.held_round) for each in answer.peers if each.role == "mirror")
    return SwarmView(
        replicas=tuple(each for each in servers if isinstance(each, Replica)),
        candidates=tuple(each for each in servers if not isinstance(each, Replica)),
        clients=(leading, *(ClientPeer(hop, 0.0, waits=True) for hop in others)),
        mirrors=tuple(mirrors),
        run=Run(run_id, answer.num_stages, client.peer),
        labels=dict(_labels(answer)),
    )


def _servers(answer: RunStatus) -> Iterator[Candidate]:
    for each in answer.peers:
        if each.role != "server":
            continue
        if each.stage is None:
            yield Candidate(each.hop, 0.0)
        else:
            stage = StageIndex(each.stage)
            yield Replica(each.hop, 0.0, stage=stage, serving=each.serving, base_round=each.held_round)


def _labels(answer: RunStatus) -> Iterator[tuple[PeerId, PeerLabel]]:
    for each in answer.peers:
        if each.host is not None:
            yield each.hop.peer, PeerLabel(each.role, each.host, each.index)
