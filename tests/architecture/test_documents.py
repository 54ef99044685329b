"""What documents and examples promise exists: the reference of the configuration, commands, start-up cost of --help."""

from __future__ import annotations

import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from shoal.cli import main
from shoal.config import Config, load_config
from shoal.config.dump import reference_yaml
from shoal.config.keys import keys

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


@pytest.mark.parametrize("key", keys().values(), ids=lambda key: key.name)
def test_every_key_is_described(key) -> None:
    assert key.info.description
    assert key.info.description.endswith((".", ").", '"."'))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_configuration_file_loads_and_names_no_default_twice(path: Path) -> None:
    assert load_config(path, env={})
    assert isinstance(yaml.safe_load(path.read_text()), dict)


def _readme_commands() -> list[str]:
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```(?:bash|sh|console)\n(.*?)```", text, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.split(" #")[0].removeprefix("$ ").strip() for line in lines if line.split("#")[0].strip()]


def test_readme_commands_exist(capsys: pytest.CaptureFixture[str]) -> None:
    commands = _readme_commands()
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"make run", "make test"} <= set(commands)
    for command in commands:
        words = shlex.split(command)
        if words[0] == "make":
            assert words[1] in targets, command
            continue
        if Path(words[0]).name.startswith("python"):
            assert (ROOT / words[1]).is_file(), command
            words = {"run_local.py": ["shoal", "run-local"]}[words[1]] + words[2:]
        if Path(words[0]).name != "shoal":
            continue
        shown = ["--help"] if "--help" in words else ["--print-config"] if words[1] == "run-local" else []
        arguments = [str(ROOT / word) if word.startswith("configs/") else word for word in words[1:]]
        if words[1] == "trainer":
            arguments, shown = [*arguments, "--help"], []
        assert main([*arguments, *shown]) == 0, f"{command}: {capsys.readouterr().err}"


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
