"""Rules of the code base that no linter knows and that would not survive without a test."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal.errors
from shoal.errors import ShoalError, Transient

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "shoal").rglob("*.py"))
SCRIPTS = sorted(ROOT.glob("*.py"))
MAX_LINES = 400


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _inside(path: Path, folder: str) -> bool:
    return path.is_relative_to(ROOT / "src" / "shoal" / folder)


@pytest.mark.parametrize("path", [*SOURCES, *SCRIPTS, *sorted((ROOT / "tests").rglob("*.py"))], ids=_name)
def test_no_source_file_is_longer_than_400_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


def test_root_scripts_are_thin() -> None:
    assert SCRIPTS
    for script in (script for script in SCRIPTS if not script.name.startswith("test_")):
        assert len(script.read_text().splitlines()) <= 40, script.name


@pytest.mark.parametrize("path", [p for p in SOURCES if p.read_text().strip()], ids=_name)
def test_every_module_says_its_job(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


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


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_nothing_that_is_read_is_executed(path: Path) -> None:
    assert executing(ast.parse(path.read_text())) == set()


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_forbidden_calls_are_absent(path: Path) -> None:
    tree = ast.parse(path.read_text())
    calls, imports = set(_calls(tree)), set(_imports(tree))
    if path.name != "clock.py":
        assert not calls & (SLEEPS | CLOCKS), "only shoal.clock sleeps and reads clocks"
        assert "time" not in imports, "only shoal.clock reads clocks"
    if not _inside(path, "cli"):
        assert "print" not in calls, "only shoal.cli prints"


def test_broad_excepts_are_rare() -> None:
    lines = broad = 0
    for path in SOURCES:
        text = path.read_text()
        lines += len(text.splitlines())
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ExceptHandler):
                caught = ast.unparse(node.type) if node.type else "BaseException"
                reraises = any(isinstance(inner, ast.Raise) and inner.exc is None for inner in ast.walk(node))
                broad += bool(re.search(r"\b(Base)?Exception\b", caught)) and not reraises
    assert broad <= 1 + lines // 2000


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
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and path.name != "errors.py":
                bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                is_exception = bases & known or any(re.fullmatch(r"[A-Z]\w*(Error|Exception)", base) for base in bases)
                assert not is_exception, f"{_name(path)}: {node.name} belongs in errors.py"
