"""A data set of `datasets` consists of its own files: what it names besides is neither read nor asked for."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch.multiprocessing
from tests.fake_hub import FakeBuilder

from shoal.config.training import DataConfig
from shoal.data import parquet_files
from shoal.data.own_files import OwnFiles, decode_few, only, require_form
from shoal.errors import ConfigError

_ENDPOINT = "https://huggingface.co"


class Library(SimpleNamespace):
    """`datasets.data_files`, which finds whatever it is told to."""

    def __init__(self, *found: str) -> None:
        self.asked: list[str] = []
        super().__init__(resolve_pattern=lambda pattern, base_path="": [self.asked.append(pattern), list(found)][1])


def of(name: str) -> OwnFiles:
    return OwnFiles(DataConfig(dataset_name=name), _ENDPOINT)


@pytest.mark.parametrize(
    "pattern", ["http://169.254.169.254/latest/x.txt", "file:///etc/x.txt", "hf://datasets/a/c/x.txt", "s3://a/b"]
)
@pytest.mark.parametrize("is_folder", [True, False])
def test_an_address_of_elsewhere_is_not_even_looked_up(tmp_path: Path, pattern: str, is_folder: bool) -> None:
    library = Library()
    for each in (pattern, f"zip://*::{pattern}"):
        with (
            only(of(str(tmp_path) if is_folder else "a/b"), library),
            pytest.raises(ConfigError, match="is outside of"),
        ):
            library.resolve_pattern(each, "base")
    assert library.asked == []


@pytest.mark.parametrize(
    "found",
    [
        "/etc/x.txt",
        "hf://datasets/a/bc@1/x.txt",
        "hf://datasets/a/b@1/../../c/x.txt",
        f"{_ENDPOINT}/datasets/a/c/x.txt",
    ],
)
def test_of_a_repository_nothing_else_is_read(found: str) -> None:
    library = Library(found)
    with only(of("a/b"), library), pytest.raises(ConfigError, match="is outside of its data set, a/b"):
        library.resolve_pattern("x", "base")


def test_what_lies_in_the_folder_or_the_repository_is_found(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("x")
    own = {
        str(tmp_path): str(tmp_path / "x.txt"),
        "a/b": "hf://datasets/a/b@1/x.txt",
        "buckets/a/b": "hf://buckets/a/b/x.txt",
    }
    for name, file in own.items():
        library = Library(file)
        with only(of(name), library):
            assert library.resolve_pattern("*", "base") == [file]


def test_who_opens_data_sets_beside_is_kept_from_nothing(tmp_path: Path) -> None:
    library = Library("/etc/x.txt")
    with only(of(str(tmp_path)), library):
        pass
    assert library.resolve_pattern("/etc/*") == ["/etc/x.txt"]


def test_a_form_that_other_libraries_read_is_refused() -> None:
    data = DataConfig(dataset_name="a/b")
    require_form(FakeBuilder(), data)
    hdf5: Any = type("Hdf5", (), {"__module__": "datasets.packaged_modules.hdf5.hdf5"})
    with pytest.raises(ConfigError, match=r"a form that is not read here \(hdf5\)"):
        require_form(hdf5(), data)


@pytest.fixture
def streamed() -> Iterator[Callable[[bytes], Any]]:
    """Return what gives the rows of parquet files that lie elsewhere, of which `datasets` reads what it needs."""
    datasets, memory = pytest.importorskip("datasets"), pytest.importorskip("fsspec").filesystem("memory")

    def stream(*contents: bytes) -> Any:
        for number, content in enumerate(contents):
            memory.pipe_file(f"/streamed/{number}.parquet", content)
        files = [f"memory://streamed/{number}.parquet" for number in range(len(contents))]
        builder = datasets.load_dataset_builder("parquet", data_files=files)
        require_form(builder, DataConfig(dataset_name="a/b"))
        return iter(builder.as_streaming_dataset(split="train"))

    # hivemind, which another test may have imported, has torch share memory by a process that stays.
    usual = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_descriptor")
    yield stream
    torch.multiprocessing.set_sharing_strategy(usual)
    memory.rm("/streamed", recursive=True)


def parquet(value: str) -> bytes:
    written = io.BytesIO()
    options = {"compression": "zstd", "use_dictionary": False}
    pyarrow.parquet.write_table(pyarrow.table({"text": [value]}), written, **options)
    return written.getvalue()


def test_a_parquet_that_is_streamed_and_says_it_unpacks_to_gigabytes_is_not_read(
    streamed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_files, "_MOST_UNPACKED_BYTES", 900_000)
    rows = streamed(parquet("small"), parquet("a" * 1_000_000))
    assert next(rows) == {"text": "small"}, "the second one is looked at when its turn comes"
    with pytest.raises(ConfigError, match=r"1\.parquet: row group 0 unpacks from \d+ bytes to 1\d{6}, more than 1000"):
        next(rows)


def test_members_of_a_tar_are_text_numbers_or_bytes() -> None:
    decoders = {"txt": bytes.decode, "cls": int, "pth": id, "npy": id}
    library = SimpleNamespace(
        WebDataset=SimpleNamespace(DECODERS=decoders), EXTENSION_TO_COMPRESSION_FS_FILE_CLS={".gz": open}
    )
    for _ in range(2):  # once for each data set
        decode_few(library)
    assert sorted(library.WebDataset.DECODERS) == ["cls", "txt"]
    assert library.EXTENSION_TO_COMPRESSION_FS_FILE_CLS == {}
