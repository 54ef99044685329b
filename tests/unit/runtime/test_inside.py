"""What is read of a folder that others have made lies in it, and is a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.errors import ConfigError
from shoal.runtime.inside import places_of, require_inside


def test_a_pipe_into_which_nobody_writes_is_no_file_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "clip.wav")
    (tmp_path / "link.wav").symlink_to("clip.wav")
    for name in ("clip.wav", "link.wav"):
        with pytest.raises(ConfigError, match="is no file but a pipe"):
            require_inside(tmp_path / name, places_of(tmp_path))
    (tmp_path / "true.wav").write_bytes(b"")
    for path in (tmp_path / "true.wav", tmp_path / "missing.wav", tmp_path):
        require_inside(path, places_of(tmp_path))
