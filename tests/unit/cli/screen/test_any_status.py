"""Whatever the forms allow a client to say of a run, whoever looks at it is shown something."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from shoal.cli.screen.layout import render
from shoal.cli.screen.watching import plain_line
from shoal.control.seen_peers import view_of
from shoal.control.swarm_status import lines_of, swarm_status
from shoal.ids import PeerId
from shoal.wire.messages.base import Hop
from shoal.wire.messages.control import RunStatus

TEXTS = ("", "a\x1b[2J\nb\x9b", "日本語", "x" * 400)
ODD = (math.nan, math.inf, -math.inf, 1e308, -1e308)


def _made(kind: inspect.Type, dice: random.Random) -> Any:
    """A value that the form allows: the least, the most, or a usual one."""
    match kind:
        case inspect.StructType():
            return kind.cls(*(_made(field.type, dice) for field in kind.fields))
        case inspect.UnionType():
            return _made(dice.choice(kind.types), dice)
        case inspect.VarTupleType():
            return tuple(_made(kind.item_type, dice) for _ in range(min(dice.choice((0, 1, 9)), kind.max_length or 9)))
        case inspect.IntType():
            least = -(1 << 63) if kind.ge is None else kind.ge
            most = (1 << 63) - 1 if kind.le is None and kind.lt is None else kind.le or (kind.lt or 1) - 1
            return dice.choice((least, most, max(least, min(most, 1))))
        case inspect.FloatType():
            ends = [each for each in (kind.ge, kind.le) if each is not None]
            return float(dice.choice([*ends, 1.0] if ends else [*ODD, 1.0]))
        case inspect.BoolType():
            return dice.random() < 0.5
        case inspect.StrType(pattern=str()):
            return dice.choice(("server", "mirror", "client", ""))
        case inspect.StrType():
            most = 400 if kind.max_length is None else kind.max_length
            return dice.choice(TEXTS)[:most]
        case inspect.NoneType():
            return None
        case _:
            raise TypeError(f"{kind} is new here")


@pytest.mark.parametrize("seed", range(100))
def test_whatever_a_client_says_can_be_shown(seed: int) -> None:
    answer: RunStatus = _made(inspect.type_info(RunStatus), random.Random(seed))
    view = view_of(answer, "run-1", Hop(PeerId("client"), ("tcp:192.0.2.1:1",)))
    status = swarm_status("sandbox", view, answer, "")
    assert len(status.stages) == answer.num_stages
    assert next(lines_of(status)).startswith("run run-1 (sandbox): ")
    assert "servers " in plain_line(status)
    for width, height in ((80, 24), (20, 5)):
        assert len(render(status, width, height)) <= height
    assert json.loads(msgspec.json.encode(status))["state"] == status.state
