"""Rules of the code base that no linter knows and that would not survive without a test."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal.errors
from shoal.errors import ShoalError, Transient

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").glob("shoal*/**/*.py"))
SCRIPTS = sorted(ROOT.glob("*.py"))


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of each file of src/ by its name; they are parsed once, when a test first asks."""
    return {_name(path): ast.parse(path.read_text()) for path in SOURCES}


def test_root_scripts_are_thin() -> None:
    assert SCRIPTS
    for script in (script for script in SCRIPTS if not script.name.startswith("test_")):
        assert len(script.read_text().splitlines()) <= 40, script.name


def test_every_module_says_its_job() -> None:
    silent = [name for name, tree in trees().items() if tree.body and not ast.get_docstring(tree)]
    assert silent == []


# ---- what may be called where --------------------------------------------------------------------------------------


def _calls(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


SLEEPS = {"asyncio.sleep", "anyio.sleep", "anyio.sleep_until", "anyio.sleep_forever", "anyio.lowlevel.checkpoint.sleep"}
CLOCKS = {"datetime.now", "datetime.utcnow", "datetime.datetime.now", "datetime.today"}
EXECUTES = {
    *("eval", "exec", "compile", "__import__", "builtins.eval", "builtins.exec", "builtins.compile"),
    *("torch.load", "torch.jit.load", "numpy.load", "yaml.load", "yaml.load_all", "yaml.full_load"),
    *("yaml.unsafe_load", "yaml.unsafe_load_all"),
}
EXECUTING_MODULES = {
    *("pickle", "_pickle", "cPickle", "pickletools", "dill", "cloudpickle", "joblib", "marshal", "shelve", "code"),
    *("torch.serialization", "torch.package", "multiprocessing.connection", "multiprocessing.reduction"),
}


def _full_names(tree: ast.AST) -> dict[str, str]:
    """What names of a module stand for: `np` for `numpy`, `load` for `torch.load`."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def executing(tree: ast.AST) -> set[str]:
    """What of a module might execute what it reads."""
    found = {name for name in _imports(tree) if name in EXECUTING_MODULES}
    full_names = _full_names(tree)
    found |= {name for name in full_names.values() if name in EXECUTES - {"numpy.load"}}
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Call, ast.Attribute, ast.Name)):
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            continue  # what gets a value, such as the field of a section, is not called
        first, dot, rest = ast.unparse(node.func if isinstance(node, ast.Call) else node).partition(".")
        name = full_names.get(first, first) + dot + rest
        if name == "numpy.load":
            # numpy unpickles only where it is told to.
            if isinstance(node, ast.Call) and any(each.arg in ("allow_pickle", None) for each in node.keywords):
                found.add(name)
        elif name in EXECUTES:
            found.add(name)
    return found


@pytest.mark.parametrize(
    "text",
    [
        "eval(x)",
        "exec(x)",
        "compile(x, 'x', 'eval')",
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load(path)",
        "import torch as t\nt.load(path)",
        "read = eval",
        "from torch import load",
        "import yaml\nyaml.load(text, Loader=yaml.Loader)",
        "from yaml import unsafe_load",
        "import marshal",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "from torch.serialization import load",
        "import marshal as m\nm.loads(x)",
    ],
)
def test_what_would_execute_what_it_reads_is_noticed(text: str) -> None:
    assert executing(ast.parse(text))


def test_what_does_not_is_left_alone() -> None:
    text = "import numpy as np, re\nnp.load(path)\nmodule.eval()\nre.compile(x)\nself.load()\njson.loads(x)"
    assert executing(ast.parse(text)) == set()


def test_nothing_that_is_read_is_executed() -> None:
    found = {name: executing(tree) for name, tree in trees().items()}
    assert {name: calls for name, calls in found.items() if calls} == {}


def test_forbidden_calls_are_absent() -> None:
    found: list[str] = []
    for name, tree in trees().items():
        calls, imports = set(_calls(tree)), set(_imports(tree))
        if name != "src/shoal/clock.py":
            clocks = sorted(calls & (SLEEPS | CLOCKS)) + ["time"] * ("time" in imports)
            found += [f"{name}: {call}: only shoal.clock sleeps and reads clocks" for call in clocks]
        if "print" in calls and not name.startswith("src/shoal/cli/") and not name.endswith("/command.py"):
            found.append(f"{name}: only shoal.cli and commands of the laboratory print")
    assert found == []


READS = re.compile(r"json\.loads?|msgspec\.\w+\.decode|_?decode(_\w+)?|.*decoder\.decode", re.IGNORECASE)


def _unready(tree: ast.AST) -> Iterator[int]:
    """Lines of handlers around what reads JSON or msgpack that name some of what it may raise, but not all."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) and any(READS.fullmatch(call) for each in node.body for call in _calls(each)):
            for handler in node.handlers:
                caught = ast.unparse(handler.type) if handler.type else ""
                if re.search("DecodeError|MsgspecError|ValueError|RecursionError", caught):
                    yield handler.lineno
        # `suppress` around what reads by way of others, and what is kept for handlers.
        is_kept = isinstance(node, ast.Assign | ast.AnnAssign)
        is_suppressed = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress")
        if (is_kept or is_suppressed) and re.search(r"msgspec\.\w+Error", ast.unparse(node)):
            yield node.lineno


def test_who_reads_json_or_msgpack_is_ready_for_all_that_a_decoder_raises() -> None:
    assert list(_unready(ast.parse("try:\n    x = json.loads(y)\nexcept (OSError, ValueError):\n    pass"))) == [3]
    assert list(_unready(ast.parse("with suppress(msgspec.MsgspecError):\n    feed(x)"))) == [1]
    assert list(_unready(ast.parse("JUNK = (OSError, msgspec.DecodeError)"))) == [1]
    found = [f"{name}:{line}: catch errors.MALFORMED" for name, tree in trees().items() for line in _unready(tree)]
    assert found == []


def test_no_form_lets_a_line_end_through_behind_a_name() -> None:
    patterns = re.compile(r"""msgspec\.Meta\([^#\n]*pattern=r?(["']).*\$\1""")
    assert patterns.search('x = msgspec.Meta(pattern="^[a-z]$")')
    assert [_name(path) for path in SOURCES if patterns.search(path.read_text())] == [], "write \\Z in place of $"


def test_broad_excepts_are_rare() -> None:
    lines = sum(len(path.read_text().splitlines()) for path in SOURCES)
    broad = 0
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler):
                caught = ast.unparse(node.type) if node.type else "BaseException"
                reraises = any(isinstance(inner, ast.Raise) and inner.exc is None for inner in ast.walk(node))
                broad += bool(re.search(r"\b(Base)?Exception\b", caught)) and not reraises
    assert broad <= 1 + lines // 2000


