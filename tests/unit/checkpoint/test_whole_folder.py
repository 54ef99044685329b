"""Folders that are replaced as a whole, also where two names cannot be exchanged in one step."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.checkpoint.whole_folder import WholeFolder, remove_leftovers


def _put(path: Path, text: str) -> None:
    folder = WholeFolder(path)
    folder.write_json("what.json", {"is": text})
    folder.put_into_place()


@pytest.mark.usefixtures("either_way")
def test_a_folder_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    place = tmp_path / "round_000001"
    for text in ("old", "new"):
        _put(place, text)
        assert text in (place / "what.json").read_text()
        assert list(tmp_path.iterdir()) == [place]


@pytest.mark.usefixtures("portable")
@pytest.mark.parametrize("next_step", ["the next writer", "a look at what is left"])
def test_a_writer_that_is_killed_between_its_two_renames_loses_nothing(
    next_step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "round_000001"
    _put(place, "old")
    folder = WholeFolder(place)
    folder.write_json("what.json", {"is": "new"})
    rename = Path.rename

    def dies_before_the_second(path: Path, target: Path) -> Path:
        if target == place:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", dies_before_the_second)
        with pytest.raises(KeyboardInterrupt):
            folder.put_into_place()
    assert not place.exists()
    if next_step == "the next writer":
        WholeFolder(place).discard()
    else:
        remove_leftovers(tmp_path, "round_*")
    assert "old" in (place / "what.json").read_text()
    assert list(tmp_path.iterdir()) == [place]


@pytest.mark.usefixtures("portable")
def test_what_was_replaced_and_not_yet_removed_goes_with_the_leftovers(tmp_path: Path) -> None:
    place = tmp_path / "round_000001"
    _put(place, "new")
    (tmp_path / ".round_000001.17.before").mkdir()
    remove_leftovers(tmp_path, "round_*")
    assert list(tmp_path.iterdir()) == [place]
