"""What a host of servers sees of the run that it serves."""

from __future__ import annotations

from shoal.cli.display import plain_line
from shoal.cli.run_row import ServersRow

NUMBERS = {"stage": 0.0, "round": 4.0, "steps": 100.0, "samples": 1600.0, "alive_peers": 7.0, "disk_failing": 0.0}


def test_before_the_servers_serve_the_row_says_so() -> None:
    assert plain_line(ServersRow(12, 0.0), 5.0) == "time 0:05  starting"
    assert plain_line(ServersRow(12, 0.0), 3599.9) == "time 59:59  starting"
    assert plain_line(ServersRow(12, 0.0), 26 * 3600 + 187.0) == "time 26:03:07  starting"


def test_round_steps_speed_share_and_peers_of_all_servers_of_the_host() -> None:
    row = ServersRow(12, 0.0)
    for second in range(3):
        row.update(0, NUMBERS | {"samples": 1600.0 + 50 * second, "share": 0.5}, 60.0 + second)
        row.update(1, NUMBERS | {"stage": 1.0, "samples": 800.0 + 25 * second, "share": 0.3}, 60.0 + second)
    row.update(1, NUMBERS | {"stage": 1.0, "samples": 850.0, "run_samples_per_s": 120.0, "share": 0.3}, 62.0)
    assert plain_line(row, 62.0) == (
        "time 1:02  round 4/12  steps here 200  samples/s here 75.0  share 40 %  run samples/s 120.0  peers 7  "
        "serving stages 0 and 1"
    )
    row.gone(1)
    assert "serving stage 0" in plain_line(row, 62.0)


def test_a_server_through_which_nothing_goes_any_more_shows_old_numbers_as_old() -> None:
    row = ServersRow(12, 0.0)
    row.update(0, NUMBERS, 60.0)
    row.update(0, NUMBERS | {"alive_peers": 6.0}, 99.0)
    assert "steps here 100 (40 s ago)  samples/s here 0.0 (40 s ago)" in plain_line(row, 100.0)


def test_who_is_silent_is_named_with_the_time_once_for_all_servers() -> None:
    row = ServersRow(12, 0.0)
    row.update(0, NUMBERS, 60.0)
    assert row.silent("c", "the client", 61.0)
    assert not row.silent("c", "the client", 61.5)
    assert row.state(70.0) == "serving stage 0; the client is silent for 9 s"
    assert row.heard("c") == 61.0
    assert row.heard("c") is None
    assert row.state(70.0) == "serving stage 0"


def test_who_has_been_silent_for_a_minute_is_gone_and_not_named_for_ever() -> None:
    row = ServersRow(12, 0.0)
    row.update(0, NUMBERS, 60.0)
    row.silent("c", "the client", 61.0)
    assert "the client is silent for 59 s" in plain_line(row, 120.0)
    assert "silent" not in plain_line(row, 3 * 3600.0)
    assert row.heard("c") == 61.0
