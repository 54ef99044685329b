"""Round records: what D_r says, computed from what the members of the final quorums have joined with, and its hash.

D_0 is computed from configuration and seed, never committed; its hash is what D_1 names as `previous`.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from shoal.errors import MALFORMED, RemoteProtocolError
from shoal.ids import Ballot, PeerId, StepKey
from shoal.swarm.sample_ranges import Ranges, lowest, merge, subtract
from shoal.swarm.window_marks import up_to
from shoal.wire.messages.base import Era
from shoal.wire.messages.round import (
    MAX_ROUND_RANGES,
    Basis,
    Join,
    Origin,
    Payload,
    Record,
    SignedRecord,
    StageHashes,
    StageOutcome,
)
from shoal.wire.messages.step import StepEntry, StepsTrained

Sign = Callable[[bytes], bytes]
"""Signs bytes with this peer's key."""

Verify = Callable[[PeerId, bytes, bytes], None]
"""Checks a peer's signature over bytes; raises SignatureError."""

Logs = Mapping[PeerId, tuple[int, tuple[StepEntry, ...]]]
"""Step logs by replica, with its stage."""

GENERATIONS_APART = 1000
"""Between the trainers of a client and those of the one that takes the run over: only records tell what generation a
slot's trainer has reached; in one round it is replaced a few times at most."""

_decoder = msgspec.msgpack.Decoder(Record)


class Tip(NamedTuple):
    """The newest record of a chain as one replica holds it; `signed` is None for D_0."""

    round: int
    hash: str
    signed: SignedRecord | None


