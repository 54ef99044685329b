"""Each invariant that a run may violate makes the verdict fail, and names it; a run that violates none passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.unit.lab.forged_run import ForgedRun

from shoal.errors import RunFailed
from shoal.identity import Identity
from shoal.wire.messages.round import StageHashes
from shoal_lab.verdict import CHECKS, TRAINED, Check, Evidence, judge, require_whole

Forge = Callable[[Path], Evidence]
Checks = Sequence[tuple[str, Check]]

# A forged run has files, but nobody has computed what they say.
OF_FILES = [(name, check) for name, check in CHECKS if name != "replay"]


def _good(directory: Path) -> ForgedRun:
    run = ForgedRun(directory)
    run.round(0, 4)
    run.round(8, 12)
    run.round(16, 20)
    return run


def _violated(evidence: Evidence) -> set[str]:
    return {finding.check for finding in judge(evidence, OF_FILES) if finding.problems}


def test_a_run_without_faults_violates_nothing(tmp_path: Path) -> None:
    findings = judge(_good(tmp_path).evidence(), OF_FILES)
    assert [finding.check for finding in findings] == [name for name, _ in OF_FILES]
    assert [problem for finding in findings for problem in finding.problems] == []
    texts = {finding.check: finding.text for finding in findings}
    assert texts["hashes"] == "12 states equal"
    assert texts["samples"] == "24 samples, duplicates 0, missing 0, steps lost 0"
    assert texts["chain"] == "chain of 3 records"


def _other_hash(directory: Path) -> Evidence:
    run = ForgedRun(directory, {(2, 3): "other"})
    run.round(0, 4)
    run.round(8, 12)
    return run.evidence()


def _sample_twice(directory: Path) -> Evidence:
    run = ForgedRun(directory)
    run.round(0, 4)
    run.round(4, 8)
    return run.evidence(duplicates=4)


def _sample_left_out(directory: Path) -> Evidence:
    run = ForgedRun(directory)
    run.round(0, 4)
    run.round(12)
    return run.evidence(missing=4)


def _record_left_out(directory: Path) -> Evidence:
    run = ForgedRun(directory)
    run.round(0, 4)
    run.skip_a_round()
    run.round(8, 12)
    return run.evidence()


def _chain_cut(directory: Path) -> Evidence:
    run = ForgedRun(directory)
    run.round(0, 4)
    run.round(8, 12, previous="0" * 64)
    return run.evidence()


def _damaged_signature(directory: Path) -> Evidence:
    run = _good(directory)
    path = run.logs / "rounds" / "round_0002.json"
    text = path.read_text()
    signature = text.partition('"signature": "')[2].partition('"')[0]
    path.write_text(text.replace(signature, signature[:-2] + ("00" if signature[-2:] != "00" else "11")))
    return run.evidence()


def _no_summary(directory: Path) -> Evidence:
    evidence = _good(directory).evidence()
    (evidence.directory / "summary.json").unlink()
    return evidence


@pytest.mark.parametrize(
    ("forge", "check"),
    [
        (_other_hash, "hashes"),
        (_sample_twice, "samples"),
        (_sample_left_out, "samples"),
        (_record_left_out, "chain"),
        (_chain_cut, "chain"),
        (lambda directory: _good(directory).evidence(exit_code=1), "end"),
        (lambda directory: _good(directory).evidence(leftovers=("process 7 shoal:server",)), "leftovers"),
        (lambda directory: _good(directory).evidence(samples=23), "summary"),
        (lambda directory: _good(directory).evidence(hashes={"0": "p3.0", "1": "other"}), "summary"),
        (_no_summary, "summary"),
    ],
)
def test_what_is_violated_is_found_and_nothing_else(forge: Forge, check: str, tmp_path: Path) -> None:
    assert _violated(forge(tmp_path)) == {check}


def test_with_a_damaged_signature_nothing_that_rests_on_the_records_holds(tmp_path: Path) -> None:
    assert _violated(_damaged_signature(tmp_path)) == {"chain", "samples", "summary"}


def test_a_client_of_another_host_may_go_on_with_the_chain(tmp_path: Path) -> None:
    run = ForgedRun(tmp_path)
    run.round(0, 4)
    run.round(8, 12, signer=Identity.generate())
    assert _violated(run.evidence()) == set()


def test_a_record_of_somebody_else_breaks_the_chain(tmp_path: Path) -> None:
    run = ForgedRun(tmp_path)
    run.round(0, 4)
    stranger = Identity.generate()
    run.round(8, 12, signer=stranger, authority=stranger)
    assert _violated(run.evidence()) >= {"chain", "samples"}


def test_a_chain_that_a_stranger_has_signed_throughout_is_none(tmp_path: Path) -> None:
    run = ForgedRun(tmp_path)
    stranger = Identity.generate()
    run.round(0, 4, signer=stranger, authority=stranger)
    run.round(8, 12, signer=stranger, authority=stranger)
    assert _violated(run.evidence()) >= {"chain", "samples"}


def test_what_a_server_held_before_its_run_was_resumed_from_an_older_record_is_not_of_the_run(tmp_path: Path) -> None:
    run = _good(tmp_path)
    run.swap(1, 3, "0" * 64, StageHashes("before", "the", "resume"))
    assert not _violated(run.evidence())


def test_a_run_of_which_there_is_nothing_to_check_does_not_hold(tmp_path: Path) -> None:
    assert _violated(ForgedRun(tmp_path).evidence()) >= {"hashes", "samples", "chain"}


@pytest.mark.slow
@pytest.mark.parametrize("checks", [CHECKS, TRAINED])
def test_a_run_that_cannot_be_replayed_does_not_hold(checks: Checks, tmp_path: Path) -> None:
    replay = [(name, check) for name, check in checks if name == "replay"]
    (finding,) = judge(_good(tmp_path).evidence(), replay)
    assert finding.problems


@pytest.mark.slow
def test_what_a_killed_run_has_trained_is_required_by_name(tmp_path: Path) -> None:
    evidence = _sample_twice(tmp_path)
    evidence.swarm.client._process = _Ended()  # type: ignore[assignment]
    with pytest.raises(RunFailed, match="samples: duplicates 4"):
        require_whole(evidence.swarm)


class _Ended:
    returncode = -9
