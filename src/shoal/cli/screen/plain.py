"""A run as one line, where there is no screen. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.cli.output import on_one_line
from shoal.cli.run_row import FRESH_S, duration, rate, whole
from shoal.control.swarm_status import SwarmStatus


def plain_line(status: SwarmStatus) -> str:
    """Return `round 7/9  step 1,234  loss 2.500  ...  training round 7 of 9  (5 s old)`."""
    return "  ".join(map(on_one_line, _parts(status)))


def _parts(status: SwarmStatus) -> Iterator[str]:
    if status.round is not None and status.rounds is not None:
        yield f"round {status.round}/{status.rounds}"
    if status.steps is not None:
        yield f"step {whole(status.steps)}"
    if status.loss is not None:
        yield f"loss {status.loss:.3f}"
    if status.eval_loss is not None:
        yield f"eval loss {status.eval_loss:.3f}"
    if status.samples_per_s is not None:
        yield f"samples/s {rate(status.samples_per_s)}"
    if status.left_s is not None:
        yield f"{duration(status.left_s)} left"
    servers = [server for stage in status.stages for server in stage.replicas]
    yield f"servers {sum(server.state == 'serving' for server in servers)}/{len(servers)}"
    yield status.state
    if status.age_s >= FRESH_S:
        yield f"({duration(status.age_s)} old)"
