"""A second of a run in numbers."""

from __future__ import annotations

from shoal.telemetry.rows import _MAX_PEERS, MetricRow, RowMaker


def _taken(maker: RowMaker) -> MetricRow:
    row = maker.take(0.0)
    assert row is not None
    return row


def test_a_row_has_the_mean_of_what_comes_with_each_step_and_the_last_of_what_does_not() -> None:
    maker = RowMaker()
    for loss, lr in ((4.0, 1.0), (2.0, 0.5)):
        maker.add({"loss/train": loss, "lr": lr})
    assert _taken(maker).run == {"loss/train": 3.0, "lr": 0.5}


def test_numbers_of_several_steps_weigh_as_much_as_those_steps_by_themselves() -> None:
    maker = RowMaker()
    maker.add({"loss/train": 4.0, "lr": 1.0}, steps=3)
    maker.add({"loss/train": 2.0, "lr": 0.5})
    assert _taken(maker).run == {"loss/train": 3.5, "lr": 0.5}


def test_what_stands_still_is_in_no_row_and_without_news_there_is_none() -> None:
    maker = RowMaker()
    assert maker.take(0.0) is None
    maker.add({"samples": 8.0, "pipelines": 2.0, "loss/train": 1.0})
    assert _taken(maker).run == {"samples": 8.0, "pipelines": 2.0, "loss/train": 1.0}
    maker.add({"samples": 8.0, "pipelines": 2.0})
    assert maker.take(1.0) is None
    maker.add({"samples": 8.0, "loss/train": 1.0})
    assert _taken(maker).run == {"samples": 8.0, "loss/train": 1.0}, "a step was trained, with the same loss"


def test_a_row_of_the_run_says_at_how_many_samples_it_is() -> None:
    maker = RowMaker()
    maker.add({"samples": 8.0})
    _taken(maker)
    maker.add({"pipelines": 1.0})
    assert _taken(maker).run == {"samples": 8.0, "pipelines": 1.0}


def test_of_a_peer_a_row_has_what_has_changed_and_that_it_was_heard() -> None:
    maker = RowMaker()
    maker.measure("server 0@box", {"step.committed": 1.0, "process.memory_bytes": 5.0})
    maker.measure("server 1@box", {"step.committed": 1.0})
    first = _taken(maker)
    assert first.peers["server 0@box"] == {"step.committed": 1.0, "process.memory_bytes": 5.0}
    assert first.flat()["server 1@box/step.committed"] == 1.0
    maker.measure("server 0@box", {"step.committed": 2.0, "process.memory_bytes": 5.0})
    maker.measure("server 1@box", {"step.committed": 1.0})
    row = _taken(maker)
    assert row.peers == {"server 0@box": {"step.committed": 2.0}, "server 1@box": {}}
    assert row.run == {}


def test_of_many_peers_not_all_are_remembered() -> None:
    maker = RowMaker()
    for number in range(_MAX_PEERS + 10):
        maker.measure(f"server {number}", {"step.committed": 1.0})
        _taken(maker)
    assert len(maker._told_of) == _MAX_PEERS
    maker.measure("server 0", {"step.committed": 1.0})
    assert _taken(maker).peers == {"server 0": {"step.committed": 1.0}}
