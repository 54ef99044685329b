"""One word for one thing, and no key of the configuration that nobody tests."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

from shoal.config.keys import keys

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"


def named_twice(texts: dict[str, str]) -> dict[str, list[str]]:
    """Return, for each name of more than one class, the files that define one."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for file, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(file)
    return {name: files for name, files in places.items() if len(files) > 1}


def test_the_name_of_a_class_stands_for_one_class() -> None:
    found = named_twice({str(path.relative_to(SOURCE)): path.read_text() for path in SOURCE.rglob("*.py")})
    assert found == {}, "give one of them another name"


def test_two_classes_of_one_name_are_found_wherever_they_are() -> None:
    texts = {"a.py": "class One: ...\nclass Two: ...", "b.py": "def f():\n    class One: ..."}
    assert named_twice(texts) == {"One": ["a.py", "b.py"]}


def unnamed(names: list[str], texts: list[str]) -> list[str]:
    """Return the keys that none of the texts names: the key itself, and its section in the same text."""
    words = [set(re.findall(r"[a-zA-Z0-9]\w*", text.replace("-", "_"))) for text in texts]
    return [name for name in names if not any(set(name.split(".")[-2:]) <= each for each in words)]


def test_every_key_of_the_configuration_is_named_by_a_test() -> None:
    sections = {name.rpartition(".")[0] for name in keys()}
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path.parent != Path(__file__).parent]
    found = unnamed([name for name in keys() if name not in sections], [path.read_text() for path in tests])
    assert found == [], "test what each of them changes"


def test_a_key_is_named_with_its_section() -> None:
    names = ["inner_optim.sgd_lr", "outer_optim.sgd_lr", "device"]
    assert unnamed(names, ['{"inner_optim": {"sgd_lr": 1}}', "outer_optim", "--device cpu"]) == ["outer_optim.sgd_lr"]
    assert unnamed(names, ["--diloco.outer-optim.sgd-lr", "inner_optim={'sgd_lr': 2}", "devices"]) == ["device"]