def genesis_hash(run_id: str, seed: int, configuration: Mapping[str, object], authority: PeerId) -> str:
    """SHA-256 (hex) that stands for D_0: the same for all who run `configuration` (JSON values only) from `seed`.

    `authority` says who may sign the records that follow (`averaging.signing`).
    """
    text = json.dumps([run_id, seed, configuration, authority], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def record_hash(signed: SignedRecord) -> str:
    """SHA-256 (hex) of the encoded record; the signature is no part of it."""
    return hashlib.sha256(signed.body).hexdigest()


def seal(record: Record, signer: PeerId, sign: Sign, warrant: bytes = b"") -> SignedRecord:
    """Encode and sign a record."""
    body = msgspec.msgpack.encode(record)
    return SignedRecord(body, signer, sign(body), warrant)


def unseal(signed: SignedRecord, run_id: str, verify: Verify) -> Record:
    """Check and decode a record.

    Raises:
        RemoteProtocolError: It is no record, is of another run, or was signed by another peer than its coordinator.
        SignatureError: The signature does not verify.
    """
    verify(signed.signer, signed.body, signed.signature)
    try:
        record = _decoder.decode(signed.body)
    except MALFORMED as error:
        raise RemoteProtocolError(f"{signed.signer} signed what is no round record: {error}") from error
    if record.run_id != run_id or record.ballot.peer != signed.signer:
        raise RemoteProtocolError(
            f"{signed.signer} signed record {record.round} of run {record.run_id} under the ballot of "
            f"{record.ballot.peer}; this is run {run_id}"
        )
    return record


def signed_to_json(signed: SignedRecord) -> dict[str, str]:
    """A record as the files of a run have it."""
    return {
        "body": base64.b64encode(signed.body).decode(),
        "signer": signed.signer,
        "signature": signed.signature.hex(),
        "warrant": signed.warrant.hex(),
        "hash": record_hash(signed),
    }


def signed_from_json(content: Mapping[str, object]) -> SignedRecord:
    """The same back; nothing of it is checked.

    Raises:
        KeyError: something is missing.
        ValueError: it is not of this form.
    """
    body = base64.b64decode(str(content["body"]), validate=True)
    signature, warrant = (bytes.fromhex(str(content[name])) for name in ("signature", "warrant"))
    return SignedRecord(body, PeerId(str(content["signer"])), signature, warrant)


def trained(log: Iterable[StepEntry]) -> StepsTrained:
    """What these steps of a round have changed; skipped ones nothing."""
    counted = [entry for entry in log if not entry.skipped]
    return StepsTrained(len(counted), sum([entry.num_targets for entry in counted]))


def outcome_of(record: Record, stage: int) -> StageOutcome | None:
    """What the record says about a stage."""
    return next((outcome for outcome in record.stages if outcome.stage == stage), None)


def names(record: Record, stage: int, hashes: StageHashes) -> bool:
    """Whether these are the bytes that the record names for a stage."""
    outcome = outcome_of(record, stage)
    return outcome is not None and outcome.hashes == hashes


def payload_in(record: Record, stage: int, peer: PeerId) -> Payload | None:
    """What of a replica's, encoded as a whole, is in the record's average of its stage."""
    outcome = outcome_of(record, stage)
    payloads = () if outcome is None else zip(outcome.members, outcome.payloads, strict=False)
    return next((payload for member, payload in payloads if member == peer), None)


def uncounted(members: Iterable[PeerId], scales: Sequence[float]) -> frozenset[PeerId]:
    """The members of a quorum whose contribution did not count: what they alone have trained of their stage is lost."""
    return frozenset(peer for peer, scale in zip(members, scales, strict=False) if scale == 0)


def steps_held(logs: Iterable[tuple[StepEntry, ...]]) -> dict[StepKey, StepEntry]:
    """Every step that some log holds: these are in the record."""
    return {entry.key: entry for log in logs for entry in log}


def used_samples(record: Record) -> Ranges:
    """The samples of this record and of all before it, as many as the next one can name."""
    return lowest((*record.recorded, *record.samples, *record.skipped))


def _is_alike(entry: StepEntry, steps: Mapping[StepKey, StepEntry]) -> bool:
    held = steps[entry.key]
    return entry is held or (entry.samples == held.samples and entry.skipped == held.skipped)


def parameters_of(record: Record) -> dict[int, str]:
    """The hash of each stage's outer parameters."""
    return {outcome.stage: outcome.hashes.parameters for outcome in record.stages}


def rebase_record(
    *,
    run_id: str,
    genesis: str,
    ballot: Ballot,
    origin: Record,
    origin_hash: str,
    stages: Sequence[StageHashes],
    recorded: Ranges,
    marks: bytes = b"",
) -> Record:
    """Build the first record of a fork, which goes on from a record of another run.

    Args:
        genesis: what stands for D_0 of the fork.
        stages: what the origin's state hashes to, by the stages of the fork.
        recorded: samples of the origin that are not to be trained again.
        marks: of the windows of a stream that these are of.
    """
    return Record(
        run_id=run_id,
        round=origin.round,
        ballot=ballot,
        previous=genesis,
        stages=tuple(StageOutcome(stage, 0, (), (), hashes, 0) for stage, hashes in enumerate(stages)),
        samples=(),
        skipped=(),
        generations={},
        recorded=lowest(recorded),
        eras=(Era(origin.round, ballot),),
        origin=Origin(origin.run_id, origin_hash),
        marks=marks,
    )


def build_record(
    *,
    run_id: str,
    previous: Tip,
    ballot: Ballot,
    quorums: Sequence[StageOutcome],
    joins: Mapping[PeerId, Join],
    recorded: Ranges,
    generations: Mapping[int, int],
    restored: Mapping[int, Basis],
    eras: tuple[Era, ...] = (),
    keep: bool = False,
    codec: str = "",
    marks: bytes = b"",
) -> Record:
    """Build the record that follows `previous`, from the joins of the final members alone.

    A step that any member of a stage holds is recorded; a stage in which no member holds it has lost its share. Of its
    samples the record names as many as it can, the lowest ones: more are made up (`sample_ranges.lowest`).

    Args:
        quorums: the final quorum of each stage; how many steps it has lost is counted here.
        joins: of the members at least; other joins are ignored.
        recorded: samples of all earlier records, which are never recorded again.
        generations: the lowest of each trainer that may still act.
        restored: what the stages were trained from whose bytes of `previous` were lost.
        eras: those of `previous`; empty after D_0.
        keep: whether a checkpoint of it is wanted.
        codec: as what pseudo-gradients of the next round travel; empty: as configured.
        marks: of windows of a stream, also of some that nobody has trained on.
    """
    logs = {peer: joins[peer].log for quorum in quorums for peer in quorum.members}
    steps = steps_held(logs.values())
    stages: list[StageOutcome] = []
    for quorum in sorted(quorums, key=lambda quorum: quorum.stage):
        without = uncounted(quorum.members, quorum.scales)
        held = steps_held(logs[peer] for peer in quorum.members if peer not in without)
        lost = len(steps.keys() - held.keys())
        stages.append(msgspec.structs.replace(quorum, steps_lost=lost, restored=restored.get(quorum.stage)))
    if not eras or eras[-1].ballot != ballot:
        eras = (*eras, Era(previous.round + 1, ballot))
    # Whoever holds a step says the same of it, unless he lies; then what the others say is used all the same.
    said = [*steps.values(), *(entry for log in logs.values() for entry in log if not _is_alike(entry, steps))]
    trained = merge(item for entry in said if not entry.skipped for item in entry.samples)
    skipped = merge(item for entry in said if entry.skipped for item in entry.samples)
    # A pass is a window, and they are trained on in their order.
    windows = 1 + max((item.pass_number for item in (*recorded, *trained, *skipped)), default=-1) if marks else 0
    return Record(
        run_id=run_id,
        round=previous.round + 1,
        ballot=ballot,
        previous=previous.hash,
        stages=tuple(stages),
        samples=subtract(trained, recorded)[:MAX_ROUND_RANGES],
        skipped=subtract(skipped, (*recorded, *trained))[:MAX_ROUND_RANGES],
        generations=dict(generations),
        recorded=lowest(recorded),
        eras=eras,
        keep=keep,
        codec=codec,
        marks=up_to(marks, windows),
    )
