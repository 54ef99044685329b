"""Two members of a ring that do not reach each other: which of them goes out."""

from __future__ import annotations

import pytest

from shoal.ids import PeerId
from shoal.swarm.records import seal, unseal
from shoal.swarm.round_coordinator import RoundCoordinatorMachine
from shoal.swarm.round_effects import CoordinatorEffect, Send
from shoal.swarm.round_settings import CloseRequest, RoundSettings
from shoal.wire.messages.base import Hop
from shoal.wire.messages.round import Basis, Join, MemberLost, Propose, RoundState, StageHashes

CLIENT = PeerId("client")
STAGE = {PeerId(f"{host}{stage}"): stage for host in ("left", "right", "far") for stage in (0, 1)}
LEFT, RIGHT, FAR = ((PeerId(f"{host}0"), PeerId(f"{host}1")) for host in ("left", "right", "far"))


def _hop(peer: PeerId, *, is_local: bool) -> Hop:
    return Hop(peer, (f"unix:/{peer}",) if is_local else (f"unix:{peer[:-1]}:/{peer}", "tcp:192.168.1.5:5000"))


def _averaging(*servers: PeerId, is_local: bool = False) -> RoundCoordinatorMachine:
    """A coordinator of two stages whose members have begun to average round 1."""
    settings = RoundSettings("run", 2, "D0")
    machine = RoundCoordinatorMachine(
        CLIENT,
        1,
        settings,
        lambda record: seal(record, CLIENT, lambda _: b""),
        lambda signed: unseal(signed, "run", lambda *_: None),
    )
    hops = {peer: _hop(peer, is_local=is_local) for peer in servers}
    machine.replicas(hops, 0.0)
    machine.lead(0.0)
    basis = Basis(0, StageHashes("p0", "m0", "b0"))
    for peer, hop in hops.items():
        machine.receive(peer, RoundState(machine.ballot, STAGE[peer], 0, None, None, hop, "", basis), 0.0)
    machine.close(CloseRequest(1, {}, {}, None), 1.0)
    for peer in servers:
        machine.receive(peer, Join(machine.ballot, 1, STAGE[peer], 0, (), (), ()), 1.0)
    return machine


def _complain(machine: RoundCoordinatorMachine, accuser: PeerId, accused: PeerId, epoch: int = 0) -> set[PeerId]:
    """Return who is proposed for the next epoch of the stage."""
    stage = STAGE[accuser]
    effects: list[CoordinatorEffect] = machine.receive(
        accuser, MemberLost(machine.ballot, 1, epoch, stage, accused), 2.0
    )
    proposed = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Propose)]
    assert all(message.stage == stage for message in proposed)
    return {hop.peer for message in proposed for hop in message.members}


def test_the_one_that_is_complained_of_goes_out() -> None:
    assert _complain(_averaging(*LEFT, *RIGHT), LEFT[0], RIGHT[0]) == {LEFT[0]}


def test_of_two_machines_that_complain_of_each_other_the_same_one_goes_out_in_all_stages() -> None:
    machine = _averaging(*LEFT, *RIGHT)
    assert _complain(machine, LEFT[0], RIGHT[0]) == {LEFT[0]}
    # With right1 alone, stage 0 on the left and stage 1 on the right would not reach each other.
    assert _complain(machine, RIGHT[1], LEFT[1]) == {LEFT[1]}


def test_machines_without_a_name_are_not_told_apart() -> None:
    machine = _averaging(*LEFT, *RIGHT, is_local=True)
    assert _complain(machine, LEFT[0], RIGHT[0]) == {LEFT[0]}
    assert _complain(machine, RIGHT[1], LEFT[1]) == {RIGHT[1]}


def test_a_complaint_of_who_is_out_already_puts_nobody_else_out() -> None:
    machine = _averaging(*LEFT, *RIGHT, *FAR)
    assert _complain(machine, LEFT[0], RIGHT[0]) == {LEFT[0], FAR[0]}
    assert _complain(machine, RIGHT[0], LEFT[0]) == set()  # of the epoch before
    assert _complain(machine, RIGHT[0], LEFT[0], epoch=1) == set()
    assert _complain(machine, LEFT[0], RIGHT[0], epoch=1) == set()


@pytest.mark.parametrize("accused", [FAR[1], LEFT[1]])
def test_if_both_machines_have_been_given_up_or_neither_the_accused_goes_out(accused: PeerId) -> None:
    machine = _averaging(*LEFT, *RIGHT, *FAR)
    if accused == FAR[1]:
        assert _complain(machine, LEFT[0], RIGHT[0]) == {LEFT[0], FAR[0]}
        assert _complain(machine, LEFT[0], FAR[0], epoch=1) == {LEFT[0]}
    members = {LEFT[1], RIGHT[1], FAR[1]}
    assert _complain(machine, RIGHT[1], accused) == members - {accused}
