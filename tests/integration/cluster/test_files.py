"""Runs whose servers have what they can in files: the bits of those that have all in memory, also for newcomers."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from tests.linux_calls import needs

from shoal.config import Config
from shoal.optim import vector_memory
from shoal.runtime import file_memory
from shoal.runtime.linux_calls import LinuxCall
from shoal.swarm.assignment import Files

from .conftest import MakeCluster, make_config, run_undisturbed
from .test_joining import CHUNK_BYTES, CONFIG, check_agreement, hold_up, members, start_of_round

pytestmark = needs(LinuxCall.FILE_MEMORY, "nothing lies in files")
CONFIGS = {
    "adam": make_config(diloco={"inner_steps": 2}),
    "fragments": make_config(diloco={"inner_steps": 2, "fragments": 2, "inner_optim": {"type": "sgd"}}),
    "encoded": make_config(diloco={"inner_steps": 2, "averaging_compression": "int8"}),
}


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has everything lie in files that may, however short; the sizes of these."""
    found: list[int] = []
    in_file = file_memory.mapped

    def mapped(folder: Path, num_bytes: int) -> ctypes.Array[ctypes.c_ubyte]:
        found.append(num_bytes)
        return in_file(folder, num_bytes)

    monkeypatch.setattr(file_memory, "mapped", mapped)
    monkeypatch.setattr(vector_memory, "LONG_BYTES", 1)
    return found


def num_mapped(folder: Path) -> int:
    """Files without a name that this process has there."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(str(folder) in line and line.endswith("(deleted)") for line in lines)


@pytest.mark.usual("adam-VECTORS", "fragments-MOMENTS")
@pytest.mark.parametrize("files", [Files.VECTORS, Files.MOMENTS], ids=lambda files: files.name)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
async def test_where_vectors_lie_changes_no_bit(
    make_cluster: MakeCluster, mapped: list[int], config: Config, files: Files
) -> None:
    expected = await run_undisturbed(make_cluster, config)
    assert not mapped, "in memory"
    async with make_cluster(config, files=files) as cluster:
        cluster.start_mirror()  # which has servers keep averages, and what their inner optimizers know
        found = await cluster.run()
    assert mapped
    assert found.hashes == expected.hashes
    for record, other in zip(found.records, expected.records, strict=True):
        assert [stage.hashes for stage in record.stages] == [stage.hashes for stage in other.stages]


async def test_a_newcomer_gets_what_lies_in_files_into_files(
    make_cluster: MakeCluster, mapped: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with make_cluster(CONFIG, chunk_bytes=CHUNK_BYTES, files=Files.MOMENTS) as cluster:
        start_of_round(cluster, 2, lambda: cluster.start_server(1))
        hold_up(cluster, monkeypatch, 4, ("server4",))
        result = await cluster.run()
        check_agreement(cluster, result)
        assert "server4" in members(result, 5, 1)
        assert num_mapped(tmp_path) > 0
    assert mapped
