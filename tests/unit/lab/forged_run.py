"""The files of a short run that never was, as its client and its servers would have left them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.averaging.journal import Genesis, keep_steps, write_genesis, write_round
from shoal.averaging.signing import Signer
from shoal.identity import Identity
from shoal.ids import Ballot, PeerId, StepKey
from shoal.swarm.records import record_hash
from shoal.wire.messages.base import SampleRange
from shoal.wire.messages.round import Record, StageHashes, StageOutcome
from shoal.wire.messages.step import StepEntry
from shoal_lab.launched import Launched
from shoal_lab.observed import Swarm
from shoal_lab.verdict import Evidence

RUN_ID = "sandbox-20260101-000000-abcd"
SAMPLES_PER_STEP = 4
CONFIGURATION = {"diloco": {"outer_steps": 1}}


@dataclass
class ForgedRun:
    """Writes rounds of two steps each, which follow each other, and logs that fit them.

    Attributes:
        directory: of the command; the run's own folder is below it.
        changed: by round and server, hashes that a server claims instead of the record's.
    """

    directory: Path
    changed: Mapping[tuple[int, int], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.logs = self.directory / "logs" / RUN_ID
        self.logs.mkdir(parents=True)
        self.identity = Identity.generate()
        self.authority = Identity.generate()
        genesis = Genesis(3, self.authority.peer_id, CONFIGURATION, (1,), {})
        write_genesis(self.logs, genesis)
        self._previous = genesis.hash(RUN_ID)
        self._num_rounds = 0
        self._starts: set[int] = set()
        self._log("data_server_0", {"event": "dataset.opened", "num_train": 1000})
        for server in range(4):
            self._log(f"server_{server}", {"event": "server.ready", "peer": f"peer{server}", "stage": server % 2})

    def round(
        self,
        *starts: int,
        previous: str | None = None,
        signer: Identity | None = None,
        authority: Identity | None = None,
    ) -> None:
        """Write the next round: a step for each of these first samples; `authority` warrants who signs its record."""
        signer, self._num_rounds = signer or self.identity, self._num_rounds + 1
        number = self._num_rounds
        self._starts |= set(starts)
        stages = [StageHashes(*(f"{name}{number}.{stage}" for name in "pmb")) for stage in range(2)]
        outcomes = [
            StageOutcome(stage, 1, (PeerId(f"peer{stage}"), PeerId(f"peer{stage + 2}")), (1, 1), hashes, 0)
            for stage, hashes in enumerate(stages)
        ]
        entries = tuple(self._entry(number * 100 + i, start) for i, start in enumerate(starts))
        samples = tuple(each for entry in entries for each in entry.samples)
        link = self._previous if previous is None else previous
        record = Record(RUN_ID, number, Ballot(1, signer.peer_id, 1), link, tuple(outcomes), samples, (), {0: 1})
        signed = Signer(signer, authority or self.authority, RUN_ID).seal(record)
        logs = {PeerId(f"peer{stage}"): (stage, entries) for stage in range(2)}
        keep_steps(self.logs, number, record_hash(signed), logs)
        write_round(self.logs, record, signed)
        self._previous = record_hash(signed)
        for server in range(4):
            hashes = stages[server % 2]
            parameters = self.changed.get((number, server), hashes.parameters)
            self.swap(server, number, self._previous, StageHashes(parameters, hashes.momentum, hashes.buffers))

    def swap(self, server: int, number: int, record: str, hashes: StageHashes) -> None:
        """A server trains on from a record."""
        told = {"round": number, "stage": server % 2, "record": record}
        held = {"parameters": hashes.parameters, "momentum": hashes.momentum, "buffers": hashes.buffers}
        self._log(f"server_{server}", {"event": "round.swapped", **told, **held})

    def skip_a_round(self) -> None:
        """Leave the next round out."""
        self._num_rounds += 1

    def evidence(self, exit_code: int = 130, leftovers: tuple[str, ...] = (), **summary: Any) -> Evidence:
        """Return it as a run that has ended; its summary is true but for what is given."""
        hashes = {str(stage): f"p{self._num_rounds}.{stage}" for stage in range(2)}
        told = {"samples": len(self._starts) * SAMPLES_PER_STEP, "duplicates": 0, "missing": 0, "hashes": hashes}
        (self.logs / "summary.json").write_text(json.dumps({**told, **summary}))
        run = Launched(self.directory, (), runtime_dir=self.directory / "runtime")
        return Evidence(Swarm(run, [run], 2), exit_code, leftovers)

    def _entry(self, number: int, start: int) -> StepEntry:
        samples = (SampleRange(0, start, start + SAMPLES_PER_STEP),)
        path = (PeerId("peer0"), PeerId("peer1"))
        return StepEntry(
            StepKey(0, 1, number, 0), path, 0, samples, SAMPLES_PER_STEP, SAMPLES_PER_STEP, 1.0, 0.1, False
        )

    def _log(self, name: str, event: Mapping[str, Any]) -> None:
        with (self.logs / f"{name}.log").open("a") as file:
            file.write(json.dumps({"time": "2026-01-01T00:00:00.000+00:00", **event}) + "\n")
