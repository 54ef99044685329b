"""A curve of any length in bounded memory."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shoal.monitor.page.curve import Curve


def _points(form: dict[str, Any], width: int) -> list[tuple[float, ...]]:
    flat = (bucket[at : at + width] for bucket in form["buckets"] for at in range(0, len(bucket), width))
    return [tuple(point) for point in flat]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200))
def test_however_long_it_is_it_keeps_its_order_its_peaks_and_its_bound(values: list[float]) -> None:
    curve = Curve(8)
    for at, value in enumerate(values):
        curve.add((float(at), value))
    form: Any = curve.form()
    points = _points(form, 2)
    assert len(form["buckets"]) <= 8
    assert len(points) <= 16
    assert all(one[0] < other[0] for one, other in pairwise(points))
    assert all(values[int(at)] == value for at, value in points)
    assert {max(values), min(values)} <= {value for _, value in points}


def test_a_short_one_is_kept_as_it_is() -> None:
    curve = Curve(8)
    for at in range(8):
        curve.add((float(at), 10 * at, 2.0))
    assert _points(curve.form(), 3) == [(float(at), 10 * at, 2.0) for at in range(8)]
