"""Every command of the documents is taken by the program that it calls, with its flags; who runs it is known; and what
the page on other systems names is there."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest
from tests.documented import PAGES, ROOT, arguments, calls, commands, problem_of, tables
from tests.site_commands import BY_NOBODY, ELSEWHERE, IN_ORDER, commands_of, runner_of, to_run, why_not

from shoal.cli import main
from shoal.cli.remote.hosts_file import HostsFile, SwarmEntry
from shoal.config.keys import keys

WITH_COMMANDS = [page for page in PAGES if commands(page)]
RUNS = "run-local", "start-trainer-client", "start-servers"
NOT_OURS = {"cat", "docker", "exec", "export", "journalctl", "ls", "pip", "scp", "sky", "source", "ssh"}
"""Programs whose flags nothing of shoal knows; what of them is in deploy/ is looked at by tests/unit/cli/remote."""


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


def _unaccounted(listed: Iterable[str]) -> list[str]:
    """Return the commands that no test runs, neither as they stand nor its equal, though nothing says why."""
    run = {command for test in IN_ORDER for command in to_run(test)}
    return [each for each in listed if each not in run and runner_of(each) is None and why_not(each) is None]


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_of_each_command_it_is_known_who_runs_it_or_why_nobody_does(page: str) -> None:
    assert _unaccounted(commands(page)) == [], "tests/site_commands.py says nothing of them"


def test_a_new_command_that_nobody_runs_is_found() -> None:
    new = ["shoal trace --new", "python run_local.py --config-path configs/new.yaml", "python benchmarks.py"]
    assert _unaccounted(["shoal trace", *new, "shoal ps"]) == new


@pytest.mark.parametrize("test", [*dict.fromkeys([*IN_ORDER, *ELSEWHERE.values()])])
def test_who_is_said_to_run_commands_is_there(test: str) -> None:
    path, _, function = test.partition("::")
    name, _, variant = function.partition("[")
    assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), test
    assert not variant or test in IN_ORDER, "tests/e2e/test_tasks.py makes its variants of these"
    for page in IN_ORDER.get(test, ()):
        assert commands_of(page), f"there are none on {page}"


def test_no_pattern_is_left_over() -> None:
    every = {command for pages in (PAGES, *IN_ORDER.values()) for page in pages for command in commands_of(page)}
    for patterns in (ELSEWHERE, BY_NOBODY):
        first = {next((one for one in patterns if re.fullmatch(one, command)), None) for command in every}
        assert [one for one in patterns if one not in first] == [], "no command needs them"


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
