"""Prints docs/reference/commands.md from the app: `python tools/commands.py > docs/reference/commands.md`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, cast

from cyclopts import App, Group

from shoal.cli.app import app
from shoal.cli.arguments import CHECK, MODEL, SET_UP, STEER, TRAIN, WATCH

HEAD = """# Commands

Every command with its flags, made from the program itself by `tools/commands.py`; `shoal COMMAND --help` says the same.
In a checkout `python run_local.py` is `shoal run-local`; `start_trainer_client.py` and `start_servers.py` are such
scripts too.

A command that takes *any key* takes each one of [the configuration](keys.md) as a flag.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | the run, or what the command looks for, has failed |
| 2 | wrong input, or a swarm that cannot be joined; the message says which |
| 3 | the machine is too busy to measure |
| 130 | interrupted |

Ctrl-C once leaves gracefully, twice at once.
"""
GROUPS = (TRAIN, WATCH, STEER, MODEL, CHECK, SET_UP)
_POSITIONAL = ("POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD", "VAR_POSITIONAL")


def page() -> str:
    """Return the whole page."""
    lines = [HEAD]
    for group in GROUPS:
        lines += [f"## {group.name}", ""]
        for name, command in leaves():
            if _group(name) == group.name:
                lines += [*entry(name, command), ""]
    return "\n".join(lines).rstrip() + "\n"


def leaves(within: App = app, path: str = "") -> Iterator[tuple[str, App]]:
    """Yield every command that does something, by its whole name."""
    for name in within:
        if name.startswith("-"):
            continue
        command = within[name]
        whole = f"{path} {name}".strip()
        if command.default_command is not None:
            yield whole, command
        yield from leaves(command, whole)


def entry(name: str, command: App) -> Iterator[str]:
    """Yield what the page says of one command."""
    yield f"### `shoal {name}`"
    yield ""
    yield inspect.cleandoc(command.help).replace("<", r"\<")
    arguments = [argument for argument in command.assemble_argument_collection(parse_docstring=True) if argument.show]
    if not arguments:
        return
    yield ""
    yield "| argument | meaning |"
    yield "|---|---|"
    for argument in arguments:
        yield f"| {_shown(argument)} | {_cell(argument.parameter.help or '')}{_default(argument)} |"


def _group(name: str) -> str:
    """The title under which `shoal --help` has a command, or the one that it belongs to."""
    groups = cast(tuple[Group, ...], app[name.split()[0]].group)
    return groups[0].name


def _shown(argument: Any) -> str:
    kind, first = argument.field_info.kind.name, argument.names[0]
    if first == "FLAGS":
        return "*any key*"
    if kind in _POSITIONAL:
        word = first.lstrip("-").upper()
        return f"`{word}...`" if kind == "VAR_POSITIONAL" else f"`{word}`"
    is_switch = argument.hint is bool
    names = [name for name in argument.names if not name.startswith("--empty-")]
    return ", ".join(f"`{name}`" if is_switch else f"`{name} VALUE`" for name in names)


def _default(argument: Any) -> str:
    default = argument.field_info.default
    if argument.required:
        return " (needed)"
    if default in (None, False, "") or default is inspect.Parameter.empty:
        return ""
    return f" [{default}]"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


if __name__ == "__main__":
    print(page(), end="")
