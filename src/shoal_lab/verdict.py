"""What has to be true of a run that has ended, whatever was done to it: a list of checks, each with what it looks at.

A check returns what it has looked at, in a few words, and what is violated; it fails where there is nothing to look at,
since what cannot be checked does not hold.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.averaging.audit import Audit, audit
from shoal.averaging.journal import read_genesis, read_records
from shoal.averaging.signing import unsealer
from shoal.cli.run_folder import CONFIG_FILE
from shoal.config.load import load_config
from shoal.config.named_code import naming_options
from shoal.errors import RunFailed, ShoalError
from shoal.swarm.records import record_hash
from shoal.wire.messages.round import StageHashes, StageOutcome
from shoal_lab.observed import Swarm


@dataclass(frozen=True)
class Evidence:
    """A run that has ended, and what was seen of its end.

    Attributes:
        exit_code: of the launcher.
        leftovers: what the run has left behind.
        wanted_exit_code: 130 for a run that was interrupted.
    """

    swarm: Swarm
    exit_code: int
    leftovers: Sequence[str]
    wanted_exit_code: int = 130

    @property
    def directory(self) -> Path:
        """The run's log folder.

        Raises:
            RunFailed: there is none.
        """
        return self.swarm.client.require_log_dir()


@dataclass(frozen=True)
class Finding:
    """What one check has found.

    Attributes:
        text: what the check has looked at, in a few words.
        problems: what is violated; empty: all is well.
    """

    check: str
    text: str
    problems: tuple[str, ...] = ()


_REPLAY_TIMEOUT_S = 3600.0

Check = Callable[[Evidence], tuple[str, Sequence[str]]]
"""Returns what it has looked at, and what is violated."""


def judge(evidence: Evidence, checks: Sequence[tuple[str, Check]] | None = None) -> list[Finding]:
    """Return the findings of all checks, of those in `CHECKS` by default; one that cannot be made is a violation."""
    findings: list[Finding] = []
    for name, check in CHECKS if checks is None else checks:
        try:
            text, problems = check(evidence)
        except (ShoalError, OSError, IndexError, KeyError, ValueError) as error:
            text, problems = "could not be checked", [f"{type(error).__name__}: {error}"]
        findings.append(Finding(name, text, tuple(problems)))
    return findings


def ended_well(evidence: Evidence) -> tuple[str, Sequence[str]]:
    """Check that it ended when and as it was told to."""
    code, wanted = evidence.exit_code, evidence.wanted_exit_code
    return f"exit code {code}", [] if code == wanted else [f"exit code {code} instead of {wanted}"]


def replicas_agree(evidence: Evidence) -> tuple[str, Sequence[str]]:
    """Compare each record that each server has swapped in with the record itself."""
    outcomes: dict[tuple[str, int], StageOutcome] = {}
    restored: set[tuple[int, StageHashes]] = set()
    for record, signed in read_records(evidence.directory):
        outcomes |= {(record_hash(signed), outcome.stage): outcome for outcome in record.stages}
        restored |= {(outcome.stage, outcome.restored.hashes) for outcome in record.stages if outcome.restored}
    compared = 0
    problems: list[str] = []
    for server in evidence.swarm.servers:
        for event in server.swapped():
            if (outcome := outcomes.get((event["record"], event["stage"]))) is None:
                continue  # the client was gone before it could write it down, or the run was resumed from an older one
            compared += 1
            held = StageHashes(event["parameters"], event["momentum"], event["buffers"])
            if (event["stage"], held) in restored:
                continue  # nobody was left who held the record's: the next record names what its stage went on from
            for name in ("parameters", "momentum", "buffers"):
                if getattr(held, name) != getattr(outcome.hashes, name):
                    where = f"{server.role}, stage {event['stage']}, round {event['round']}"
                    problems.append(f"{where}: its {name} are not the record's")
    if not compared:
        problems.append("no record was swapped in by any server")
    return f"{compared} states equal", problems


def samples_of(evidence: Evidence) -> Audit:
    """Recompute the run's samples from its step logs.

    Raises:
        RecordRejected: a file is damaged.
        RunFailed: the data server has never opened its data.
    """
    opened = evidence.swarm.events("data_server_0", "dataset.opened")
    if not opened:
        raise RunFailed("the data server has opened no data set: see its log")
    return audit(evidence.directory, opened[0]["num_train"])


def samples_are_whole(evidence: Evidence) -> tuple[str, Sequence[str]]:
    """Look for samples that were trained twice, or left out."""
    found = samples_of(evidence)
    counts = {"duplicates": found.duplicates, "missing": found.missing}
    problems = [f"{name} {count}" for name, count in counts.items() if count]
    if not found.samples:
        problems.append("no sample was trained")
    lost = sum(found.steps_lost.values())
    counted = f"duplicates {found.duplicates}, missing {found.missing}, steps lost {lost}"
    return f"{found.samples} samples, {counted}", problems


def summary_is_true(evidence: Evidence) -> tuple[str, Sequence[str]]:
    """Compare what summary.json says with the step logs and the last record."""
    found, summary = samples_of(evidence), evidence.swarm.client.summary()
    actual = {"samples": found.samples, "duplicates": found.duplicates, "missing": found.missing}
    problems = [f"{name} {summary[name]}, but the files say {n}" for name, n in actual.items() if summary[name] != n]
    hashes: dict[str, str] = {}
    for record, _ in read_records(evidence.directory):
        hashes = {str(outcome.stage): outcome.hashes.parameters for outcome in record.stages}
    if summary["hashes"] != hashes:
        problems.append("other hashes than the last record")
    return "summary", problems


def chain_is_whole(evidence: Evidence) -> tuple[str, Sequence[str]]:
    """Follow the records from the configuration on: each names the one before it, and no round is left out.

    Each is signed by a peer that may, which D_0 says (`averaging.signing`).
    """
    run_id = evidence.directory.name
    genesis = read_genesis(evidence.directory)
    previous, wanted = genesis.hash(run_id), 1
    problems: list[str] = []
    check = unsealer(run_id, genesis.authority)
    for record, signed in read_records(evidence.directory):
        if record.round != wanted:
            problems.append(f"record {wanted} is missing before record {record.round}")
        elif record.previous != previous:
            problems.append(f"record {record.round} does not name the one before it")
        check(signed)
        previous, wanted = record_hash(signed), record.round + 1
    if wanted == 1:
        problems.append("there is no record")
    return f"chain of {wanted - 1} records", problems


def is_reproduced(evidence: Evidence) -> tuple[str, Sequence[str]]:
    """Replay the run from the logs of all its hosts, in a process of its own: it sets torch's threads and its seed."""
    directory = evidence.directory.resolve()
    for number, host in enumerate(evidence.swarm.server_hosts):
        if host.log_dir is not None and host.log_dir.resolve().parent != directory.parent:
            # As somebody does who copies the logs of other hosts beside those of the client's.
            beside = directory.parent / f"{directory.name}.servers-of-host-{number}"
            if not beside.is_symlink():
                beside.symlink_to(host.log_dir.resolve())
    return replayed(directory)


