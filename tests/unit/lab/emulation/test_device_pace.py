"""How long the operations of an emulated device last."""

from __future__ import annotations

import msgspec

from shoal_lab.emulation.device_pace import DevicePace, PassCounts


def test_an_operation_lasts_as_long_as_its_parts_or_as_it_took() -> None:
    pace = DevicePace(forward_s=1.0, input_gradient_s=2.0, weight_gradient_s=4.0)
    operations = (PassCounts(1), PassCounts(0, 1, 1), PassCounts(1, 1, 0), PassCounts(0, 0, 1), PassCounts())
    assert [pace.length_s(parts, 0.5, 0, 4) for parts in operations] == [1.0, 6.0, 3.0, 4.0, 0.5]
    assert pace.length_s(PassCounts(1), 3.0, 0, 4) == 3.0


def test_it_may_depend_on_the_number_of_samples() -> None:
    pace = DevicePace(forward_s=1.0, per_samples=4, factor=3.0)
    assert [pace.length_s(PassCounts(1), 0.5, 0, num) for num in (1, 4, 8)] == [1.5, 3.0, 6.0]


def test_a_factor_makes_it_longer_and_may_change_on_the_way() -> None:
    pace = DevicePace(factor=3.0, changes=((10, 1.0), (20, 5.0)))
    assert [pace.length_s(PassCounts(1), 2.0, number, 4) for number in (0, 9, 10, 20)] == [6, 6, 2, 10]
    pace.changes, pace.factor = (), 2.0
    assert pace.length_s(PassCounts(1), 2.0, 99, 4) == 4.0


def test_it_goes_to_a_server_process_in_its_start() -> None:
    pace = DevicePace(factor=2.0, changes=((10, 1.0),))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(pace), type=DevicePace) == pace
