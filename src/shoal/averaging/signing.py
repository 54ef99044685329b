"""Round records with this peer's key: what the pure machines call to sign and to check them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from shoal.errors import RemoteProtocolError, SignatureError
from shoal.identity import Identity, verify
from shoal.swarm.records import seal, unseal
from shoal.wire.messages.round import Record, SignedRecord


def sealer(identity: Identity) -> Callable[[Record], SignedRecord]:
    """What encodes and signs a record as `identity`."""
    return lambda record: seal(record, identity.peer_id, identity.sign)


def unsealer(run_id: str) -> Callable[[SignedRecord], Record]:
    """What checks and decodes a record of the run; the last few results are remembered.

    The callable raises RemoteProtocolError for whatever a peer has sent that is no record of the run, signed by its
    coordinator.
    """

    # A record is looked at several times (held, decided, swapped); its signature need not be checked each time.
    @lru_cache(maxsize=8)
    def open_record(signed: SignedRecord) -> Record:
        try:
            return unseal(signed, run_id, verify)
        except SignatureError as error:
            raise RemoteProtocolError(str(error)) from error

    return open_record
