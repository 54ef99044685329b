"""What a launcher puts into its run's folder, and takes out of it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from shoal.cli.run_files import remove_empty_outputs


def test_only_outputs_that_are_empty_are_removed(tmp_path: Path) -> None:
    (tmp_path / "server_0.out").touch()
    (tmp_path / "server_1.out").write_text("said")
    (tmp_path / "server_0.log").touch()
    remove_empty_outputs(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["server_0.log", "server_1.out"]


def test_a_disk_that_has_become_read_only_hides_no_reason_behind_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "server_0.out").touch()

    def unlink(_: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", unlink)
    remove_empty_outputs(tmp_path)
