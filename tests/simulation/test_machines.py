"""Every machine of `swarm/` is run by some world, as it ships: what none runs, no schedule can break."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import pytest
from tests.simulation.catalogue import WORLDS

import shoal.swarm

ROOT = Path(shoal.swarm.__file__).parent
SEEDS = (0, 1, 2, 11)
"""In the last of them a run of the world `round` is resumed."""
NOT_RUN = {
    "content_transfer.ChunkPlan": "where in four vectors the bytes of a chunk are: arithmetic, with tests of its own",
    "ring_order._LargeRing": "in which order many hosts stand: arithmetic, with tests of its own",
    "codec_rule": "how long payloads take over links that were measured: arithmetic, with tests of its own",
    "codec_rule.CodecRule": "which codec the next record names, which changes sizes and nothing else: likewise",
    "assignment.StageNeed": "how much memory a stage takes: arithmetic, with tests of its own",
    "view.PeerLabel": "what a peer is called, for people",
    "view.MirrorPeer": "who mirrors, and what it is announced to hold, for people",
}
"""Classes and functions that decide nothing about what happens in which order."""


def machines() -> Iterator[tuple[str, frozenset[CodeType]]]:
    """Yield what decides in `swarm/`: each class that has methods, and the functions of each module together."""
    for info in pkgutil.iter_modules([str(ROOT)]):
        module = importlib.import_module(f"shoal.swarm.{info.name}")
        functions = [each for each in _own(module) if inspect.isfunction(each)]
        if functions:
            yield info.name, frozenset(each.__code__ for each in functions)
        for kind in (each for each in _own(module) if inspect.isclass(each)):
            methods = frozenset(code for value in vars(kind).values() if (code := _code_of(value)) is not None)
            if methods and not getattr(kind, "_is_protocol", False):
                yield f"{info.name}.{kind.__name__}", methods


def _own(module: ModuleType) -> list[Any]:
    return [each for each in vars(module).values() if getattr(each, "__module__", None) == module.__name__]


def _code_of(value: object) -> CodeType | None:
    """The code of a method or property that is written down in `swarm/`: that of a dataclass is made by nobody."""
    function = getattr(value, "fget", None) or getattr(value, "func", None) or getattr(value, "__func__", value)
    is_written = inspect.isfunction(function) and Path(function.__code__.co_filename).parent == ROOT
    return function.__code__ if is_written else None


def run_by_worlds() -> set[CodeType]:
    """Run some seeds of each world; return the code of `swarm/` that was called."""
    called: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            called.add(frame.f_code)

    before = sys.getprofile()
    for world in WORLDS.values():
        for seed in SEEDS:
            made = world.make(seed)
            sys.setprofile(note)
            try:
                made.run()
            finally:
                sys.setprofile(before)
    return called


@pytest.mark.slow
def test_every_machine_is_run_by_a_world() -> None:
    called = run_by_worlds()
    not_run = [name for name, codes in machines() if codes.isdisjoint(called) and name not in NOT_RUN]
    assert not not_run, f"no world runs {not_run}: put each into a world of tests/simulation, with a mutant"


def test_what_is_said_not_to_be_run_is_there() -> None:
    assert NOT_RUN.keys() <= {name for name, _ in machines()}
