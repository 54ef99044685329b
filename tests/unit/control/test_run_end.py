"""The client's last word reaches each server once, and only a client of the run has it."""

from __future__ import annotations

import pytest

from shoal.control.run_end import RunEndListener, say_run_is_over
from shoal.errors import RemoteProtocolError
from shoal.ids import PeerId
from shoal.swarm.view import ClientPeer, SwarmView
from shoal.transport.base import Received
from shoal.transport.memory import MemoryNetwork
from shoal.wire.messages import Hop
from shoal.wire.messages.control import RunOver, TrainerStuck

CLIENT, SERVER, STRANGER = PeerId("client"), PeerId("server"), PeerId("stranger")
VIEW = SwarmView(clients=(ClientPeer(Hop(CLIENT, ()), 1.0),))
Heard = list[tuple[str, bool]]


def listener(heard: Heard) -> RunEndListener:
    return RunEndListener("run-1", lambda: VIEW, lambda reason, ended_well: heard.append((reason, ended_well)))


@pytest.mark.parametrize(
    ("interrupted", "failure", "expected"),
    [
        (False, "", ("run run-1 has ended", True)),
        (True, "", ("run run-1 has ended (interrupted at its client)", True)),
        (False, "no disk", ("run run-1 has failed: no disk", False)),
    ],
)
async def test_a_server_hears_once_how_the_run_has_ended(
    interrupted: bool, failure: str, expected: tuple[str, bool]
) -> None:
    network, heard = MemoryNetwork(), Heard()
    client, server = network.endpoint(CLIENT), network.endpoint(SERVER)
    client.introduce(server.hop)
    listening = listener(heard)
    for _ in range(2):
        say_run_is_over(client, [SERVER], interrupted=interrupted, failure=failure)
    received = 0
    async for event in server.events():
        received += isinstance(event, Received) and listening.receive(event)
        if received == 2:
            break
    assert heard == [expected]


def test_nobody_else_can_end_the_run_of_a_server() -> None:
    heard = Heard()
    with pytest.raises(RemoteProtocolError, match="stranger says that the run is over"):
        listener(heard).receive(Received(STRANGER, RunOver(False, "")))
    assert not heard


def test_a_client_whose_run_another_one_has_taken_over_ends_nothing() -> None:
    heard, other = Heard(), PeerId("other")
    following: list[PeerId | None] = [other]
    listening = RunEndListener(
        "run-1", lambda: VIEW, lambda reason, ended_well: heard.append((reason, ended_well)), lambda: following[0]
    )
    assert listening.receive(Received(CLIENT, RunOver(True, "")))
    assert not heard
    following[0] = CLIENT
    assert listening.receive(Received(CLIENT, RunOver(True, "")))
    assert len(heard) == 1


def test_who_leads_the_run_ends_it_though_the_registry_has_lost_it() -> None:
    """After a network that broke in two: the replica follows the client again, and its record is not heard of yet."""
    heard = Heard()
    end = RunEndListener(
        "run-1", SwarmView, lambda reason, ended_well: heard.append((reason, ended_well)), lambda: CLIENT
    )
    assert end.receive(Received(CLIENT, RunOver(True, "")))
    assert len(heard) == 1
    with pytest.raises(RemoteProtocolError, match="stranger says that the run is over"):
        end.receive(Received(STRANGER, RunOver(False, "")))


def test_other_messages_are_left_to_others() -> None:
    assert not listener(Heard()).receive(Received(CLIENT, TrainerStuck(0, 1, ())))
