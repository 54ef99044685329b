"""`shoal doctor` on the terminal: text in groups, plain lines on a pipe, one JSON object."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from typing import TextIO

import anyio
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal import log
from shoal.cli.doctor.checking import names_of
from shoal.cli.doctor.diagnosis import CheckResult, Condition, Diagnosis
from shoal.cli.doctor.examine import CHECKS, examine, unread
from shoal.cli.exits import DONE, FAILED
from shoal.cli.known_peers import with_known_peers
from shoal.cli.output import without_controls
from shoal.config import Config
from shoal.errors import ConfigError

_STYLES: Mapping[Condition, str] = {
    Condition.OK: "green",
    Condition.WARNING: "yellow",
    Condition.FAILED: "bold red",
    Condition.SKIPPED: "dim",
}
_WIDTH = max(map(len, Condition))
_NAME_WIDTH = max(len(check.name) for check in CHECKS)

LoadConfig = Callable[[], tuple[Config, Mapping[str, str]]]


def print_diagnosis(load: LoadConfig, check: str = "", *, as_json: bool) -> int:
    """Examine this host, print what is found, and return the exit code: 1 if a check has failed.

    Args:
        load: gives the configuration, and what sets each key.
        check: of which it is told: a check, as it is called behind its group, or a group; empty: of all.

    Raises:
        ConfigError: there is no such check; or one is asked for, and the configuration cannot be read.
    """
    names = names_of(check, CHECKS)
    try:
        found = _examined(*load())
    except ConfigError as error:
        if check:
            raise
        found = unread(error)
    found = found.only(names) if check else found
    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        _print(found.checks, sys.stdout)
        print(_sum(found))
    return FAILED if found.verdict is Condition.FAILED else DONE


def print_findings(load: LoadConfig) -> None:
    """Examine this host and print on standard error what there is to do something about."""
    found = _examined(*load()).findings
    if found:
        print("shoal doctor finds on this host:", file=sys.stderr)
        _print(found, sys.stderr)
    else:
        print("shoal doctor finds nothing else that is wrong on this host", file=sys.stderr)


def _examined(config: Config, origins: Mapping[str, str]) -> Diagnosis:
    """Examine this host, with the initial peers that it remembers where none are given."""
    log.configure("doctor", None)
    are_remembered = not config.network.initial_peers
    # Where none are remembered either, what needs them is skipped.
    with suppress(ConfigError):
        config = with_known_peers(config, origins)
    return anyio.run(
        partial(examine, config, origins, are_remembered=are_remembered), backend_options={"use_uvloop": True}
    )


def _print(checks: Sequence[CheckResult], stream: TextIO) -> None:
    console = Console(file=stream)
    if not console.is_terminal or console.is_dumb_terminal:
        for check in checks:
            print("\n".join(plain_lines(check)), file=stream)
        return
    for group, members in groupby(checks, lambda check: check.name.partition(".")[0]):
        console.print(Text(group, style="bold"))
        table = Table.grid(padding=(0, 2, 0, 0))
        for check in members:
            style = _STYLES[check.verdict]
            said = Text(without_controls(check.evidence), style="dim" if check.verdict is Condition.SKIPPED else "")
            if check.remedy:
                said.append(f"\n{without_controls(check.remedy)}", style="bold")
            table.add_row(Text(f"  {check.verdict}", style=style), Text(check.title), said)
        console.print(table)


def plain_lines(check: CheckResult) -> Iterator[str]:
    """Yield a check as lines for a file or a pipe: what it has found, and under it what to do."""
    evidence = "; ".join(without_controls(check.evidence).splitlines())
    yield f"{check.verdict:<{_WIDTH}}  {check.name:<{_NAME_WIDTH}}  {evidence}"
    for line in without_controls(check.remedy).splitlines():
        yield f"{'':<{_WIDTH}}  {'do':>{_NAME_WIDTH}}  {line}"


def _sum(found: Diagnosis) -> str:
    counts = ((condition, len(found.of(condition))) for condition in Condition)
    checks = "1 check" if len(found.checks) == 1 else f"{len(found.checks)} checks"
    return f"{checks}: " + ", ".join(f"{count} {condition}" for condition, count in counts if count)
