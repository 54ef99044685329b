"""What a replay has found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.ids import PeerId


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that is not as the files of the run say.

    Attributes:
        round: In which; 0 for what concerns the run as a whole.
        stage: Of which; None: of all.
        replica: Which one differs; None where it cannot be told, or where it is no replica's doing.
        what: What differs, and from what.
    """

    round: int
    stage: int | None
    replica: PeerId | None
    what: str

    def __str__(self) -> str:
        places = [f"round {self.round}"] if self.round else []
        places += [] if self.stage is None else [f"stage {self.stage}"]
        places += [] if self.replica is None else [f"replica {self.replica}"]
        return f"{', '.join(places)}: {self.what}" if places else self.what

    def as_json(self) -> dict[str, Any]:
        return {"round": self.round, "stage": self.stage, "replica": self.replica, "what": self.what}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one replay.

    Attributes:
        run_id: Of the run.
        rounds: Records that the run has left.
        rounds_agreed: Rounds from the first one on of which everything agrees.
        steps: Steps that were computed again.
        samples: Distinct samples in steps that were not skipped.
        skipped: Distinct samples in steps that were skipped, since they were not finite.
        repeated: Samples that are in a second step.
        missing: Samples that are in no step, and should be.
        steps_lost: By stage, steps that the stage has no part in.
        differences: What does not agree, the first one first.
        notes: What else there is to know: other machines, what could not be compared.
        took_s: Seconds.
    """

    run_id: str
    rounds: int
    rounds_agreed: int
    steps: int
    samples: int
    skipped: int
    repeated: int
    missing: int
    steps_lost: Mapping[int, int]
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]
    took_s: float

    @property
    def agrees(self) -> bool:
        """Whether the run can have been nothing else than what its files say."""
        return not self.differences

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "run_id": self.run_id,
            "agrees": self.agrees,
            "rounds": self.rounds,
            "rounds_agreed": self.rounds_agreed,
            "steps": self.steps,
            "samples": self.samples,
            "skipped": self.skipped,
            "repeated": self.repeated,
            "missing": self.missing,
            "steps_lost": {str(stage): number for stage, number in self.steps_lost.items()},
            "differences": [difference.as_json() for difference in self.differences],
            "notes": list(self.notes),
            "took_s": round(self.took_s, 3),
        }
