"""Free memory of a host, with control groups of both versions around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.runtime.memory import free_memory_bytes

KIB = 1024


def host(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 4000 kB\nMemFree: 10 kB\nMemAvailable:    1000 kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = "0::/user/job\n"
V1 = "5:cpu:/\n4:memory:/docker/abc\n0::/\n"


def v2(group: str, limit: str, used: str, stat: str = "") -> dict[str, str]:
    return {f"{group}memory.max": limit, f"{group}memory.current": used, f"{group}memory.stat": stat}


def v1(group: str, limit: str, used: str, stat: str = "") -> dict[str, str]:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    return {f"memory/{group}{name}": text for name, text in zip(names, (limit, used, stat), strict=True)}


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        (V2, {}, 1000 * KIB),
        (V2, v2("user/job/", "max", "5"), 1000 * KIB),
        (V2, v2("user/job/", "500", "100"), 400),
        # Cache makes room, and an outer group may leave less than the own one.
        (V2, v2("user/job/", "500", "450", "anon 9\ninactive_file 200\n"), 250),
        (V2, v2("user/job/", "500", "0") | v2("user/", "90", "60"), 30),
        # A container sees its own group as the top.
        (V2, v2("", "700", "100"), 600),
        (V2, v2("", "700", "900"), 1),
        (V1, v1("", "800", "100", "total_inactive_file 50\n"), 750),
        (V1, v1("docker/abc/", "9223372036854771712", "1"), 1000 * KIB),
    ],
)
def test_the_least_of_host_and_groups_counts(tmp_path: Path, cgroup: str, files: dict[str, str], expected: int) -> None:
    assert free_memory_bytes(host(tmp_path, cgroup, files)) == expected


def test_without_proc_nothing_is_known(tmp_path: Path) -> None:
    assert free_memory_bytes(tmp_path) == 0


@pytest.mark.usefixtures("either_way")
def test_this_host_has_memory() -> None:
    assert free_memory_bytes() > 2**20
