"""While a swarm trains, nothing that it receives or reads is executed: no pickle is loaded, no text is evaluated."""

from __future__ import annotations

import fractions
import marshal
import pickle

import pytest
from tests.audited.sitecustomize import executed

from .conftest import MakeCluster, make_config


async def test_a_swarm_executes_nothing_but_its_own_modules(make_cluster: MakeCluster) -> None:
    config = make_config(diloco={"outer_steps": 2})
    with executed() as found:
        async with make_cluster(config) as cluster:
            result = await cluster.run()
    assert len(result.records) == 2
    assert found == []


@pytest.mark.parametrize(
    ("event", "act"),
    [
        ("pickle.find_class", lambda: pickle.loads(pickle.dumps(fractions.Fraction(1, 3)))),
        ("marshal.loads", lambda: marshal.loads(marshal.dumps([1]))),
        ("exec", lambda: eval("1 + 1")),
        ("compile", lambda: compile("1 + 1", "data", "eval")),
    ],
)
def test_the_watch_sees_a_pickle_and_a_text(event: str, act) -> None:
    with executed() as found:
        act()
    assert any(f"executed {event} in " in line for line in found)
    with executed() as later:
        pass
    assert later == []


def test_a_file_that_torch_pickles_is_seen_as_well(tmp_path) -> None:
    import torch

    torch.save({"fraction": fractions.Fraction(1, 3)}, tmp_path / "file.pt")
    with executed() as found:
        torch.load(tmp_path / "file.pt", weights_only=False)
    assert any("pickle.find_class" in line for line in found)
