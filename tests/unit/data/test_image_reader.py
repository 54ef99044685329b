"""Images that are small as files and take minutes, or gigabytes, to decode; in a data set, and in `shoal classify`."""

from __future__ import annotations

import io
import struct

import datasets
import pytest
from PIL import Image, UnidentifiedImageError

from shoal.config.training import DataConfig
from shoal.data import image_reader
from shoal.data.image_reader import ImageReader, image_in
from shoal.errors import SampleError

_DATA = DataConfig(dataset_name="photos", task_type="cv", img_size=8)


def _scans(side: int, scans: int) -> bytes:
    """A progressive JPEG, grey, of which each scan but the first says of all pixels that nothing is to be added."""

    def table(kind: int, codes: int, *symbols: int) -> bytes:
        return b"\xff\xc4" + struct.pack(">HB", 19 + len(symbols), kind) + bytes([codes, 0, *[0] * 14, *symbols])

    def scan(first: int, last: int, bits: int, content: bytes) -> bytes:
        return b"\xff\xda" + struct.pack(">HB", 8, 1) + bytes([1, 0, first, last, bits]) + content

    blocks = (side // 8) ** 2
    run = f"0{blocks - 2**10:010b}"  # the end of the band in so many blocks; below 2^11
    run_bytes = int(run.ljust(16, "1"), 2).to_bytes(2, "big")
    tables = b"\xff\xdb" + struct.pack(">HB", 67, 0) + bytes([1] * 64) + table(0x00, 1, 0) + table(0x10, 1, 0xA0)
    frame = b"\xff\xc2" + struct.pack(">HBHHB", 11, 8, side, side, 1) + bytes([1, 0x11, 0])
    first = scan(0, 0, 0x01, bytes(blocks // 8)) + scan(1, 63, 0x01, run_bytes)
    return b"\xff\xd8" + tables + frame + first + scan(1, 63, 0x10, run_bytes) * (scans - 2) + b"\xff\xd9"


def test_a_jpeg_of_more_scans_than_any_photo_has_is_refused_before_it_is_decoded() -> None:
    content = _scans(256, 40_000)
    assert len(content) < 700_000
    with pytest.raises(SampleError, match="40000 scans of 256 x 256 pixels"):
        image_in(content, _DATA)


@pytest.mark.parametrize("behind", [b"", b"\xff\xda\x00\x08" * 50_000], ids=["whole", "with what cameras put behind"])
def test_a_jpeg_of_as_many_scans_as_photos_have_is_decoded(behind: bytes) -> None:
    assert image_in(_scans(256, 20) + behind, _DATA).shape == (3, 8, 8)
    photo = io.BytesIO()
    Image.effect_noise((1200, 900), 90).convert("RGB").save(photo, "JPEG", progressive=True, quality=95)
    assert image_reader._num_scans(photo.getvalue()) == 10
    assert image_in(photo.getvalue() + behind, _DATA).shape == (3, 8, 8)


def test_a_long_line_is_no_image_of_a_file_either() -> None:
    content = io.BytesIO()
    Image.new("L", (70_000, 1)).save(content, "PNG")
    with pytest.raises(SampleError, match="70000 x 1 pixels"):
        image_in(content.getvalue(), _DATA)


def test_a_row_that_is_no_image_is_told_in_words_without_an_address_in_memory() -> None:
    reader = ImageReader(datasets.Image(decode=False), _DATA)
    with pytest.raises(UnidentifiedImageError, match=r"^it is no image of a kind that Pillow reads$"):
        reader.read({"bytes": b"\x89PNG\r\n", "path": None})
