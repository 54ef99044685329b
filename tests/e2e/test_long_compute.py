"""A long compute is not a death: heartbeats come from the event loop, whatever the thread that computes does."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.e2e.launched import END_S, ENDLESS, START_S, launched, until
from tests.e2e.test_faults import summed_up

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

_DEADLINE_S = 3.0
_LONG_S, _GIL_S = 10.0, 1.5


def test_a_microbatch_that_computes_for_longer_than_the_deadline_loses_nobody(tmp_path: Path) -> None:
    folder = tmp_path / "orders"
    folder.mkdir()
    flags = (
        *ENDLESS,
        "--model.family=tests.e2e.busy_family:BusyFamily",
        f"--health.deadline-s={_DEADLINE_S}",
        "--model-pipeline.cut=2,2",
    )
    with launched(tmp_path / "run", *flags, environment={"BUSY_FAMILY_DIR": str(folder)}) as run:
        run.saw("client_0", "round.recorded", round=1)
        for name, seconds in (("computes", _LONG_S), ("holds-the-gil", _GIL_S)):
            (folder / "new").write_text(str(seconds))
            (folder / "new").rename(folder / name)
            until(lambda n=name: (folder / f"{n}.done").exists(), START_S, f"a server that {name}")
            reached = run.events("client_0", "round.recorded")[-1]["round"]
            run.saw("client_0", "round.recorded", round=reached + 2)
        assert run.log_dir is not None
        logs = [path.stem for path in run.log_dir.glob("*.log")]
        silent = [e for log in logs for e in run.events(log, "transport.lost") if e["cause"] == "silent"]
        run.interrupt()
        assert run.ends(END_S) == 130, run.output
        summary = summed_up(run)
    assert silent == []
    assert summary["failovers"] == []
