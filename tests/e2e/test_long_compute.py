"""What a stage's computation does is no death: it takes long, holds the GIL, or finds no memory for a batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.e2e.launched import ENDLESS, START_S, launched, until
from tests.e2e.test_faults import interrupted
from tests.e2e.test_incidents import read_trouble, until_closed

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

_DEADLINE_S = 3.0
_LONG_S, _GIL_S = 10.0, 1.5
_MOST_BYTES = 2**60


def test_who_computes_for_longer_than_the_deadline_or_has_no_memory_for_a_batch_is_not_lost(tmp_path: Path) -> None:
    folder = tmp_path / "orders"
    folder.mkdir()
    flags = (
        *ENDLESS,
        "--host-name=box1",
        "--model.family=tests.e2e.busy_family:BusyFamily",
        f"--health.deadline-s={_DEADLINE_S}",
        "--model-pipeline.cut=2,2",
    )
    with launched(tmp_path / "run", *flags, environment={"BUSY_FAMILY_DIR": str(folder)}) as run:
        run.saw("client_0", "round.recorded", round=1)
        # Heartbeats come from the event loop, whatever the thread that computes does.
        for name, number in (("computes", _LONG_S), ("holds-the-gil", _GIL_S), ("needs-memory", _MOST_BYTES)):
            (folder / "new").write_text(str(number))
            (folder / "new").rename(folder / name)
            until(lambda n=name: (folder / f"{n}.done").exists(), START_S, f"a server that {name}")
            reached = run.events("client_0", "round.recorded")[-1]["round"]
            run.saw("client_0", "round.recorded", round=reached + 2)
        # It is told until the server goes on in smaller parts.
        until_closed(run, 1)
        pid = int((folder / "needs-memory.done").read_text())
        [index] = [index for index in range(4) if run.pid_of(f"server:{index}") == pid]
        assert run.log_dir is not None
        logs = [path.stem for path in run.log_dir.glob("*.log")]
        silent = [e for log in logs for e in run.events(log, "transport.lost") if e["cause"] == "silent"]
        summary = interrupted(run)
    assert silent == []
    assert summary["failovers"] == []
    assert read_trouble(run.require_log_dir()) == [(f"server {index}@box1", "was out of memory")]
