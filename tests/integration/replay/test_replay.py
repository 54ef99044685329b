"""Runs with faults are replayed to the same hashes, and what somebody has changed in their files is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from tests.integration.cluster.conftest import make_config, make_text, reproduces
from tests.integration.replay.conftest import VICTIM, alter_norm, change

from shoal.averaging.journal import read_genesis, read_records, write_genesis, write_round
from shoal.averaging.signing import Signer
from shoal.cli import main
from shoal.identity import Identity
from shoal.replay.replay import replay
from shoal.replay.verdict import Verdict
from shoal.swarm.records import record_hash
from shoal.wire.messages.round import Record
from shoal.wire.messages.step import Open, Prepared
from shoal_lab import Cluster
from shoal_lab.client_host import AUTHORITY, RUN_ID


def differing(folder: Path) -> Verdict:
    verdict = replay(folder)
    assert not verdict.agrees
    return verdict


def test_a_run_with_a_lost_server_and_a_lost_trainer_is_reproduced_from_its_folder_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["agrees"]
    assert (found["rounds"], found["rounds_agreed"]) == (3, 3)
    assert (found["repeated"], found["missing"], found["differences"]) == (0, 0, [])
    assert found["steps_lost"]["1"] > 0
    assert found["samples"] > 0
    assert main(["replay", str(folder)]) == 0
    assert "bit for bit" in capsys.readouterr().out


def test_a_folder_that_is_none_of_a_run_is_the_users_error(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(tmp_path)]) == 2
    assert "is no folder of a run" in capsys.readouterr().err
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("inner_steps: 3", "inner_steps: 4"))
    assert main(["replay", str(folder)]) == 2
    assert "diloco.inner_steps: 4 instead of 3" in capsys.readouterr().err


def _forged(trained: tuple[Path, Identity], folder: Path, *, sign: bool) -> Record:
    """Say in the last record that stage 1 has other parameters."""
    record, signed = list(read_records(folder))[-1]
    first, second = record.stages
    hashes = msgspec.structs.replace(second.hashes, parameters="0" * 64)
    forged = msgspec.structs.replace(record, stages=(first, msgspec.structs.replace(second, hashes=hashes)))
    identity = trained[1]
    resealed = Signer(identity, AUTHORITY, RUN_ID).seal(forged)
    if not sign:
        resealed = msgspec.structs.replace(resealed, signature=signed.signature)
    write_round(folder, forged, resealed)
    return forged


def test_a_forged_hash_is_found_by_computing_it(trained: tuple[Path, Identity], folder: Path) -> None:
    _forged(trained, folder, sign=True)
    verdict = differing(folder)
    assert verdict.rounds_agreed == 2
    difference = verdict.differences[0]
    assert (difference.round, difference.stage) == (3, 1)
    assert "parameters hash to" in difference.what
    assert "the record says 0000000000000000" in difference.what


def test_a_record_that_nobody_has_signed_is_none(
    trained: tuple[Path, Identity], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _forged(trained, folder, sign=False)
    assert main(["replay", str(folder)]) == 1
    assert "round 3: the record is not signed by who may" in capsys.readouterr().out


def signed_by_a_stranger(folder: Path, *, also_the_first: bool) -> None:
    """Sign all records anew, with a key of nobody's, which warrants itself; and let D_0 name that as the authority."""
    stranger = Identity.generate()
    signer = Signer(stranger, stranger, RUN_ID)
    genesis = read_genesis(folder)
    if also_the_first:
        genesis = msgspec.structs.replace(genesis, authority=stranger.peer_id)
        write_genesis(folder, genesis)
    previous = genesis.hash(RUN_ID)
    for record, signed in list(read_records(folder)):
        ballot = record.ballot._replace(peer=stranger.peer_id)
        eras = tuple(msgspec.structs.replace(era, ballot=ballot) for era in record.eras)
        forged = msgspec.structs.replace(record, previous=previous, ballot=ballot, eras=eras)
        signed = signer.seal(forged)
        write_round(folder, forged, signed)
        previous = record_hash(signed)


def test_a_chain_that_a_stranger_has_signed_throughout_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    signed_by_a_stranger(folder, also_the_first=False)
    assert main(["replay", str(folder)]) == 1
    assert "round 1: the record is not signed by who may" in capsys.readouterr().out


