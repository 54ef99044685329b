"""Round records, and who trains, with this peer's key: what the pure machines call to sign and to check them.

Whose key may sign the records of a run follows from D_0, which names the swarm's authority:

    swarm key --> authority --warrants (run, peer)--> coordinator --signs--> D_1, D_2, ...

Whoever has the swarm key can derive the authority, so a client of any host can take a run over, with a key of its own
and a warrant for it. Nobody else can, and everybody can check both: a peer id is a public key.

Who trains is said in the same way: the client that coordinates warrants the trainer of each slot, and replicas take the
steps of those that the client which they follow has warranted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import msgspec

from shoal.errors import RemoteProtocolError, SignatureError
from shoal.identity import Identity, verify
from shoal.ids import PeerId
from shoal.swarm.records import seal, unseal
from shoal.wire.messages.round import Record, SignedRecord
from shoal.wire.messages.step import Open

_WARRANTED_AS = "shoal-coordinator"
_EMPLOYED_AS = "shoal-trainer"
"""These stand before what is warranted, so that nothing else that is signed can be taken for a warrant."""


class Signer:
    """A peer that may coordinate a run: it has the swarm key.

    Attributes:
        authority: D_0 names it; it has warranted this peer, and will warrant its successors.
    """

    def __init__(self, identity: Identity, authority: Identity, run_id: str) -> None:
        self.authority = authority.peer_id
        self.unseal = unsealer(run_id, authority.peer_id)
        self._identity, self._run_id = identity, run_id
        self._warrant = authority.sign(_warranted(run_id, identity.peer_id))

    def seal(self, record: Record) -> SignedRecord:
        """Encode and sign a record."""
        return seal(record, self._identity.peer_id, self._identity.sign, self._warrant)

    def employ(self, trainer: PeerId, slot: int, generation: int) -> bytes:
        """Warrant that a peer is the trainer of a slot, in this generation."""
        return self._identity.sign(_employed(self._run_id, trainer, slot, generation))


def unsealer(run_id: str, authority: PeerId) -> Callable[[SignedRecord], Record]:
    """What checks and decodes a record of the run; the last few results are remembered.

    The callable raises RemoteProtocolError for whatever a peer has sent that is no record of the run, signed by its
    coordinator, whom the authority that D_0 names has warranted.
    """

    # A record is looked at several times (prepared, committed, swapped); its signatures need not be checked each time.
    @lru_cache(maxsize=8)
    def open_record(signed: SignedRecord) -> Record:
        try:
            record = unseal(signed, run_id, verify)
        except SignatureError as error:
            raise RemoteProtocolError(str(error)) from error
        try:
            verify(authority, _warranted(run_id, signed.signer), signed.warrant)
        except SignatureError as error:
            raise RemoteProtocolError(
                f"{signed.signer} signed record {record.round} of run {run_id} without having the swarm key: the "
                f"authority that D_0 names, {authority}, has not warranted it"
            ) from error
        return record

    return open_record


def employment(run_id: str) -> Callable[[PeerId, PeerId, Open], bool]:
    """What tells whether a client has warranted the trainer that opens a step of the run: `(client, trainer, step)`."""

    # A trainer shows the same warrant with all steps of a round.
    @lru_cache(maxsize=1024)
    def holds(client: PeerId, said: bytes, warrant: bytes) -> bool:
        try:
            verify(client, said, warrant)
        except SignatureError:
            return False
        return True

    def is_employed(client: PeerId, trainer: PeerId, step: Open) -> bool:
        return holds(client, _employed(run_id, trainer, step.key.trainer, step.key.generation), step.warrant)

    return is_employed


def _employed(run_id: str, trainer: PeerId, slot: int, generation: int) -> bytes:
    return msgspec.msgpack.encode((_EMPLOYED_AS, run_id, trainer, slot, generation))


def _warranted(run_id: str, coordinator: PeerId) -> bytes:
    return msgspec.msgpack.encode((_WARRANTED_AS, run_id, coordinator))
