"""What documents promise exists: the reference of the configuration, commands, paths, messages, cost of --help."""

from __future__ import annotations

import re
import resource
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest
import yaml

from shoal.bench.registry import BENCHMARKS
from shoal.cli import main
from shoal.config import Config, load_config
from shoal.config.dump import reference_yaml
from shoal.config.keys import keys
from shoal.wire.messages import Message

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


TASKS = tuple(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs" / "tasks").glob("*.md")))


def _commands(document: str) -> list[str]:
    text = (ROOT / document).read_text()
    blocks = re.findall(r"```(?:bash|sh|console)\n(.*?)```", text, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.split(" #")[0].removeprefix("$ ").strip() for line in lines if line.split("#")[0].strip()]


def test_readme_names_the_commands_to_begin_with() -> None:
    assert {"make run", "make test"} <= set(_commands("README.md"))


@pytest.mark.parametrize("document", ["README.md", *TASKS])
def test_commands_of_documents_exist_with_their_flags(document: str, capsys: pytest.CaptureFixture[str]) -> None:
    commands = _commands(document)
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert commands
    for command in commands:
        words = [word for word in shlex.split(command) if not re.match(r"[A-Z_]+=", word)]
        if words[0] == "make":
            assert words[1] in targets, command
            continue
        if Path(words[0]).name.startswith("python"):
            assert (ROOT / words[1]).is_file(), command
            if "/" in words[1]:
                continue
            words = ["shoal", words[1].removesuffix(".py").replace("_", "-"), *words[2:]]
        if Path(words[0]).name != "shoal":
            continue
        is_shown = {"--help", "--print-config"} & set(words)
        runs = words[1] in ("run-local", "start-trainer-client", "start-servers")
        shown = ["--print-config"] if runs and not is_shown else []
        arguments = [str(ROOT / word) if word.startswith(("configs/", "examples/")) else word for word in words[1:]]
        is_of_a_run = words[1] in ("run-local", "start-trainer-client", "start-servers", "config", "model")
        # What is resumed would have to be there.
        if not is_of_a_run or "--resume" in words:
            arguments, shown = [*arguments, "--help"], []
        assert main([*arguments, *shown]) == 0, f"{command}: {capsys.readouterr().err}"


# ---- what the documents name ---------------------------------------------------------------------------------------

DOCUMENTS = (
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/configurations.md",
    "docs/decisions.md",
    "docs/events.md",
    "docs/performance.md",
    "docs/platforms.md",
    "docs/protocol.md",
    "docs/reliability.md",
    *TASKS,
    "examples/own_model/README.md",
)
SOURCE = ROOT / "src" / "shoal"


def _prose(document: str) -> str:
    return re.sub(r"^```.*?^```", "", (ROOT / document).read_text(), flags=re.DOTALL | re.MULTILINE)


def _paths_in(document: str) -> list[str]:
    """Return what stands in backticks and looks like a file or a folder of this project."""
    words = re.findall(r"`([^`\n]+)`", _prose(document))
    generated = ("logs/", "rounds/", "steps/", "replicas/", "/dev/")
    return [
        word
        for word in words
        if re.fullmatch(r"[\w./-]+(\.(py|md|yaml|toml|txt)|/)", word) and "/" in word and not word.startswith(generated)
    ]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_that_documents_name_exist(document: str) -> None:
    near = ((ROOT / document).parent, ROOT, SOURCE)
    paths = _paths_in(document)
    assert paths or document == "examples/own_model/README.md"
    for path in paths:
        assert any((place / path).exists() for place in near), f"{document} names {path}"
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", _prose(document)):
        assert "://" in target or ((ROOT / document).parent / target).exists(), f"{document} links to {target}"


def _code_map() -> dict[str, list[str]]:
    """Return the modules that ARCHITECTURE.md lists for each package or top-level module of shoal."""
    section = (ROOT / "ARCHITECTURE.md").read_text().partition("## Code map")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|$", section, re.MULTILINE)
    return {name: re.findall(r"`(\w+)`", modules) for name, modules in rows}


def test_the_code_map_lists_every_package_and_only_modules_that_exist() -> None:
    listed = _code_map()
    there = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()}
    there |= {path.stem for path in SOURCE.glob("*.py") if not path.stem.startswith("__")}
    assert listed.keys() == there
    for package, modules in listed.items():
        for module in modules:
            inside = SOURCE / package / module
            assert inside.with_suffix(".py").is_file() or inside.is_dir(), f"{package}/{module}"


def test_the_code_map_has_the_layers_in_their_order() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [layers] = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    level = {name: index for index, layer in enumerate(layers) for name in re.findall(r"\w+", layer)}
    levels = [level[name] for name in _code_map()]
    assert levels == sorted(levels)


def test_the_page_on_protocols_names_every_message() -> None:
    text = (ROOT / "docs" / "protocol.md").read_text()
    for message in get_args(Message):
        assert f"`{message.__name__}`" in text, message.__name__


def test_every_benchmark_has_its_section_with_command_and_table_and_the_readme_names_the_command() -> None:
    assert any(command.startswith("shoal benchmark ") for command in _commands("README.md"))
    text = (ROOT / "docs" / "performance.md").read_text()
    sections = {section.partition("\n")[0]: section for section in text.split("\n## ")[1:]}
    for name in BENCHMARKS:
        assert re.search(rf"^shoal benchmark {name}\b", sections[name], re.MULTILINE), name
        assert "| case |" in sections[name]


HELP = """
import sys
from shoal.cli import main
assert main(["--help"]) == 0
heavy = {"torch", "hivemind", "pydantic", "numpy", "transformers", "wandb", "shoal.config.schema"} & set(sys.modules)
assert not heavy, heavy
"""


def test_help_takes_less_than_half_a_second_and_loads_neither_torch_nor_hivemind() -> None:
    spent_s: list[float] = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, timeout=60, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        assert "run-local" in done.stdout
        # Processor time, which a busy machine does not stretch as it stretches the time on the wall.
        spent_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(spent_s) < 0.5
