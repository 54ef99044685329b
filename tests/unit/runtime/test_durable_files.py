"""Files that are put in place as a whole, in folders that others may have made."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from shoal.runtime.durable_files import put_whole


@pytest.mark.parametrize("link", ["report.html", ".report.html.{pid}.unfinished"])
def test_a_link_under_the_name_of_a_file_that_is_written_leads_to_no_other_file(link: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run" / link.format(pid=os.getpid())).symlink_to("../mine")
    put_whole(tmp_path / "run" / "report.html", b"theirs", lasting=False)
    assert (tmp_path / "mine").read_text() == "mine"
    assert (tmp_path / "run" / "report.html").read_text() == "theirs"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["report.html"]


def test_what_a_process_of_the_same_number_has_left_is_in_nobody_s_way(tmp_path: Path) -> None:
    (tmp_path / f".a.{os.getpid()}.unfinished").write_text("half a li")
    put_whole(tmp_path / "a", b"whole", lasting=True)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "whole")]


@pytest.mark.parametrize(("private", "mode"), [(True, 0o600), (False, 0o644)])
def test_a_private_file_is_its_owner_s_alone_whatever_the_umask(private: bool, mode: int, tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        put_whole(tmp_path / "key", b"secret", lasting=False, private=private)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == mode
