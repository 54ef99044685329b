"""Every command of the documents is taken by the program that it calls, with its flags; who runs it is known; and what
the page on other systems names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.documented import PAGES, ROOT, arguments, calls, commands, problem_of, tables

from shoal.cli import main
from shoal.cli.remote.hosts_file import HostsFile, SwarmEntry
from shoal.config.keys import keys

WITH_COMMANDS = [page for page in PAGES if commands(page)]
RUNS = "run-local", "start-trainer-client", "start-servers"
NOT_OURS = {"cat", "docker", "exec", "export", "journalctl", "ls", "pip", "scp", "sky", "source", "ssh"}
"""Programs whose flags nothing of shoal knows; what of them is in deploy/ is looked at by tests/unit/cli/remote."""

RUN_BY = {
    "CONTRIBUTING.md": ".ci/run",
    "README.md": ".ci/run",
    "docs/deploy.md": "tests/unit/cli/remote/test_machine_script.py",
    "docs/hosts.md": "tests/e2e/test_up.py",
    "docs/index.md": ".ci/run",
    "docs/monitoring.md": "tests/e2e/test_tasks.py",
    "docs/moving.md": "tests/e2e/test_quick_starts.py",
    "docs/reference/files.md": "tests/e2e/test_tasks.py",
    "docs/reference/keys.md": "tests/e2e/test_tasks.py",
    "docs/start/one_machine.md": "tests/e2e/test_tasks.py",
    "docs/start/three_machines.md": "tests/e2e/test_inviting.py",
    "docs/start/what_you_see.md": "tests/e2e/test_tasks.py",
    "docs/tasks/chat.md": "tests/e2e/test_tasks.py",
    "docs/tasks/images.md": "tests/e2e/test_tasks.py",
    "docs/tasks/language_model.md": "tests/e2e/test_tasks.py",
    "docs/tasks/speech.md": "tests/e2e/test_tasks.py",
    "docs/tasks/use_model.md": "tests/e2e/test_tasks.py",
    "docs/wrong.md": "tests/e2e/test_tasks.py",
    "examples/own_data/README.md": "tests/integration/test_examples.py",
    "examples/own_model/README.md": "tests/integration/test_examples.py",
}
"""Who runs a page's commands, or those of them that need neither minutes, nor a network, nor a run that goes on."""
ONLY_READ = {
    "docs/configurations.md": "hours: each configuration, with three seeds",
    "docs/learning.md": "minutes; tests/integration/replay and tests/e2e/test_parquet.py have the same in small",
    "docs/performance.md": "measurements, which need a machine that does nothing else",
    "docs/reference/distqat.md": "the file is the reader's own; tests/unit/config has some of aether's",
    "docs/reference/status.md": "a run that goes on; tests/e2e/test_watching.py has one",
    "docs/reliability.md": "hours of faults; tests/e2e has those of each kind in small",
    "docs/tasks/adapters.md": "tests/e2e/test_lora.py trains adapters in small",
    "docs/tasks/hugging_face.md": "tests/e2e/test_hf.py trains them in small",
    "docs/tasks/made_images.md": "tests/e2e/test_configs.py trains it in small",
    "docs/tasks/own_run.md": "minutes each; tests/e2e/test_variants.py has the same flags in small",
    "docs/tasks/servers.md": "hosts with GPUs and addresses of their own; tests/e2e/test_hosts.py has hosts",
    "docs/tasks/steer.md": "tests/e2e/test_steering.py and test_resuming.py steer runs in small",
    "docs/tasks/your_data.md": "the data are the reader's own; tests/e2e/test_parquet.py has some",
}
"""Pages whose commands are only compared with what takes them, and why."""


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_the_commands_of_a_page_are_taken_with_their_flags(page: str) -> None:
    for command in commands(page):
        for call in calls(command):
            if not NOT_OURS & set(call.split()[:4]):
                assert problem_of(call) is None, f"{page}: {command}"


@pytest.mark.parametrize(
    "wrong",
    [
        "shoal stats",
        "shoal status --wach",
        "shoal status --diloco.inner-stepps 3",
        "python start_servers.py --num-server 2",
        "python benchmarks/idle.py --minutes 2",
        "python benchmarks/nobody.py",
        "make tests",
        "shoal hosts log box1",
        "shoal invite | ssh root@box1 'runuser -u shoal -- env HOME=/x /opt/shoal/bin/shoal joyn'",
    ],
)
def test_a_command_or_a_flag_that_does_not_exist_is_found(wrong: str) -> None:
    assert problem_of(wrong)


