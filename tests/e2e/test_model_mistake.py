"""A mistake in a model of one's own, which shows while a run goes on, ends it at once with the line to mend."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.e2e.launched import ENDLESS, launched

from shoal.client.stage_watch import PATIENCE_S

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_model_that_fails_at_every_server_ends_the_run_at_once_with_its_line(replicas: int, tmp_path: Path) -> None:
    flags = (
        *ENDLESS,
        f"--servers.replicas={replicas}",
        "--model.family=tests.e2e.failing_family:FailingFamily",
        "--model-pipeline.cut=2,2",
    )
    with launched(tmp_path, *flags) as run:
        assert run.ends(PATIENCE_S / 2) == 2, run.output
        run.leaves_nothing()
        summary = run.summary()
    told = re.sub(r"\s+", " ", run.output)
    assert re.search(r"the model fails at every server .*RuntimeError: mat1 and mat2 shapes .*Mend it there", told)
    assert re.search(r"\S+failing_family\.py line \d+", told)
    assert "Traceback" not in run.output
    assert (summary["exit"], summary["failure"]["kind"]) == ("failed", "MisfitError")
