"""How held-out samples are cut, the same for a swarm and for the plain loop, so that their losses compare."""

from __future__ import annotations

from shoal.data.feed import LeasedBatch
from shoal.data.microbatch import Microbatch
from shoal.swarm.microbatch_cut import EVAL_SAMPLES


def eval_parts(batch: LeasedBatch) -> list[Microbatch]:
    """Return a batch of held-out samples in parts of about `EVAL_SAMPLES`, in order."""
    return batch.cut(-(-batch.num_samples // EVAL_SAMPLES))
