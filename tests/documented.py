"""The commands of documents: which there are, and whether the programs that they call take them as they stand."""

from __future__ import annotations

import ast
import functools
import re
import shlex
from pathlib import Path
from typing import NamedTuple

from cyclopts import CycloptsError

from shoal.cli.app import app, spelt_out
from shoal.cli.run_commands import name_and_flags
from shoal.config.flags import from_flags

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(path.relative_to(ROOT)) for folder in ("docs", "examples") for path in (ROOT / folder).rglob("*.md")),
)
_BLOCK = re.compile(r"^```(?:bash|sh|console)\n(.*?)^```", re.DOTALL | re.MULTILINE)


class Table(NamedTuple):
    """A table of a page: the heading that it stands below, and its rows without the first two lines."""

    heading: str
    rows: list[list[str]]


def commands(page: str) -> list[str]:
    """Return the commands of a page's blocks, without comments."""
    lines = "\n".join(_BLOCK.findall((ROOT / page).read_text())).replace("\\\n", " ").splitlines()
    return [line.split(" #")[0].removeprefix("$ ").strip() for line in lines if line.split("#")[0].strip()]


def tables(page: str) -> list[Table]:
    """Return the tables of a page."""
    found: list[Table] = []
    heading, was_table = "", False
    for line in (ROOT / page).read_text().splitlines():
        heading = line.lstrip("# ") if line.startswith("#") else heading
        if line.startswith("|"):
            if not was_table:
                found.append(Table(heading, []))
            # A bar inside of code would be written `\|`.
            found[-1].rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
        was_table = line.startswith("|")
    return [Table(each.heading, each.rows[2:]) for each in found]


def quick_start(system: str) -> list[str]:
    """Return what docs/moving.md has in place of the commands of another system's quick start, in their order."""
    [rows] = [table.rows for table in tables("docs/moving.md") if table.heading == f"Quick start of {system}"]
    return [code for row in rows for code in re.findall(r"`([^`]+)`", row[1])]


def arguments(command: str) -> list[str]:
    """Return what shoal is called with in a command of a document; nothing if it is not."""
    words = _words(command)
    if words and _is_python(words[0]) and _is_script_of_shoal(words[1]):
        words = ["shoal", words[1].removesuffix(".py").replace("_", "-"), *words[2:]]
    if not words or Path(words[0]).name != "shoal":
        return []
    return [str(ROOT / word) if word.startswith(("configs/", "examples/")) else word for word in words[1:]]


def problem_of(command: str) -> str | None:
    """Return why the programs that a command calls would not take it; None if they would.

    Raises:
        LookupError: nothing here knows one of the programs.
    """
    problems = [_problem_of_call(call) for call in calls(command)]
    return next(filter(None, problems), None)


def calls(command: str) -> list[str]:
    """Return what a command calls: each part of a pipe, and what is run by way of ssh or as another user."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|")
    lexer.whitespace_split = True
    parts: list[list[str]] = [[]]
    for word in lexer:
        if word == "|":
            parts.append([])
        else:
            parts[-1].append(word)
    found: list[str] = []
    for words in parts:
        if words[0] == "ssh" and len(words) == 3:
            found += calls(words[2])
        elif words[0] == "runuser":
            found.append(shlex.join(word for word in words[words.index("--") + 1 :] if word != "env"))
        else:
            found.append(shlex.join(words).replace("'>'", ">"))
    return found


def _problem_of_call(call: str) -> str | None:
    words = _words(call)
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return None if words[1] in targets else f"no target {words[1]}"
    if _is_python(words[0]) and not _is_script_of_shoal(words[1]):
        return _problem_of_script(words[1:])
    found = arguments(call)
    if not found:
        raise LookupError(call)
    if "--help" in found:
        return None
    try:
        _, bound, _ = app.parse_args(spelt_out(found), exit_on_error=False, print_error=False)
    except CycloptsError as error:
        return str(error)
    # A run, or a check of the doctor, may stand before the flags.
    name = bound.arguments.get("run", "") or bound.arguments.get("check", "")
    _, flags = name_and_flags(name, bound.arguments.get("flags", ()))
    problems = from_flags(flags).problems
    return str(problems) if problems else None


def _is_python(program: str) -> bool:
    return Path(program).name.startswith("python")


def _is_script_of_shoal(path: str) -> bool:
    return "/" not in path and path != "test_failover.py" and (ROOT / path).is_file()


def _words(command: str) -> list[str]:
    """Return a command's words, without variables before it and where its output goes."""
    words = shlex.split(re.sub(r" (>|\||2>).*$", "", command))
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    return words


def _problem_of_script(words: list[str]) -> str | None:
    path = ROOT / words[0]
    if not path.is_file():
        return f"there is no {words[0]}"
    named = {word.partition("=")[0] for word in words[1:] if word.startswith("--")}
    unknown = named - _flags_of(path)
    return f"{words[0]} has no {', '.join(sorted(unknown))}" if unknown else None


@functools.cache
def _flags_of(path: Path) -> set[str]:
    """Return the flags that a script gives to its parser; what it would do with them is not asked."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    added = [each for each in calls if isinstance(each.func, ast.Attribute) and each.func.attr == "add_argument"]
    return {part.value for each in added for part in each.args if isinstance(part, ast.Constant)}