# ---- what a reader has to hold in mind at once ----------------------------------------------------------------------

MOST_PARAMETERS = 12
MOST_CALLBACKS = 8


def _object_fields(node: ast.ClassDef) -> list[ast.AnnAssign]:
    """What the constructor takes of a dataclass that is no value: two of them are never equal."""
    if not any("eq=False" in ast.unparse(each) for each in node.decorator_list):
        return []
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    return [each for each in fields if not re.match(r"_|.*init=False", ast.unparse(each))]


def test_no_constructor_has_more_parameters_than_a_reader_can_hold() -> None:
    found: list[str] = []
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                number = len(_object_fields(node))
                found += [f"{name}:{node.lineno} has {number}"] * (number > MOST_PARAMETERS)
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                number = len((*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)) - 1
                found += [f"{name}:{node.lineno} has {number}"] * (number > MOST_PARAMETERS)
    assert found == []


def test_few_of_the_client_s_parts_call_each_other_back() -> None:
    found: list[str] = []
    for name, tree in trees().items():
        if name.startswith("src/shoal/client/"):
            for node in ast.walk(tree):
                if isinstance(node, ast.arg) and node.annotation and "Callable[" in ast.unparse(node.annotation):
                    found.append(f"{name}:{node.lineno} {node.arg}")
                for each in _object_fields(node) if isinstance(node, ast.ClassDef) else ():
                    if "Callable[" in ast.unparse(each.annotation):
                        found.append(f"{name}:{each.lineno} {ast.unparse(each.target)}")
    assert len(found) <= MOST_CALLBACKS, found


# ---- the tree of exceptions ----------------------------------------------------------------------------------------


def _documented_tree() -> dict[str, tuple[str | None, bool]]:
    """Return for each name in the docstring of shoal.errors its parent's name and whether it has a star."""
    tree: dict[str, tuple[str | None, bool]] = {}
    open_parents: list[tuple[int, str]] = []
    for line in (shoal.errors.__doc__ or "").splitlines():
        match = re.match(r"^ {4}((?:\|   |    )*)(\+-- )?([A-Z]\w+)(\*?)(?: |$)", line)
        if match is None:
            continue
        depth = len(match[1]) // 4 + (1 if match[2] else 0)
        while open_parents and open_parents[-1][0] >= depth:
            open_parents.pop()
        tree[match[3]] = (open_parents[-1][1] if open_parents else None, bool(match[4]))
        open_parents.append((depth, match[3]))
    return tree


def test_the_docstring_shows_the_tree_of_errors_as_it_is() -> None:
    actual: dict[str, tuple[str | None, bool]] = {}
    for name, kind in inspect.getmembers(shoal.errors, inspect.isclass):
        if issubclass(kind, ShoalError):
            parents = [base.__name__ for base in kind.__bases__ if issubclass(base, ShoalError)]
            actual[name] = (parents[0] if parents else None, issubclass(kind, Transient))
    assert _documented_tree() == actual


def test_no_exception_is_defined_outside_the_errors_module() -> None:
    known = {name for name, _ in inspect.getmembers(shoal.errors, inspect.isclass)} | {"Exception", "BaseException"}
    found: list[str] = []
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and name != "src/shoal/errors.py":
                bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                if bases & known or any(re.fullmatch(r"[A-Z]\w*(Error|Exception)", base) for base in bases):
                    found.append(f"{name}: {node.name} belongs in errors.py")
    assert found == []
