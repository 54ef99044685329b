"""Records are signed by their coordinator and checked by everyone."""

from __future__ import annotations

import msgspec
import pytest

from shoal.averaging.signing import Signer, unsealer
from shoal.errors import RemoteProtocolError
from shoal.identity import Identity, swarm_authority
from shoal.ids import Ballot
from shoal.swarm.records import record_hash
from shoal.wire.messages.round import Record, SignedRecord

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