def test_a_program_that_nobody_knows_is_found() -> None:
    with pytest.raises(LookupError):
        problem_of("shawl status")


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_runs_of_documents_have_a_configuration_that_holds(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in commands(page):
        found = arguments(command) if not NOT_OURS & set(command.split()[:4]) else []
        # What is resumed would have to be there, and so would a file of the reader's.
        if not found or found[0] not in RUNS or "--resume" in found or "mine.yaml" in found:
            continue
        shown = [] if {"--help", "--print-config"} & set(found) else ["--print-config"]
        assert main([*found, *shown]) == 0, f"{command}: {capsys.readouterr().err}"


def test_of_each_page_with_commands_it_is_known_who_runs_them() -> None:
    assert sorted([*RUN_BY, *ONLY_READ]) == sorted(WITH_COMMANDS)
    for page, runner in RUN_BY.items():
        text = (ROOT / runner).read_text()
        assert Path(page).stem in text or re.search(r"make (test|setup)", text), f"{runner} says nothing of {page}"
    for page, why in ONLY_READ.items():
        for test in re.findall(r"\btests/[\w/]+\.py", why):
            assert (ROOT / test).is_file(), f"{page}: {test}"


# ---- the page on other systems -------------------------------------------------------------------------------------

MOVING = "docs/moving.md"
COMPLETED = {
    "shoal benchmark": "shoal benchmark codec",
    "shoal evaluate": "shoal evaluate logs/sandbox",
    "shoal export --merge": "shoal export logs/sandbox --to whole --merge",
    "shoal export --to": "shoal export logs/sandbox --to whole",
    "shoal generate": "shoal generate logs/sandbox --prompt x",
}
"""What a table names without all that it needs."""
WITH_FLAGS = (
    "shoal run-local",
    "shoal start-servers",
    "shoal start-trainer-client",
    "shoal join --code",
    "shoal generate logs/sandbox --prompt x",
)
WORDS = {
    *("32-true", "bf16-mixed", "fp16-mixed"),  # of data.precision
    *("hashes", "incidents", "steps_lost"),  # of summary.json
    "package.module:Class",
    "INITIAL_PEERS",
}
GENERATED = ("summary.json", "hosts.yaml", "~/.config/shoal/swarm.key")
KEYS = keys()
SECTIONS = {name.rpartition(".")[0] for name in KEYS}
OF_HOSTS_FILE = {*HostsFile.model_fields, *(f"swarm.{name}" for name in SwarmEntry.model_fields)}


def _named(heading: str, row: list[str]) -> list[str]:
    """Return what a row says that shoal has: the code of its right cell, and of the left one if both are the same."""
    theirs, ours = row[0], row[-1]
    is_same = ours.startswith("the same") and heading == "DistQat (aether)"
    return re.findall(r"`([^`]+)`", theirs + ours if is_same else ours)


def _is_known(name: str) -> bool:
    if name in WORDS or name in GENERATED or (ROOT / name).exists():
        return True
    if name.startswith("-"):
        return any(problem_of(f"{command} {name}{value}") is None for command in WITH_FLAGS for value in ("", " 1"))
    if name.startswith(("cat ", "export ")) or name == "-f":
        return True  # the shell's own
    if re.match(r"(shoal|python|make|[A-Z]+=\S+ python) ", name):
        return problem_of(COMPLETED.get(name, name)) is None
    if re.match(r"\w+\.py ", name):
        return problem_of(f"python {re.sub(r' [A-Z]+$', ' x.yaml', name)}") is None
    key = name.partition(":")[0]
    return key in KEYS or key in SECTIONS or key in OF_HOSTS_FILE


@pytest.mark.parametrize("table", tables(MOVING), ids=lambda table: table.heading)
def test_what_the_page_on_other_systems_names_is_there(table: tuple[str, list[list[str]]]) -> None:
    heading, rows = table
    assert rows
    for row in rows:
        assert len(row) == 2, row
        assert [name for name in _named(heading, row) if not _is_known(name)] == [], row


@pytest.mark.parametrize(
    "wrong", ["shoal jion", "--no-such-flag", "diloco.inner_stepz", "python run_remote.py", "swarm.colour", "dune.yaml"]
)
def test_what_is_not_there_is_not_known(wrong: str) -> None:
    assert not _is_known(wrong)
