"""A server for which no stage fits says which sizes, and what to do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.control.assignment import require_fit
from shoal.errors import ConfigError
from shoal.ids import PeerId
from shoal.swarm.assignment import StageNeed
from shoal.swarm.view import Candidate
from shoal.wire.messages.base import Hop

GIB = 2**30
NEEDS = (StageNeed(GIB, host_bytes=GIB), StageNeed(3 * GIB, host_bytes=GIB // 2))
HUNGRY = (
    StageNeed(GIB, sample_bytes=GIB, max_samples=16),
    StageNeed(GIB, sample_bytes=GIB, max_samples=16, min_samples=3),
)


FILED = (StageNeed(3 * GIB, host_bytes=4 * GIB, file_bytes=GIB, moment_bytes=2 * GIB, disk_bytes=6 * GIB),)


def server(host_bytes: int, device_bytes: int = 0) -> Candidate:
    return Candidate(Hop(PeerId("s"), ()), 0.0, host_bytes, device_bytes)


def test_one_stage_that_fits_is_enough() -> None:
    require_fit(server(2 * GIB), NEEDS, (0, 1))
    require_fit(server(0), NEEDS, (0, 1))
    require_fit(server(GIB, 3 * GIB), NEEDS, (1,))
    require_fit(server(2 * GIB), HUNGRY, (0,))


@pytest.mark.parametrize(
    ("small", "stages", "parts"),
    [
        (
            server(GIB),
            (0, 1),
            [
                "no stage fits into the 1.0 GiB that this server may use, however small the microbatches: ",
                "stage 0 needs 2.0 GiB with 1 sample at a time; stage 1 needs 3.5 GiB with 1 sample at a time. ",
                "--num-servers",
            ],
        ),
        (server(2 * GIB), (1,), ["stage 1 does not fit into the 2.0 GiB", "model_pipeline.stages", "larger machine"]),
        (server(3 * GIB), (1,), ["stage 1 needs 4.0 GiB with 3 samples at a time"]),
        (
            server(8 * GIB, GIB // 2),
            (0,),
            ["the 512.0 MiB of the GPU with 8.0 GiB of the host", "stage 0 needs 1.0 GiB of the GPU with 1.0 GiB"],
        ),
    ],
)
def test_too_little_memory_is_an_error_of_the_user(small: Candidate, stages: tuple[int, ...], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        require_fit(small, HUNGRY if small.free_memory_bytes == 3 * GIB else NEEDS, stages)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("disk_bytes", "no_files", "said"),
    [
        (6 * GIB, "", "stage 0 needs 4.0 GiB with 1 sample at a time, beside 6.0 GiB in files. Start fewer"),
        (
            5 * GIB,
            "",
            "needs 7.0 GiB with 1 sample at a time; less with 6.0 GiB in files, for which there is room for 5.0 GiB. S",
        ),
        (
            0,
            "/logs lies in memory itself",
            "at a time. Nothing may lie in files instead: /logs lies in memory itself. ",
        ),
    ],
)
def test_what_would_fit_with_files_says_why_there_are_none(disk_bytes: int, no_files: str, said: str) -> None:
    small = replace(server(3 * GIB), free_disk_bytes=disk_bytes)
    with pytest.raises(ConfigError) as caught:
        require_fit(small, FILED, (0,), no_files)
    assert said in str(caught.value)
