"""Amounts of memory as people write them."""

from __future__ import annotations

import pytest

from shoal.config import load_config
from shoal.config.sizes import format_bytes
from shoal.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4GiB", 4 * 2**30),
        ("800MB", 800 * 10**6),
        ("1.5 GiB", 3 * 2**29),
        ("1000", 1000),
        ("2g", 2 * 10**9),
        ("3ki", 3072),
    ],
)
def test_sizes_have_units(text: str, expected: int) -> None:
    assert load_config(None, [f"--servers.max-memory-bytes={text}"], {}).servers.max_memory_bytes == expected


@pytest.mark.parametrize("text", ["much", "4 apples", "-1GiB", "0", ""])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"servers\.max_memory_bytes"):
        load_config(None, [f"--servers.max-memory-bytes={text}"], {})


def test_no_disk_may_be_used_but_no_memory_is_none() -> None:
    servers = load_config(None, ["--servers.max-disk-bytes=0"], {}).servers
    assert (servers.max_disk_bytes, load_config(None, [], {}).servers.max_disk_bytes) == (0, None)
    assert load_config(None, ["--servers.max-disk-bytes=20GB"], {}).servers.max_disk_bytes == 20 * 10**9
    with pytest.raises(ConfigError, match=r"servers\.max_disk_bytes"):
        load_config(None, ["--servers.max-disk-bytes=-1GB"], {})


def test_sizes_are_shown_in_the_unit_that_fits() -> None:
    assert [format_bytes(n) for n in (12, 2048, 3 * 2**29, 2**42)] == ["12 bytes", "2.0 KiB", "1.5 GiB", "4.0 TiB"]
