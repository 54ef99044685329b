"""Records are signed by their coordinator and checked by everyone."""

from __future__ import annotations

import msgspec
import pytest

from shoal.averaging.signing import Signer, employment, unsealer
from shoal.errors import RemoteProtocolError
from shoal.identity import Identity, swarm_authority
from shoal.ids import Ballot, PeerId, StepKey
from shoal.swarm.records import record_hash
from shoal.wire.messages.round import Record, SignedRecord
from shoal.wire.messages.step import Open

CLIENT, OTHER = Identity.generate(), Identity.generate()
AUTHORITY = swarm_authority(b"k" * 32)


def record(run_id: str = "run", by: Identity = CLIENT) -> Record:
    return Record(run_id, 1, Ballot(1, by.peer_id, 1), "0", (), (), (), {})


def sealed(by: Identity, what: Record, run_id: str = "run", authority: Identity = AUTHORITY) -> SignedRecord:
    return Signer(by, authority, run_id).seal(what)


def opened(signed: SignedRecord, run_id: str = "run") -> Record:
    return unsealer(run_id, AUTHORITY.peer_id)(signed)


def test_a_signed_record_comes_back() -> None:
    signed = sealed(CLIENT, record())
    assert opened(signed) == record()


def test_changed_bytes_are_refused() -> None:
    signed = sealed(CLIENT, record())
    body = sealed(CLIENT, record(run_id="run")).body.replace(b"run", b"ran")
    with pytest.raises(RemoteProtocolError):
        opened(msgspec.structs.replace(signed, body=body), "ran")


def test_a_record_of_another_run_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="run other"):
        opened(sealed(CLIENT, record("other")))


def test_a_record_signed_by_another_peer_than_its_coordinator_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match=str(OTHER.peer_id)):
        opened(sealed(OTHER, record(by=CLIENT)))


def test_bytes_that_are_no_record_are_refused() -> None:
    signed = sealed(CLIENT, record())
    forged = msgspec.structs.replace(signed, body=b"\xc0", signature=CLIENT.sign(b"\xc0"))
    with pytest.raises(RemoteProtocolError, match="no round record"):
        opened(forged)


def test_the_signature_is_no_part_of_the_hash() -> None:
    signed = sealed(CLIENT, record())
    assert record_hash(msgspec.structs.replace(signed, signature=b"")) == record_hash(signed)


def test_a_client_of_another_host_that_has_the_swarm_key_may_sign() -> None:
    assert opened(sealed(OTHER, record(by=OTHER), authority=swarm_authority(b"k" * 32))) == record(by=OTHER)


@pytest.mark.parametrize(
    "stranger",
    [
        sealed(OTHER, record(by=OTHER), authority=swarm_authority(b"l" * 32)),
        sealed(OTHER, record(by=OTHER), authority=OTHER),
        msgspec.structs.replace(sealed(OTHER, record(by=OTHER)), warrant=b""),
        msgspec.structs.replace(sealed(OTHER, record(by=OTHER)), warrant=sealed(CLIENT, record()).warrant),
        msgspec.structs.replace(sealed(OTHER, record(by=OTHER)), warrant=sealed(OTHER, record(), "other").warrant),
    ],
    ids=["another swarm's", "its own", "none", "of another peer", "for another run"],
)
def test_a_record_whose_coordinator_has_no_warrant_of_the_swarm_is_refused(stranger: SignedRecord) -> None:
    with pytest.raises(RemoteProtocolError, match="without having the swarm key"):
        opened(stranger)


TRAINER = PeerId("trainer")


def step(warrant: bytes, slot: int = 2, generation: int = 7) -> Open:
    return Open(StepKey(slot, generation, 5, 0), 1, (), (), (), (), warrant=warrant)


def test_a_client_warrants_one_peer_as_the_trainer_of_one_slot_in_one_generation() -> None:
    warrant = Signer(CLIENT, AUTHORITY, "run").employ(TRAINER, 2, 7)
    is_employed = employment("run")
    assert is_employed(CLIENT.peer_id, TRAINER, step(warrant))
    assert not is_employed(CLIENT.peer_id, PeerId("another"), step(warrant))
    assert not is_employed(CLIENT.peer_id, TRAINER, step(warrant, slot=1))
    assert not is_employed(CLIENT.peer_id, TRAINER, step(warrant, generation=8))
    assert not is_employed(OTHER.peer_id, TRAINER, step(warrant))
    assert not employment("another run")(CLIENT.peer_id, TRAINER, step(warrant))
    assert not is_employed(CLIENT.peer_id, TRAINER, step(b""))
    assert not is_employed(PeerId("no key"), TRAINER, step(warrant))


def test_who_signs_for_itself_is_nobody_s_trainer() -> None:
    warrant = Signer(OTHER, AUTHORITY, "run").employ(OTHER.peer_id, 2, 7)
    assert not employment("run")(CLIENT.peer_id, OTHER.peer_id, step(warrant))
