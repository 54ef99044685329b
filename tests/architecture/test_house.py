"""`make house` counts what it says that it counts."""

from __future__ import annotations

from pathlib import Path

from tools import house

SOURCE = Path(__file__).parents[2] / "src" / "shoal"

MODULE = '''"""One line,
and another."""

from shoal.swarm import routing
from shoal.swarm.view import Replica  # beside code


# On its own.
@dataclass
class Kept:
    """What is kept."""

    when: Callable[[], None]
    what: ClassVar[int] = 3
    """Of all."""


class Machine:
    def __init__(self, first: int, *, told: Callable[[int], None] | None = None) -> None:
        self.rest = [each for each in range(first) if each and not told or first]

    async def run(self) -> None:
        self.last = 1 if self.rest else 2
'''


def test_a_module_is_counted() -> None:
    found = house.measured("swarm.kept", MODULE)
    assert (found.package, found.lines, found.code, found.docstrings, found.comments) == ("swarm", 23, 11, 4, 1)
    assert found.functions == (2, 2)
    assert (found.constructors, found.fields, found.callbacks) == ({"Kept": 0, "Machine": 2}, {"Kept": 1}, 2)
    assert (found.comprehensions, found.choices, found.operators) == (1, 1, 2)
    assert found.imports == {"swarm", "swarm.routing", "swarm.view", "swarm.view.Replica"}


def test_a_module_that_one_sibling_alone_imports_is_a_fragment() -> None:
    texts = {
        "swarm.routing": "",
        "swarm.view": "from shoal.swarm.routing import Pipeline",
        "swarm.homes": "from shoal.swarm import view",
        "client.client": "from shoal.swarm.view import Replica",
        "client.only": "from shoal.wire import frame",
        "wire.frame": "from shoal.errors import ShoalError",
        "errors": "",
    }
    modules = [house.measured(name, f'"""Has a text."""\n{text}') for name, text in texts.items()]
    assert house.fragments(modules) == [("swarm.routing", "swarm.view")]


def test_the_report_has_a_column_for_each_project_and_a_row_for_each_package() -> None:
    lines = house.report(house.read(SOURCE)).splitlines()
    assert lines[0].split() == ["all", "swarm", "h11", "httpx", "torchft", "nano-vllm"]
    assert all(len(figures) == len(house.FEATURES) for figures in house.OTHERS.values())
    packages = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()}
    assert packages <= {line.split()[0] for line in lines if line.strip()}