def test_a_run_with_a_first_record_of_its_own_is_refused_by_who_knows_the_swarm_key(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key_file = tmp_path / "swarm.key"
    key_file.write_bytes(bytes(32))
    key_file.chmod(0o600)
    assert main(["replay", str(folder), "--swarm-key-file", str(key_file)]) == 0
    signed_by_a_stranger(folder, also_the_first=True)
    capsys.readouterr()
    assert main(["replay", str(folder), "--swarm-key-file", str(key_file)]) == 1
    assert "is of a run of another swarm" in capsys.readouterr().err


@pytest.mark.parametrize("round", [1, 2, 3])
def test_a_missing_record_is_named(folder: Path, round: int) -> None:
    (folder / f"rounds/round_000{round}.json").unlink()
    verdict = differing(folder)
    assert verdict.rounds_agreed == round - 1
    assert verdict.differences[0].round == round
    assert "missing" in verdict.differences[0].what


def test_a_folder_that_begins_with_a_later_round_names_what_to_copy(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of a client which has continued the run of a lost host."""
    for path in (folder / "rounds/round_0001.json", folder / "steps/round_0001.jsonl"):
        path.unlink()
    assert main(["replay", str(folder)]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "begins with round 2" in message
    assert "from the folder of run cluster there" in message


def _log_of_two(folder: Path) -> tuple[str, int]:
    """A replica of which the first round's step log has two steps or more, and its first line there."""
    lines = [json.loads(line) for line in (folder / "steps/round_0001.jsonl").read_text().splitlines()]
    peers = [line["peer"] for line in lines]
    peer = next(peer for peer in peers if peers.count(peer) > 1)
    return peer, peers.index(peer)


def test_two_steps_that_have_changed_places_in_a_step_log_are_named(folder: Path) -> None:
    peer, first = _log_of_two(folder)

    def swap(lines: list[Any]) -> list[Any]:
        lines[first], lines[first + 1] = lines[first + 1], lines[first]
        return lines

    change(folder / "steps/round_0001.jsonl", swap)
    difference = differing(folder).differences[0]
    assert (difference.round, difference.replica) == (1, peer)
    assert difference.what.startswith("commit 0 is step")


def test_a_sample_that_a_step_has_twice_is_named(folder: Path) -> None:
    peer, first = _log_of_two(folder)

    def double(lines: list[Any]) -> list[Any]:
        *_, samples, _count, _targets, _scale, _lr, _skipped = lines[first]["entry"]
        samples.append([samples[0][0], samples[0][1], samples[0][1] + 1])
        return lines

    change(folder / "steps/round_0001.jsonl", double)
    verdict = differing(folder)
    assert (verdict.differences[0].round, verdict.differences[0].replica) == (1, peer)
    assert "samples" in verdict.differences[0].what


def test_targets_that_the_labels_do_not_have_are_named(folder: Path) -> None:
    """A trainer that says more of them weighs more in the average."""

    def inflate(lines: list[Any]) -> list[Any]:
        for line in lines:
            if line.get("event") == "began":
                line["microbatch_targets"][0] += 1000
            elif "entry" in line:
                line["entry"][5] += 1000
        return lines

    for path in (*folder.glob("steps/*.jsonl"), *folder.glob("replicas/*.jsonl")):
        change(path, inflate)
    found = [difference.what for difference in differing(folder).differences]
    assert any("targets in its microbatches" in what for what in found), found


def test_a_loss_scale_that_is_none_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def rescale(lines: list[Any]) -> list[Any]:
        return [line | {"loss_scale": 0.0} if line.get("event") == "began" else line for line in lines]

    change(next(folder.glob("replicas/*.jsonl")), rescale)
    assert main(["replay", str(folder)]) != 0
    output = capsys.readouterr()
    assert "has the loss scale 0.0" in output.out + output.err


def test_a_pass_that_is_trained_on_twice_is_counted(folder: Path) -> None:
    """Somebody who changes all logs alike is found by the count of the samples, and by the gradients."""
    later = json.loads((folder / "steps/round_0002.jsonl").read_text().splitlines()[0])["entry"]
    # As many as the step has, whatever its trainer's share was: the first ones of the first round.
    earlier = [[0, 0, sum(stop - start for _, start, stop in later[3])]]

    def repeat(lines: list[Any]) -> list[Any]:
        for line in lines:
            if line.get("event") == "began" and line["key"] == later[0]:
                line["samples"] = earlier
            elif "entry" in line and line["entry"][0] == later[0]:
                line["entry"][3] = earlier
        return lines

    for path in (*folder.glob("steps/*.jsonl"), *folder.glob("replicas/*.jsonl")):
        change(path, repeat)
    verdict = differing(folder)
    assert verdict.repeated > 0
    assert any("were trained a second time" in str(difference) for difference in verdict.differences)
    assert any("squared gradient norm" in str(difference) for difference in verdict.differences)


def test_where_a_client_of_another_host_has_gathered_the_logs_those_of_the_replicas_stand_for_them(
    folder: Path,
) -> None:
    (folder / "steps/round_0002.jsonl").unlink()
    verdict = replay(folder)
    assert verdict.agrees, verdict.differences
    assert (verdict.repeated, verdict.missing, verdict.rounds_agreed) == (0, 0, 3)
    assert any("no step log of round 2" in note for note in verdict.notes)


def _replica_log(folder: Path, peer: str) -> Path:
    return folder / "replicas" / f"{peer}.1.jsonl"


def test_a_gradient_that_was_another_one_names_replica_and_step(folder: Path) -> None:
    peer, _ = _log_of_two(folder)

    alter_norm(folder, peer, step=1)
    difference = differing(folder).differences[0]
    assert (difference.round, difference.replica) == (1, peer)
    assert "squared gradient norm" in difference.what


def test_commits_that_have_changed_places_everywhere_are_still_found(folder: Path) -> None:
    peer, first = _log_of_two(folder)

    def swap_steps(lines: list[Any]) -> list[Any]:
        lines[first], lines[first + 1] = lines[first + 1], lines[first]
        return lines

    def swap_commits(lines: list[Any]) -> list[Any]:
        one, other = [index for index, line in enumerate(lines) if line["event"] == "applied"][:2]
        lines[one], lines[other] = lines[other], lines[one]
        return lines

    change(folder / "steps/round_0001.jsonl", swap_steps)
    change(_replica_log(folder, peer), swap_commits)
    difference = differing(folder).differences[0]
    assert (difference.round, difference.replica) == (1, peer)


def test_a_replica_without_its_own_log_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _replica_log(folder, "server2").unlink()
    assert main(["replay", str(folder)]) == 1
    out = capsys.readouterr().out
    assert "differs: round 1, stage 0, replica server2" in out
    assert "folder `replicas`" in out


def test_another_machine_is_said_before_anything_is_compared(folder: Path) -> None:
    for path in folder.glob("replicas/*.jsonl"):
        path.write_text(path.read_text().replace('"torch":"', '"torch":"0.'))
    notes: list[str] = []
    assert replay(folder, note=notes.append).notes == tuple(notes)
    assert any(note.startswith("torch was 0.") for note in notes)


# ---- faults that need a run of their own

LEFT_OUT = make_config(run={"deterministic": False}, diloco={"inner_steps": 3, "outer_steps": 5})


async def test_a_replica_that_is_left_out_of_a_record_and_trains_on_is_reproduced(tmp_path: Path) -> None:
    dataset = make_text(1000)
    async with Cluster(LEFT_OUT, log_dir=tmp_path, dataset=dataset) as cluster:
        victim = cluster.servers[2]

        def flip() -> None:
            victim.replica.member.state.base.parameters_N[0] += 1

        # What it contributes is wrong, so it is left out; what it has trained stays in its optimizer.
        cluster.when(Open, action=flip, receiver=victim.peer, number=4)
        with anyio.fail_after(240):
            result = await cluster.run()
    members = [victim.peer in record.stages[0].members for record in result.records]
    assert False in members
    reproduces(tmp_path, LEFT_OUT, dataset)


BATCH_NORM = make_config(
    run={"deterministic": False},
    data={"dataset_name": "digits", "task_type": "cv", "img_size": 8, "num_channels": 1, "holdout_fraction": 0.01},
    model={"family": "resnet18", "num_classes": 10},
    model_pipeline={"stages": 2, "microbatches": 2},
    diloco={"inner_steps": 3, "outer_steps": 2, "batch_size_per_step": 4},
)


@pytest.mark.slow
async def test_buffers_of_steps_that_have_overlapped_at_a_replica_are_reproduced(tmp_path: Path) -> None:
    async with Cluster(BATCH_NORM, log_dir=tmp_path) as cluster:
        # Both trainers go over the one replica of stage 1 that is left: their steps begin before the other's commits.
        victim = cluster.servers[VICTIM].peer
        cluster.when(Prepared, action=lambda: cluster.kill_server(VICTIM), sender=victim, number=1)
        with anyio.fail_after(240):
            result = await cluster.run()
    versions = [line.entry.version for lines in result.steps.values() for line in lines]
    positions = [
        place
        for lines in result.steps.values()
        for peer in {line.peer for line in lines}
        for place, _ in enumerate(line for line in lines if line.peer == peer)
    ]
    assert sum(versions) < sum(positions), "no step has seen an older version than the one that it was applied to"
    reproduces(tmp_path, BATCH_NORM, None)
