"""Who is told what while a server moves to another stage."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from shoal.ids import PeerId
from shoal.server.reassignment_monitor import ReassignmentMonitor
from shoal.swarm.view import SwarmView
from shoal.transport.base import Received
from shoal.transport.memory import MemoryNetwork
from shoal.wire.messages.transfer import ContentKind, ContentName, Read, Want


class Told:
    """A part of a replica that takes everything."""

    def __init__(self) -> None:
        self.messages: list[object] = []

    def receive(self, event: Received) -> bool:
        self.messages.append(event.message)
        return True

    def peer_lost(self, peer: PeerId) -> None:
        pass


@pytest.mark.parametrize("kind", ContentKind)
def test_while_it_loads_the_old_stage_s_state_is_given_as_before_and_the_rest_by_the_new_replica(
    kind: ContentKind,
) -> None:
    old, new = Told(), Told()
    monitor = ReassignmentMonitor(
        endpoint=MemoryNetwork(seed=0).endpoint(PeerId("S")),
        announcer=SimpleNamespace(announce=lambda replica: None),  # type: ignore[arg-type]
        replica=SimpleNamespace(handlers=(new,)),  # type: ignore[arg-type]
        rebuild=None,  # type: ignore[arg-type]
        view=SwarmView,
        num_stages=2,
    )
    monitor._left = SimpleNamespace(contents=old, handlers=(old,))  # type: ignore[assignment]
    questions = [Want(ContentName(kind, 0, "digest")), Read(ContentName(kind, 0, "digest"), 0)]
    for question in questions:
        assert monitor.receive(Received(PeerId("asker"), question))
    is_new = kind in (ContentKind.SNAPSHOT, ContentKind.INNER, ContentKind.PAYLOAD)
    assert (old.messages, new.messages) == (([], questions) if is_new else (questions, []))
