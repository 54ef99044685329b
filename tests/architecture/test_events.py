"""What happens is an event of the catalogue: no free strings in log calls, and docs/events.md lists every kind."""

from __future__ import annotations

import ast
import functools
import importlib
import logging
import pkgutil
from collections import Counter
from pathlib import Path

from tools import events as page

import shoal.events
from shoal.events.base import Event, catalogue, field_names, kinds, name_of

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
LOG_CALLS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
LINE = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "time",
    "level",
    "logger",
    "event",
    "left_out",
}
"""What a line of a log, or Python's record of it, has beside the fields."""


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of each file of src/ by its name."""
    return {str(path.relative_to(SOURCE)): ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}


def free_strings(tree: ast.AST) -> list[str]:
    """Return the literal names, or texts, that calls of loggers are given."""
    found: list[str] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr not in LOG_CALLS or "logg" not in ast.unparse(node.func.value).lower():
            continue
        found += [
            ast.unparse(argument)
            for argument in node.args
            if any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in ast.walk(argument))
        ]
    return found


def test_no_log_call_has_a_free_string() -> None:
    found = {name: free for name, tree in trees().items() if (free := free_strings(tree))}
    assert found == {}, "emit an event of shoal.events"


def test_a_free_string_is_found_wherever_it_stands_in_a_log_call() -> None:
    assert free_strings(ast.parse("logger.info('x.y')")) == ["'x.y'"]
    assert free_strings(ast.parse("self._logger.log(level, 'x' if a else name)")) == ["'x' if a else name"]
    assert free_strings(ast.parse("_logger.error(f'it {failed}')")) == ["f'it {failed}'"]
    others = ast.parse("logger.log(event.level, event.name, extra={'a': 1}); math.log('2'); view.info('x')")
    assert free_strings(others) == []


def test_every_kind_has_a_name_of_its_own_and_is_emitted() -> None:
    own = _own_kinds()
    assert [name for name, count in Counter(map(name_of, own)).items() if count > 1] == [], "two kinds of one name"
    outside = [tree for name, tree in trees().items() if not name.startswith("events/")]
    used = {node.id for tree in outside for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert [kind.__name__ for kind in own if kind.__name__ not in used] == [], "nobody emits them"


def _own_kinds() -> list[type[Event]]:
    for module in pkgutil.iter_modules(shoal.events.__path__):
        importlib.import_module(f"{shoal.events.__name__}.{module.name}")
    return [kind for kind in kinds() if kind.__module__.startswith(f"{shoal.events.__name__}.")]


def test_no_field_hides_what_a_line_of_a_log_has_by_itself() -> None:
    hidden = {name: set(field_names(kind).values()) & LINE for name, kind in catalogue().items()}
    # What a round leaves out is no count of lines: no flood gate stands before it.
    assert {name: fields for name, fields in hidden.items() if fields} == {"samples.trained_twice": {"left_out"}}


def test_a_warning_for_people_says_why_or_what_to_do() -> None:
    lacking = [
        name
        for name, kind in catalogue().items()
        if kind.level >= logging.WARNING and kind.say is not Event.say and not (kind.why or kind.do)
    ]
    assert lacking == []


def test_every_kind_says_what_has_happened_in_whole_sentences() -> None:
    said = {name: (kind.__doc__ or "").partition("\n\n")[0] for name, kind in catalogue().items()}
    assert [name for name, text in said.items() if not text.endswith(".")] == []


def test_the_page_on_events_is_that_of_the_catalogue() -> None:
    text = (ROOT / "docs" / "events.md").read_text()
    assert text == page.page(), "write it anew: python tools/events.py > docs/events.md"


def test_the_page_says_what_a_person_is_told_with_the_names_of_fields() -> None:
    shown = page.entry(catalogue()["server.undialled"])
    assert "{who} cannot be dialled from {dialled_from}" in shown
    assert "--public-ip" in shown
    assert "`server.undialled`** WARNING" in shown
