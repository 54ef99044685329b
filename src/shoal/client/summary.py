"""The end of a run in numbers, as `summary.json` has them. The launcher adds what only it knows (processes, memory)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.averaging.audit import Audit
from shoal.client.model_export import ModelLeft
from shoal.client.progress import Progress
from shoal.config import Config
from shoal.ids import PeerId
from shoal.wire.messages.base import Traffic


def build_summary(
    *,
    config: Config,
    run_id: str,
    progress: Progress,
    name_of: Callable[[PeerId], str],
    audit: Audit,
    replicas: int,
    outer_rounds: int,
    hashes: dict[int, str],
    seconds_to_first_step: float | None,
    failovers: list[dict[str, Any]],
    counters: dict[str, int],
    servers_moved: int,
    stages_restored: list[dict[str, Any]],
    chains_left: list[dict[str, Any]],
    model: ModelLeft,
    exit_reason: str,
) -> dict[str, Any]:
    """Return the client's part of the summary.

    Samples, steps, losses and rates count from `first_round_seen` on; `samples_before` is what clients of other hosts
    had used until then. Duplicates and missing samples count over the whole run.

    Args:
        audit: computed from the step logs, so duplicates and missing samples do not depend on lease counters.
        replicas: the most that took part in a round, all stages together.
        outer_rounds: how many records were committed.
        hashes: of each stage's final outer parameters.
        seconds_to_first_step: from the launcher's start to the first committed step; None: there was none.
        failovers: see `client.failovers`.
        counters: sums over all roles that have reported.
        stages_restored: see `client.stage_watch`.
        chains_left: see `client.chain_watch`.
    """
    evaluated = sorted(progress.eval_losses)
    return {
        "run_id": run_id,
        "config": config.experiment_prefix,
        "stages": config.num_stages,
        "replicas": replicas,
        "pipelines_max": progress.pipelines_max,
        "trainers": progress.trainers_max,
        "inner_steps": config.diloco.inner_steps,
        "outer_rounds": outer_rounds,
        "first_round_seen": audit.first_round,
        "samples_before": audit.samples_before,
        "samples": audit.samples,
        "duplicates": audit.duplicates,
        "missing": audit.missing,
        "unreached": audit.unreached,
        "steps": progress.steps,
        "steps_skipped": progress.skipped_steps,
        "loss_first": progress.loss_first,
        "loss_last": progress.loss_last,
        "eval_loss_first": progress.eval_losses[evaluated[0]] if evaluated else None,
        # Of what was trained: D_0 alone says nothing about that.
        "eval_loss_last": progress.eval_losses[evaluated[-1]] if evaluated and evaluated[-1] else None,
        "eval_losses": {str(base_round): progress.eval_losses[base_round] for base_round in evaluated},
        "samples_per_s": round(progress.mean_samples_per_s(), 3),
        "seconds_to_first_step": seconds_to_first_step,
        "bytes_sent": {str(traffic): progress.sent_bytes.get(str(traffic), 0) for traffic in Traffic},
        "hashes": {str(stage): digest for stage, digest in sorted(hashes.items())},
        "steps_lost": {str(stage): lost for stage, lost in sorted(audit.steps_lost.items())},
        "failovers": failovers,
        "counters": counters,
        "servers_moved": servers_moved,
        "stages_restored": stages_restored,
        "chains_left": chains_left,
        "suspects": [
            {"round": round, **suspect._asdict(), "name": name_of(suspect.peer)} for round, suspect in audit.suspects
        ],
        "model": None if model.folder is None else str(model.folder),
        "model_round": model.round if model.folder is not None else None,
        "model_missing": model.reason or None,
        "exit": exit_reason,
    }
