"""Folders of the user's own as data: text files, and images in a folder for each class, without a network."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

_OPEN = """
import json
import sys
from shoal.config import Config
from shoal.data.catalog import open_source
from shoal.errors import ConfigError, SampleError
import numpy as np
name, task, more = sys.argv[1:]
try:
    data = {"dataset_name": name, "task_type": task, "seq_len": 16, "img_size": 8, "holdout_fraction": 0.2}
    data |= json.loads(more)
    family = {"llm": "gpt", "cv": "resnet18"}[task]
    found = open_source(Config.model_validate({"data": data, "model": {"family": family}}))
    if found.windows is not None:
        found.windows.wait({0})
        found.windows.close()
    print(found.num_classes, found.train.num_samples, found.holdout.num_samples)
    if task == "cv":
        for source in (found.train, found.holdout):
            images, classes, _ = source.read(np.arange(source.num_samples))
            print(sorted(zip((127.5 * images[:, 0, 0, 0] + 127.5).round().astype(int).tolist(), classes.tolist())))
    for skipped in found.skipped.take_new() if found.skipped else ():
        print(skipped.which, skipped.reason)
except (ConfigError, SampleError) as error:
    print(error)
"""


def opened(folder: Path, name: str, task: str, **data: object) -> str:
    """What a process of its own says of a data set: the library keeps threads and caches."""
    places = {"HF_HOME": str(folder / "cache"), "XDG_CACHE_HOME": str(folder / "cache")}
    environment = os.environ | places | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", _OPEN, name, task, json.dumps(data)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=True, cwd=folder)
    return done.stdout.strip()


def test_a_folder_of_text_files_is_a_data_set(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "one.txt").write_text("to be or not to be\n" * 40)
    (tmp_path / "corpus" / "two.txt").write_text("that is the question\n" * 40)
    num_bytes = 40 * (len("to be or not to be\n") + len("that is the question\n"))
    classes, num_train, num_holdout = map(int, opened(tmp_path, "./corpus", "llm").split())
    assert classes == 256
    assert num_bytes - 3 * 16 <= 16 * (num_train + num_holdout) <= num_bytes


def write_photos(folder: Path, first: int = 0, classes: tuple[str, ...] = ("cats", "dogs")) -> None:
    """Ten grey pictures of each class, each of another grey: even numbers are cats."""
    for place, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for number in range(10):
            image = Image.fromarray(np.full((8, 8, 3), first + 2 * number + place, dtype=np.uint8))
            image.save(folder / name / f"{number}.png")


def _numbers(line: str) -> list[int]:
    """The greys of a split; each has its class."""
    pairs = json.loads(line.replace("(", "[").replace(")", "]"))
    assert all(label == grey % 2 for grey, label in pairs)
    return [grey for grey, _ in pairs]


def test_a_folder_of_images_has_a_class_for_each_folder_in_it(tmp_path: Path) -> None:
    write_photos(tmp_path / "photos")
    sizes, train, holdout = opened(tmp_path, "./photos", "cv").splitlines()
    assert sizes == "2 16 4"
    assert sorted(_numbers(train) + _numbers(holdout)) == list(range(20))


def test_images_are_evaluated_on_a_split_or_a_folder_of_their_own(tmp_path: Path) -> None:
    write_photos(tmp_path / "photos" / "train")
    write_photos(tmp_path / "photos" / "test", first=100)
    write_photos(tmp_path / "others", first=200)
    write_photos(tmp_path / "birds", classes=("cats", "birds"))
    for eval_split, first in (("test", 100), ("./others", 200)):
        sizes, train, holdout = opened(tmp_path, "./photos", "cv", eval_split=eval_split).splitlines()
        assert sizes == "2 20 20"
        assert _numbers(train) == list(range(20))
        assert _numbers(holdout) == list(range(first, first + 20))
    said = opened(tmp_path, "./photos", "cv", eval_split="./birds")
    assert "data.eval_split = ./birds has the classes birds, cats, and what is trained on cats, dogs" in said
    assert "data.eval_split = ./no: there is no such folder" in opened(tmp_path, "./photos", "cv", eval_split="./no")
    assert "Unknown split" in opened(tmp_path, "./photos", "cv", eval_split="validation")
    assert "digits has no splits" in opened(tmp_path, "digits", "cv", eval_split="test", num_channels=1)


def test_images_that_are_evaluated_are_not_trained_on(tmp_path: Path) -> None:
    write_photos(tmp_path / "photos" / "some")
    write_photos(tmp_path / "photos" / "held", first=100)
    for number in (4, 5):
        (tmp_path / "photos" / "some" / "cats" / f"{number}.png").unlink()
        (tmp_path / "photos" / "some" / "cats" / f"{number}.png").symlink_to(f"../../held/cats/{number}.png")
    sizes, train, holdout = opened(tmp_path, "./photos", "cv", eval_split="./photos/held").splitlines()
    assert sizes == "2 18 20"
    assert _numbers(train) == [grey for grey in range(20) if grey not in (8, 10)]
    assert _numbers(holdout) == list(range(100, 120))
    said = opened(tmp_path, "./photos", "cv", eval_split="./photos")
    assert "holds out all images of data.dataset_name = ./photos, and none is left to train on" in said
    assert "is data.dataset_split, and so nothing is left" in opened(tmp_path, "./photos", "cv", eval_split="train")
    stream = opened(tmp_path, "./photos", "cv", eval_split="./photos/held", streaming=True, shuffle_window=64)
    assert "./photos/held holds out 22 of the files" in stream
    assert "move what is held out to a folder elsewhere" in stream
    write_photos(tmp_path / "photos", first=200)
    said = opened(tmp_path, "./photos", "cv", eval_split="./photos/held")
    assert "a folder for each class, all at one depth" in said


def test_an_image_that_is_damaged_is_named_and_another_one_stands_in_its_place(tmp_path: Path) -> None:
    write_photos(tmp_path / "photos")
    (tmp_path / "photos" / "cats" / "3.png").write_bytes(b"no image")
    whole = (tmp_path / "photos" / "dogs" / "7.png").read_bytes()
    (tmp_path / "photos" / "dogs" / "7.png").write_bytes(whole[: len(whole) // 2])
    sizes, train, holdout, *skipped = opened(tmp_path, "./photos", "cv", max_bad_fraction=0.1).splitlines()
    assert sizes == "2 16 4"
    found = _numbers(train) + _numbers(holdout)
    assert len(found) == 20
    assert set(found) == set(range(20)) - {2 * 3, 2 * 7 + 1}
    assert len(skipped) == 2
    assert all(any(f"{name}.png) " in line for line in skipped) for name in ("cats/3", "dogs/7"))
    assert "2 of 20 samples" in opened(tmp_path, "./photos", "cv", max_bad_fraction=0.05)


@pytest.mark.parametrize("streaming", [{}, {"streaming": True, "shuffle_window": 64, "holdout_fraction": 0.05}])
def test_an_image_with_an_endless_side_is_left_out_before_it_is_unpacked(
    tmp_path: Path, streaming: dict[str, Any]
) -> None:
    write_photos(tmp_path / "photos")
    Image.fromarray(np.zeros((1, 70_000), dtype=np.uint8)).save(tmp_path / "photos" / "cats" / "3.png")
    sizes, train, holdout, *skipped = opened(tmp_path, "./photos", "cv", max_bad_fraction=0.1, **streaming).splitlines()
    assert sizes.startswith("2 ")
    assert set(_numbers(train)) | set(_numbers(holdout)) == set(range(20)) - {2 * 3}
    assert all("it has 70000 x 1 pixels, and at most 65535 of a side are read" in line for line in skipped)
    assert streaming or skipped


@pytest.mark.parametrize("streaming", [{}, {"streaming": True, "shuffle_window": 64}])
def test_an_image_elsewhere_is_none_of_the_folder_s_whatever_its_links_and_rows_say(
    tmp_path: Path, streaming: dict[str, Any]
) -> None:
    write_photos(tmp_path / "photos")
    secret = tmp_path / "secret.png"
    (tmp_path / "photos" / "cats" / "3.png").rename(secret)
    (tmp_path / "photos" / "cats" / "3.png").symlink_to(secret)
    assert "is outside of its data set" in opened(tmp_path, "./photos", "cv", **streaming)
    features = {"image": {"_type": "Image"}, "label": {"names": ["cats", "dogs"], "_type": "ClassLabel"}}
    form = pa.schema(
        {"image": pa.struct({"bytes": pa.binary(), "path": pa.string()}), "label": pa.int64()},
        metadata={"huggingface": json.dumps({"info": {"features": features}})},
    )
    rows = {"image": [{"bytes": None, "path": str(secret)}] * 20, "label": [0, 1] * 10}
    (tmp_path / "rows").mkdir()
    pq.write_table(pa.table(rows, schema=form), tmp_path / "rows" / "train.parquet")
    assert "is outside of its data set" in opened(tmp_path, "./rows", "cv", **streaming)


_STREAMED = pytest.mark.parametrize(
    "streaming", [{}, {"streaming": True, "shuffle_window": 64, "holdout_fraction": 0.05}]
)


@pytest.fixture
def nobody() -> Iterator[int]:
    """A port of loopback that nobody is to dial; who does is told nothing."""
    dialled: list[object] = []

    def listen() -> None:
        with suppress(OSError):
            while True:
                caller, address = listener.accept()
                dialled.append(address)
                caller.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=listen)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert dialled == []


@_STREAMED
@pytest.mark.parametrize("named", ["data_files: {place}/secret.txt", "data_files: ../secret.txt", "data_dir: {place}"])
def test_a_folder_s_readme_names_no_files_elsewhere(tmp_path: Path, named: str, streaming: dict[str, Any]) -> None:
    place, folder = tmp_path / "place", tmp_path / "place" / "set"
    folder.mkdir(parents=True)
    (place / "secret.txt").write_text("what nobody else may see\n" * 50)
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  {named.format(place=place)}\n---\n")
    (folder / "a.tsv").write_text("text\n" + "what may be seen\n" * 50)
    assert "is outside of its data set" in opened(tmp_path, "./place/set", "llm", **streaming)


@_STREAMED
def test_a_link_of_a_form_that_the_library_reads_leads_to_no_file_elsewhere(
    tmp_path: Path, streaming: dict[str, Any]
) -> None:
    (tmp_path / "secret").write_text("text\n" + "what nobody else may see\n" * 50)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.tsv").symlink_to(tmp_path / "secret")
    assert "is outside of its data set" in opened(tmp_path, "./set", "llm", **streaming)


def test_a_folder_s_readme_has_nobody_dialled(tmp_path: Path, nobody: int) -> None:
    address = f"http://127.0.0.1:{nobody}/train.txt"
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "README.md").write_text(
        f"---\nconfigs:\n- config_name: default\n  data_files: {address}\n---\n"
    )
    assert f"'{address}' is outside of its data set" in opened(tmp_path, "./set", "llm")


_STORED_IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})


def _form(*columns: tuple[str, pa.DataType, dict[str, Any]]) -> pa.Schema:
    """Columns with what `datasets` takes them for."""
    features = {name: feature for name, _, feature in columns}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    return pa.schema({name: kind for name, kind, _ in columns}, metadata=metadata)


@_STREAMED
@pytest.mark.parametrize("task", ["llm", "cv"])
def test_of_a_row_nothing_is_fetched_but_what_is_trained_on(
    tmp_path: Path, task: str, streaming: dict[str, Any], nobody: int
) -> None:
    elsewhere = {"bytes": None, "path": f"http://127.0.0.1:{nobody}/x.png"}
    content = io.BytesIO()
    Image.new("RGB", (8, 8)).save(content, "PNG")
    form = _form(
        ("text", pa.string(), {"_type": "Value", "dtype": "string"}),
        ("image", _STORED_IMAGE, {"_type": "Image"}),
        ("label", pa.int64(), {"_type": "ClassLabel", "names": ["cats", "dogs"]}),
        ("other", _STORED_IMAGE, {"_type": "Image"}),
    )
    row = {
        "text": "what may be seen",
        "image": elsewhere if task == "llm" else {"bytes": content.getvalue(), "path": None},
        "label": 0,
        "other": elsewhere,
    }
    (tmp_path / "set").mkdir()
    with pa.OSFile(str(tmp_path / "set" / "train.arrow"), "wb") as file, pa.ipc.new_stream(file, form) as writer:
        writer.write_table(pa.Table.from_pylist([row] * 40, schema=form))
    classes, num_train, _ = opened(tmp_path, "./set", task, **streaming).splitlines()[0].split()
    assert (classes, int(num_train) > 10) == ("256" if task == "llm" else "2", True)


@_STREAMED
def test_members_of_a_tar_are_neither_unpacked_nor_loaded(tmp_path: Path, streaming: dict[str, Any]) -> None:
    (tmp_path / "set").mkdir()
    with tarfile.open(tmp_path / "set" / "train.tar", "w") as archive:
        for number in range(40):
            for suffix, content in (("txt", b"what may be seen\n" * 4), ("a.gz", b"no gzip"), ("pth", b"no tensor")):
                member = tarfile.TarInfo(f"{number:03d}.{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    assert opened(tmp_path, "./set", "llm", text_column="txt", **streaming).startswith("256 ")


@_STREAMED
@pytest.mark.parametrize("name", ["train.parquet", "train.gpq", "train.parquet.1"])
def test_a_parquet_that_says_it_unpacks_to_gigabytes_is_not_read_whatever_it_is_called(
    tmp_path: Path, name: str, streaming: dict[str, Any]
) -> None:
    form = _form(
        ("image", _STORED_IMAGE, {"_type": "Image"}),
        ("label", pa.int64(), {"_type": "ClassLabel", "names": ["cats", "dogs"]}),
        ("x", pa.binary(), {"_type": "Value", "dtype": "binary"}),
    )
    row = {"image": None, "label": 0, "x": bytes(1 << 20)}
    (tmp_path / "set").mkdir()
    table = pa.Table.from_pylist([row] * 1100, schema=form)
    pq.write_table(table, tmp_path / "set" / name, compression="zstd", use_dictionary=False)
    told = opened(tmp_path, "./set", "cv", **streaming)
    assert "row group 0 unpacks from" in told
    assert "is not read" in told


@_STREAMED
def test_a_packed_arrow_file_is_not_read(tmp_path: Path, streaming: dict[str, Any]) -> None:
    (tmp_path / "set").mkdir()
    table = pa.table({"text": ["x" * 1000] * 2000})
    packed = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(str(tmp_path / "set" / "train.arrow"), table.schema, options=packed) as writer:
        writer.write_table(table)
    assert "is a packed Arrow file and is not read" in opened(tmp_path, "./set", "llm", **streaming)


def test_a_folder_that_cannot_be_read_as_data_is_named_and_one_that_is_not_there_too(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    said = opened(tmp_path, "./empty", "llm")
    assert "data.dataset_name = ./empty" in said
    assert "loaded from this folder" in said
    said = opened(tmp_path, "./nowhere", "llm")
    assert "data.dataset_name = ./nowhere" in said
    assert "there is no such folder or file here" in said


def test_a_folder_of_images_is_a_stream_too_without_those_that_are_damaged(tmp_path: Path) -> None:
    write_photos(tmp_path / "photos")
    write_photos(tmp_path / "others", first=200)
    write_photos(tmp_path / "birds", classes=("cats", "birds"))
    (tmp_path / "photos" / "cats" / "3.png").write_bytes(b"no image")
    stream = {"streaming": True, "shuffle_window": 64, "holdout_fraction": 0.05, "max_bad_fraction": 0.1}
    sizes, train, holdout = opened(tmp_path, "./photos", "cv", **stream).splitlines()
    assert sizes == "2 64 3"
    assert set(_numbers(train)).isdisjoint(_numbers(holdout))
    assert set(_numbers(train)) | set(_numbers(holdout)) == set(range(20)) - {2 * 3}
    sizes, train, holdout = opened(tmp_path, "./photos", "cv", eval_split="./others", **stream).splitlines()
    assert set(_numbers(train)) == set(range(20)) - {2 * 3}
    assert len(set(_numbers(holdout)) & set(range(200, 220))) == 3
    said = opened(tmp_path, "./photos", "cv", eval_split="./birds", **stream)
    assert "with 2 classes birds, cats, and what is trained on of" in said


def test_an_archive_that_says_that_it_holds_a_terabyte_is_not_unpacked(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    content = io.BytesIO()
    Image.new("RGB", (8, 8)).save(content, "PNG")
    packed = tmp_path / "photos" / "train.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        for name in ("a/1.png", "b/2.png"):
            archive.writestr(name, content.getvalue())
        archive.filelist[0].file_size = 1 << 40
    assert "train.zip unpacks to more than" in opened(tmp_path, "./photos", "cv")
    assert not [path for path in (tmp_path / "cache").rglob("*.png")]


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_a_folder_of_which_the_library_makes_nothing_is_one_error(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    if kind == "zip":
        content = io.BytesIO()
        Image.new("RGB", (8, 8)).save(content, "PNG")
        with zipfile.ZipFile(folder / "train.zip", "w") as archive:
            for name in ("a/1.png", "b/2.png"):
                archive.writestr(name, content.getvalue())
    else:
        member = tarfile.TarInfo("a/1.png")
        member.size = 1 << 40
        (folder / "train.tar").write_bytes(member.tobuf() + bytes(10_240))
    told = opened(tmp_path, "./photos", "cv")
    assert "could not be loaded from this folder" in told
    assert "An error occurred" not in told
