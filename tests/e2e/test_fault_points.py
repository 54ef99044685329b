"""How `benchmarks/fault_points.py` judges what it has measured."""

from __future__ import annotations

from benchmarks import fault_points


def _deaths(point: str, seconds: list[float], whole_s: float | None = None) -> fault_points.Result:
    deaths = [fault_points.Measured("", 1, 0.0, {0: value}, whole_s) for value in seconds]
    return fault_points.Result(point, deaths)


def test_who_takes_longer_than_the_limits_is_named() -> None:
    assert fault_points.late(_deaths("server, any", [0.5] * 20), 0.3, 1.0) == []
    [text] = fault_points.late(_deaths("server, any", [1.0] * 20), 0.3, 1.0)
    assert text == "server, any: median 1.00 s, the limit is 0.90 s"
    [text] = fault_points.late(_deaths("server, any", [0.5] * 15 + [3.0] * 5), 0.3, 1.0)
    assert text == "server, any: p95 3.00 s, the limit is 2.60 s"
    [text] = fault_points.late(_deaths("server, any", [0.5] * 20, whole_s=9.0), 0.3, 1.0)
    assert text == "server, any: whole again after 9.0 s, the limit is 8.0 s"
    assert len(fault_points.late(_deaths("trainer, any", [3.5]), 0.3, 1.0)) == 2


def test_a_machine_that_does_something_else_has_longer() -> None:
    late = _deaths("server, any", [1.5] * 20, whole_s=15.0)
    assert len(fault_points.late(late, 0.3, 1.0)) == 2
    assert fault_points.late(late, 0.3, 4.0) == []
