"""How the figures of a run become cases."""

from __future__ import annotations

import pytest

from shoal_lab.bench.startup_peer import _causes, _kind


def test_the_causes_follow_each_other_and_add_up_to_the_first_step() -> None:
    events = [
        {"event": "fork_server.ready", "time": "2026-01-01T00:00:02.000+00:00", "after_s": 1.5},
        {"event": "swarm.open", "time": "2026-01-01T00:00:02.250+00:00"},
        {"event": "server.ready", "time": "2026-01-01T00:00:02.750+00:00"},
        {"event": "server.ready", "time": "2026-01-01T00:00:03.000+00:00"},
        {"event": "round.ready", "time": "2026-01-01T00:00:03.125+00:00"},
        {"event": "trainer.ready", "time": "2026-01-01T00:00:03.250+00:00"},
        {"event": "round.ready", "time": "2026-01-01T00:00:09.000+00:00"},
    ]
    causes = _causes(events, 3.0)
    assert causes.pop("first_step") == 3.0
    expected = {"imports": 1.5, "monitor": 0.25, "stages": 0.75, "leading": 0.125, "trainers": 0.125, "step": 0.25}
    assert causes == pytest.approx(expected)


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (["shoal:data_server:0"], "data_server"),
        (["shoal:fork_server"], "fork_server"),
        (["/x/hivemind/hivemind_cli/p2pd", "-b=1"], "p2pd"),
        (["/x/wandb/bin/wandb-core", "--pid", "1"], "wandb"),
        (["/usr/bin/python", "-m", "wandb"], "wandb"),
        ([], ""),
    ],
)
def test_a_process_is_known_by_what_it_shows(command: list[str], kind: str) -> None:
    assert _kind(command) == kind
