"""What documents promise exists: the reference of the configuration, commands, paths, messages, cost of --help."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
import yaml
from tests.documented import PAGES, commands

from shoal.config import Config, load_config
from shoal.config.dump import reference_yaml
from shoal.config.keys import keys
from shoal.wire.messages import Message
from shoal_lab.bench.registry import BENCHMARKS

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def test_reference_file_equals_the_schema_in_keys_defaults_and_comments() -> None:
    text = (ROOT / "configs" / "reference.yaml").read_text()
    assert text == reference_yaml(), "write it anew: shoal config reference > configs/reference.yaml"


def test_reference_file_has_every_key_and_loads_as_the_defaults() -> None:
    text = (ROOT / "configs" / "reference.yaml").read_text()
    assert load_config(ROOT / "configs" / "reference.yaml", env={}) == Config()
    for name in keys():
        assert re.search(rf"^[ #]*{name.rpartition('.')[2]}:", text, re.MULTILINE), f"{name} is missing"


def test_every_key_is_described() -> None:
    endings = (".", ").", '"."')
    assert [name for name, key in keys().items() if not (key.info.description or "").endswith(endings)] == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_configuration_file_loads_and_names_no_default_twice(path: Path) -> None:
    assert load_config(path, env={})
    assert isinstance(yaml.safe_load(path.read_text()), dict)


# ---- what the documents name ---------------------------------------------------------------------------------------

DOCUMENTS = (
    "ARCHITECTURE.md",
    "SECURITY.md",
    *PAGES,
)
SOURCE = ROOT / "src" / "shoal"
LABORATORY = "shoal_lab"


def _prose(document: str) -> str:
    return re.sub(r"^```.*?^```", "", (ROOT / document).read_text(), flags=re.DOTALL | re.MULTILINE)


def _paths_in(document: str) -> list[str]:
    """Return what stands in backticks and looks like a file or a folder of this project."""
    words = re.findall(r"`([^`\n]+)`", _prose(document))
    generated = ("logs/", "rounds/", "steps/", "replicas/", "tokenizer/", "/dev/", "/etc/", ".local/")
    return [
        word
        for word in words
        if re.fullmatch(r"[\w./-]+(\.(py|md|yaml|toml|txt)|/)", word) and "/" in word and not word.startswith(generated)
    ]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_that_documents_name_exist(document: str) -> None:
    near = ((ROOT / document).parent, ROOT, SOURCE, SOURCE.parent)
    for path in _paths_in(document):
        assert any((place / path).exists() for place in near), f"{document} names {path}"
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", _prose(document)):
        assert "://" in target or ((ROOT / document).parent / target).exists(), f"{document} links to {target}"


def _code_map() -> dict[str, list[str]]:
    """Return the modules that ARCHITECTURE.md lists for each package or top-level module of shoal."""
    section = (ROOT / "ARCHITECTURE.md").read_text().partition("## Code map")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|$", section, re.MULTILINE)
    return {name: re.findall(r"`([\w/]+)`", modules) for name, modules in rows}


def test_the_code_map_lists_every_package_and_only_modules_that_exist() -> None:
    listed = _code_map()
    there = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()}
    there |= {path.stem for path in SOURCE.glob("*.py") if not path.stem.startswith("__")}
    assert listed.keys() == there | {LABORATORY}
    for package, modules in listed.items():
        for module in modules:
            inside = (SOURCE.parent if package == LABORATORY else SOURCE) / package / module
            assert inside.with_suffix(".py").is_file() or inside.is_dir(), f"{package}/{module}"


def test_the_code_map_has_the_layers_in_their_order() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [layers] = [contract["layers"] for contract in contracts if contract.get("containers") == ["shoal"]]
    level = {name: index for index, layer in enumerate(layers) for name in re.findall(r"\w+", layer)}
    levels = [level[name] for name in _code_map() if name != LABORATORY]
    assert levels == sorted(levels)


# ---- the walks of ARCHITECTURE.md: so many files at most, and one way through them -----------------------------------

MOST_LINES = 350
MOST_FILES = {"A batch": 14, "A failure": 12, "An outer round": 14}
HANDED_ON = {message.__name__ for message in get_args(Message)} | {"PeerLost"}
"""What two files may have in common that makes one of them follow upon the other."""


def _knows(one: Path, other: Path) -> bool:
    """Whether a file names another one's module, in its code or its words."""
    module = ".".join(other.relative_to(SOURCE).with_suffix("").parts)
    package, _, name = module.rpartition(".")
    text = one.read_text()
    return module in text or f"from shoal.{package} import {name}" in text


def _handed_on(one: Path, other: Path) -> frozenset[str]:
    return _named_messages(one) & _named_messages(other)


@cache
def _named_messages(path: Path) -> frozenset[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return frozenset(HANDED_ON & {node.id for node in nodes if isinstance(node, ast.Name)})


def test_the_walks_lead_one_way_through_few_files() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert text.count("\n") <= MOST_LINES
    for name, most in MOST_FILES.items():
        walk = text.partition(f"### {name}\n\n**Path:** ")[2].partition("\n\n")[0]
        path = [SOURCE / file for file in re.findall(r"`([\w/]+\.py)`", walk)]
        assert 2 < len(path) <= most, name
        for index, file in enumerate(path[1:], start=1):
            before = path[:index]
            assert any(_knows(one, file) or _knows(file, one) or _handed_on(one, file) for one in before), file


def test_the_page_on_protocols_names_every_message() -> None:
    text = (ROOT / "docs" / "protocol.md").read_text()
    for message in get_args(Message):
        assert f"`{message.__name__}`" in text, message.__name__


def test_every_benchmark_has_its_section_with_command_and_table_and_a_task_names_the_command() -> None:
    assert any(command.startswith("shoal benchmark ") for command in commands("docs/tasks/own_run.md"))
    text = (ROOT / "docs" / "performance.md").read_text()
    sections = {section.partition("\n")[0]: section for section in text.split("\n## ")[1:]}
    for name in BENCHMARKS:
        assert re.search(rf"^shoal benchmark {name}\b", sections[name], re.MULTILINE), name
        assert "| case |" in sections[name]


# A third of a second of processor time on a usual machine: half as much again would be felt.
MODULES_OF_HELP = 400
LIGHT = f"""
import sys
from shoal.cli import main
assert main(sys.argv[1:]) == 0
heavy = {{"torch", "hivemind", "pydantic", "numpy", "transformers", "wandb", "shoal.config.schema"}} & set(sys.modules)
assert not heavy, heavy
assert len(sys.modules) < {MODULES_OF_HELP}, len(sys.modules)
"""


@pytest.mark.parametrize(
    ("command", "said"), [("--help", "run-local"), ("runs", "a-run-20260101-000000-aaaa"), ("ps", "left of a dead run")]
)
def test_help_and_lists_load_neither_torch_nor_hivemind_nor_much_else(command: str, said: str, tmp_path: Path) -> None:
    # What they load is counted, not timed: a machine's speed is nobody's defect.
    rounds = tmp_path / "logs/a-run-20260101-000000-aaaa/rounds"
    rounds.mkdir(parents=True)
    (rounds.parent / "config.yaml").touch()
    (rounds / "round_0000.json").write_text('{"configuration": {"diloco": {"outer_steps": 3}}}')
    (tmp_path / f"shoal-{os.getuid()}").mkdir(mode=0o700)
    (tmp_path / f"shoal-{os.getuid()}/dead").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, command],
        cwd=tmp_path,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
