"""Records are signed by their coordinator and checked by everyone."""

from __future__ import annotations

import msgspec
import pytest

from shoal.averaging.signing import sealer, unsealer
from shoal.errors import RemoteProtocolError
from shoal.identity import Identity
from shoal.ids import Ballot
from shoal.swarm.records import record_hash
from shoal.wire.messages.round import Record

CLIENT, OTHER = Identity.generate(), Identity.generate()


def record(run_id: str = "run", by: Identity = CLIENT) -> Record:
    return Record(run_id, 1, Ballot(1, by.peer_id, 1), "0", (), (), (), {})


def test_a_signed_record_comes_back() -> None:
    signed = sealer(CLIENT)(record())
    assert unsealer("run")(signed) == record()


def test_changed_bytes_are_refused() -> None:
    signed = sealer(CLIENT)(record())
    body = sealer(CLIENT)(record(run_id="run")).body.replace(b"run", b"ran")
    with pytest.raises(RemoteProtocolError):
        unsealer("ran")(msgspec.structs.replace(signed, body=body))


def test_a_record_of_another_run_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="run other"):
        unsealer("run")(sealer(CLIENT)(record("other")))


def test_a_record_signed_by_another_peer_than_its_coordinator_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match=str(OTHER.peer_id)):
        unsealer("run")(sealer(OTHER)(record(by=CLIENT)))


def test_bytes_that_are_no_record_are_refused() -> None:
    signed = sealer(CLIENT)(record())
    forged = msgspec.structs.replace(signed, body=b"\xc0", signature=CLIENT.sign(b"\xc0"))
    with pytest.raises(RemoteProtocolError, match="no round record"):
        unsealer("run")(forged)


def test_the_signature_is_no_part_of_the_hash() -> None:
    signed = sealer(CLIENT)(record())
    assert record_hash(msgspec.structs.replace(signed, signature=b"")) == record_hash(signed)
