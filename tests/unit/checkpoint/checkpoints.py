"""Checkpoints of a run that never was: small tensors, a record that names them, signed by who may."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tests.unit.checkpoint.folders import trained_stages
from torch import Tensor

from shoal.checkpoint.model_folder import configuration_with_cut
from shoal.checkpoint.model_layout import StageLayout, hashes_of
from shoal.checkpoint.places import folder_of
from shoal.checkpoint.store import Checkpoint, CheckpointStore, KeepPolicy, StagePart
from shoal.checkpoint.tensor_file import encode_tensors
from shoal.config import Config
from shoal.identity import Identity, verify
from shoal.ids import Ballot, PeerId
from shoal.optim.flat import FlatLayout
from shoal.swarm.records import seal, unseal
from shoal.wire.messages.base import Era
from shoal.wire.messages.round import Record, SignedRecord, StageHashes, StageOutcome

RUN_ID = "test-run"
CLIENT = Identity.generate()
SERVERS = tuple(PeerId(f"server {number}") for number in range(4))


def layout_of(stage: int) -> StageLayout:
    parameters = {f"units.block_{stage}.weight": torch.empty(3, 2), f"units.block_{stage}.bias": torch.empty(3)}
    integers = {f"units.block_{stage}.count": torch.empty((), dtype=torch.int64)}
    floats = {f"units.block_{stage}.mean": torch.empty(3)}
    return StageLayout(
        FlatLayout.of_named(parameters.items()),
        FlatLayout.of_named(floats.items()),
        FlatLayout.of_named(integers.items(), torch.int64),
    )


LAYOUTS = [layout_of(stage) for stage in range(2)]


def vectors_of(stage: int, round: int) -> tuple[Tensor, ...]:
    """Parameters, momentum, floats, integers."""
    generator = torch.Generator().manual_seed(100 * round + stage)
    sizes = 9, 9, 3
    return *(torch.randn(size, generator=generator) for size in sizes), torch.tensor([round], dtype=torch.int64)


def inner_of(stage: int, slot: int) -> dict[str, Tensor]:
    name = f"units.block_{stage}.bias"
    return {f"exp_avg/{name}": torch.full((3,), slot + 0.5), f"step/{name}": torch.tensor(7.0)}


def hashes(vectors: Sequence[Tensor]) -> StageHashes:
    parameters, momentum, floats, integers = vectors
    return hashes_of((parameters, floats, integers), momentum)


def signed_record(
    round: int,
    of_stages: Sequence[StageHashes],
    *,
    signer: Identity = CLIENT,
    run_id: str = RUN_ID,
    eras: bool = True,
    keep: bool = False,
) -> SignedRecord:
    ballot = Ballot(1, signer.peer_id, 1)
    outcomes = [
        StageOutcome(stage, 1, SERVERS[stage::2], (4, 4), said, steps_lost=0) for stage, said in enumerate(of_stages)
    ]
    chain = (Era(1, ballot),) if eras else ()
    record = Record(run_id, round, ballot, "0" * 64, tuple(outcomes), (), (), {}, (), chain, keep)
    return seal(record, signer.peer_id, signer.sign)


def open_record(signed: SignedRecord) -> Record:
    return unseal(signed, RUN_ID, verify)


def parts_of(round: int, inner: Mapping[int, Mapping[int, Mapping[str, Tensor]]] | None = None) -> list[StagePart]:
    given = {0: {0: inner_of(0, 0), 1: {}}} if inner is None else inner
    files = {
        stage: [(slot, encode_tensors(tensors, {"replica": f"{SERVERS[stage]}.1"})) for slot, tensors in slots.items()]
        for stage, slots in given.items()
    }
    return [StagePart(stage, vectors_of(stage, round), files.get(stage, ())) for stage in range(len(LAYOUTS))]


def checkpoint_of(round: int, signed: SignedRecord | None = None, **changed: Any) -> Checkpoint:
    said = signed or signed_record(round, [hashes(vectors_of(stage, round)) for stage in range(len(LAYOUTS))])
    given: dict[str, Any] = {
        "signed": said,
        "genesis": json.dumps({"form": 2, "seed": 1}).encode(),
        "layouts": LAYOUTS,
        "cut": (1, 1),
        "members": [SERVERS[0::2], SERVERS[1::2]],
        "unix_s": 1.75e9 + round,
        "client": json.dumps({"round": round}).encode(),
    }
    return Checkpoint(**{**given, **changed})


def make_store(location: Path | str, policy: KeepPolicy | None = None) -> CheckpointStore:
    return CheckpointStore(str(location), RUN_ID, open_record, policy or KeepPolicy(keep_last=3))


def write_rounds(store: CheckpointStore, *rounds: int) -> None:
    for round in rounds:
        store.write(checkpoint_of(round), parts_of(round))


def folder(location: Path, round: int) -> Path:
    return location / RUN_ID / folder_of(round)


def write_checkpoint(location: Path, config: Config, round: int = 1) -> Path:
    """A checkpoint of the model of `folders.trained_stages`."""
    stages = trained_stages(config)
    layouts = [StageLayout.of(stage) for stage in stages]
    parts: list[StagePart] = []
    for stage, layout in zip(stages, layouts, strict=True):
        parameters, floats, integers = (each.flatten(each.select(stage)) for each in layout)
        parts.append(StagePart(stage.stage, (parameters, torch.randn_like(parameters), floats, integers)))
    described = configuration_with_cut(config)
    cut = described["model_pipeline"].pop("cut")
    checkpoint = checkpoint_of(
        round,
        signed_record(round, [hashes(part.vectors) for part in parts]),
        genesis=json.dumps({"form": 2, "configuration": described}).encode(),
        layouts=layouts,
        cut=cut,
        members=[()] * len(stages),
    )
    return Path(make_store(location).write(checkpoint, parts).location)
