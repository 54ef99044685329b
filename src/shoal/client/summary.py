"""The end of a run in numbers, as `summary.json` has them. The launcher adds what only it knows (processes, memory)."""

from __future__ import annotations

from typing import Any, NamedTuple

from shoal.averaging.audit import Audit
from shoal.client.model_export import ModelLeft
from shoal.client.totals import RunTotals
from shoal.config import Config
from shoal.events.stages import StageBeganAnew
from shoal.swarm.incidents import Incident, steps_lost_by
from shoal.swarm.view import SwarmView
from shoal.wire.messages.base import Traffic

_OF_A_CHAIN = ("base_round", "record", "common_round", "samples", "samples_freed")


class Costs(NamedTuple):
    """How many steps each incident has cost, and how many were lost for another reason."""

    steps_lost: list[int]
    otherwise: int


def costs_of(totals: RunTotals, audit: Audit) -> Costs:
    """Say which of the losses that the audit has found has come of which incident."""
    return Costs(*steps_lost_by(totals.incidents.all, audit.lost_steps))


def build_summary(
    *,
    config: Config,
    run_id: str,
    totals: RunTotals,
    paused_s: float,
    audit: Audit,
    costs: Costs,
    view: SwarmView,
    model: ModelLeft,
    exit_reason: str,
) -> dict[str, Any]:
    """Return the client's part of the summary.

    Samples, steps, losses and rates count from `first_round_seen` on; `samples_before` is what clients of other hosts
    had used until then. Duplicates and missing samples count over the whole run. Of `rounds_uncounted` the step logs
    cannot be read: these samples are in `samples_before`. Of `rounds_unread` the records cannot.

    Args:
        paused_s: how long users have paused the run.
        costs: what each incident has cost by the audit, see `costs_of`.
        audit: computed from the step logs, so duplicates and missing samples do not depend on lease counters.
    """
    progress = totals.progress
    evaluated = sorted(progress.eval_losses)
    return {
        "run_id": run_id,
        "config": config.experiment_prefix,
        "stages": config.num_stages,
        "replicas": totals.num_replicas,
        "pipelines_max": progress.pipelines_max,
        "trainers": progress.trainers_max,
        "inner_steps": config.diloco.inner_steps,
        "outer_rounds": totals.rounds,
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
        "seconds_to_first_step": totals.seconds_to_first_step,
        "seconds_paused": round(paused_s, 3),
        "bytes_sent": {str(traffic): progress.sent_bytes.get(str(traffic), 0) for traffic in Traffic},
        "hashes": {str(stage): digest for stage, digest in sorted(totals.hashes.items())},
        "steps_lost": {str(stage): lost for stage, lost in sorted(audit.steps_lost.items())},
        "steps_lost_otherwise": costs.otherwise,
        "steps_lost_in_part": {str(stage): lost for stage, lost in sorted(audit.lost_in_part.items())},
        "failovers": [_failover(incident, totals) for incident in totals.incidents.all if incident.is_loss],
        "incidents": [_told(*each, totals) for each in zip(totals.incidents.all, costs.steps_lost, strict=True)],
        "counters": totals.counted.sums(),
        "servers_moved": totals.servers_moved,
        "stages_restored": [_restored(each) for each in totals.stages_restored],
        "chains_left": [{name: getattr(each, name) for name in _OF_A_CHAIN} for each in totals.chains_lost],
        "rounds_uncounted": sorted(audit.unread),
        "rounds_unread": sorted(audit.unread_records),
        "suspects": [
            {"round": round, **suspect._asdict(), "name": view.name_of(suspect.peer)}
            for round, suspect in audit.suspects
        ],
        "model": None if model.folder is None else str(model.folder),
        "model_round": model.round if model.folder is not None else None,
        "model_missing": model.reason or None,
        "exit": exit_reason,
    }


def _failover(incident: Incident, totals: RunTotals) -> dict[str, Any]:
    """Say how long the trainers that it hit were without a step since it was noticed; null where none followed."""
    noticed_s = incident.noticed_s
    return {
        "kind": incident.kind,
        "at_s": round(totals.since_launch_s(noticed_s), 3),
        "recovered_after_s": None if incident.recovered_s is None else round(incident.recovered_s - noticed_s, 3),
    }


def _told(incident: Incident, steps_lost: int, totals: RunTotals) -> dict[str, Any]:
    """Say who was lost, and what followed how long after it was heard last; null: that has not followed."""
    return {
        "kind": incident.kind,
        "cause": str(incident.cause),
        "who": incident.who,
        "host": incident.host,
        "stage": incident.stage,
        "round": incident.round,
        "at_s": round(totals.since_launch_s(incident.began_s), 3),
        "noticed_after_s": incident.after_s(incident.noticed_s),
        "recovered_after_s": incident.after_s(incident.recovered_s),
        "back_after_s": incident.after_s(incident.ended_s),
        "steps_lost": steps_lost,
        "replayed": incident.replayed,
    }


def _restored(stage: StageBeganAnew) -> dict[str, Any]:
    return {
        "stage": stage.stage,
        "in_round": stage.in_round,
        "lost_rounds": [stage.base_round + 1, stage.in_round - 1],
        "parameters": stage.parameters,
    }