def replayed(directory: Path) -> tuple[str, Sequence[str]]:
    """Run `shoal replay` on the folder of a run that this process has begun, and return what it says."""
    config = directory / CONFIG_FILE
    named = naming_options(load_config(config, env={})) if config.is_file() else ()
    command = [sys.executable, "-m", "shoal", "replay", str(directory), "--json", *named]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_REPLAY_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return "replay", [f"the replay has not ended within {_REPLAY_TIMEOUT_S:.0f} s"]
    if not done.stdout:
        return "replay", [done.stderr.strip()]
    verdict = json.loads(done.stdout)
    problems = [] if done.returncode == 0 else [f"replay: {difference}" for difference in verdict["differences"]]
    return f"{verdict['rounds_agreed']} rounds and {verdict['steps']} steps replayed", problems


def nothing_is_left(evidence: Evidence) -> tuple[str, Sequence[str]]:
    """Look at what is left of processes, sockets, shared memory and temporary files."""
    return "nothing left" if not evidence.leftovers else "something left", list(evidence.leftovers)


TRAINED: Sequence[tuple[str, Check]] = (
    ("hashes", replicas_agree),
    ("samples", samples_are_whole),
    ("chain", chain_is_whole),
    ("replay", is_reproduced),
)
"""What holds of the files of every run, however it ended."""

CHECKS: Sequence[tuple[str, Check]] = (
    ("end", ended_well),
    *TRAINED,
    ("summary", summary_is_true),
    ("leftovers", nothing_is_left),
)


def require_whole(swarm: Swarm) -> None:
    """Check what a run that has ended has trained.

    Raises:
        RunFailed: something is violated; it says what.
    """
    findings = judge(Evidence(swarm, swarm.client.process.returncode, ()), TRAINED)
    if problems := [f"{finding.check}: {problem}" for finding in findings for problem in finding.problems]:
        raise RunFailed("; ".join(problems))
