"""The shared segment: places, sizes, and what is left of it."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from tests.linux_calls import needs
from tests.windows import num_free

from shoal.data.fields import Fields
from shoal.data.layout import BatchLayout
from shoal.data.pool import Pool, PoolReader, map_pool
from shoal.data.source import ArraySpec
from shoal.errors import InvariantViolation, RemoteProtocolError
from shoal.runtime.linux_calls import LinuxCall


def test_places_are_taken_from_the_front_and_come_back() -> None:
    with closing(Pool(place_bytes=64, num_places=3)) as pool:
        assert [pool.take() for _ in range(4)] == [0, 1, 2, None]
        pool.release(1)
        pool.release(0)
        assert num_free(pool) == 2
        assert pool.take() == 0


def test_a_large_batch_gets_places_in_a_row_and_gives_them_all_back() -> None:
    with closing(Pool(place_bytes=64, num_places=6)) as pool:
        assert [pool.take() for _ in range(4)] == [0, 1, 2, 3]
        pool.release(1)
        assert pool.take(2) == 4
        assert (pool.take(2), num_free(pool)) == (None, 1)
        pool.release(2)
        assert pool.take(2) == 1
        pool.release(4)
        assert (num_free(pool), pool.take(3), pool.take(2)) == (2, None, 4)
        assert pool.take(7) is None


def test_a_place_cannot_be_released_twice() -> None:
    with closing(Pool(place_bytes=64, num_places=2)) as pool, pytest.raises(InvariantViolation, match="twice"):
        pool.release(1)


def test_what_is_written_to_a_place_is_seen_through_the_mapping_and_nowhere_else() -> None:
    with closing(Pool(place_bytes=64, num_places=3)) as pool:
        seen = np.frombuffer(map_pool(pool.path, pool.num_bytes), dtype=np.uint8)
        pool.memory(1)[:] = 7
        assert np.flatnonzero(seen).tolist() == list(range(64, 128))
        assert not seen.flags.writeable


@needs(LinuxCall.MEMFD, "a file has no seals, and is copied from")
def test_the_segment_cannot_change_its_size() -> None:
    with closing(Pool(place_bytes=64, num_places=2)) as pool:
        fd = os.open(pool.path, os.O_RDWR)
        try:
            for size_bytes in (0, 4096):
                with pytest.raises(PermissionError):
                    os.ftruncate(fd, size_bytes)
        finally:
            os.close(fd)


def test_the_segment_has_no_name_and_is_gone_when_closed() -> None:
    before = set(os.listdir("/dev/shm"))
    pool = Pool(place_bytes=4096, num_places=2)
    assert set(os.listdir("/dev/shm")) == before
    pool.close()
    with pytest.raises(RemoteProtocolError, match="cannot be opened"):
        map_pool(pool.path, pool.num_bytes)


@pytest.mark.usefixtures("portable")
def test_without_memfd_a_private_file_takes_its_place_and_is_removed(tmp_path: Path) -> None:
    with closing(Pool(place_bytes=64, num_places=2, directory=tmp_path)) as pool:
        assert Path(pool.path).stat().st_mode & 0o777 == 0o600
        pool.memory(1)[:] = 9
        assert map_pool(pool.path, pool.num_bytes)[64:128] == b"\x09" * 64
    assert list(tmp_path.iterdir()) == []


def test_the_file_of_a_pool_may_be_cut_and_its_reader_gets_an_error(portable: None, tmp_path: Path) -> None:
    with closing(Pool(place_bytes=8192, num_places=2, directory=tmp_path)) as pool:
        pool.memory(1)[:] = 9
        reader = PoolReader(pool.path, pool.num_bytes)
        content = reader.read(8192, 8192)
        os.truncate(pool.path, 8200)
        with pytest.raises(RemoteProtocolError, match="it was cut"):
            reader.read(8192, 8192)
        assert bytes(content) == b"\x09" * 8192, "it is a copy"
        assert content.readonly
        with pytest.raises(RemoteProtocolError, match="has 8200 bytes"):
            PoolReader(pool.path, pool.num_bytes)


@pytest.mark.usefixtures("either_way")
def test_a_reader_has_the_bytes_of_a_place_and_can_outlive_the_pool(tmp_path: Path) -> None:
    with closing(Pool(place_bytes=64, num_places=2, directory=tmp_path)) as pool:
        pool.memory(1)[:] = range(64)
        reader = PoolReader(pool.path, pool.num_bytes)
    assert list(reader.read(80, 4)) == [16, 17, 18, 19]
    with pytest.raises(RemoteProtocolError, match="cannot be opened"):
        PoolReader(pool.path, pool.num_bytes)


def test_a_segment_smaller_than_said_is_refused() -> None:
    with (
        closing(Pool(place_bytes=64, num_places=2)) as pool,
        pytest.raises(RemoteProtocolError, match="has 128 bytes, not 129"),
    ):
        map_pool(pool.path, 129)


@pytest.mark.parametrize("num_samples", [1, 5, 6, 14])
def test_the_fields_of_a_batch_do_not_overlap_and_lie_where_they_are_said_to_be(num_samples: int) -> None:
    context = {"lengths": ArraySpec("uint16", ()), "positions": ArraySpec("int32", (7,))}
    layout = BatchLayout(Fields(ArraySpec("float32", (3,)), ArraySpec("int64", ()), context), max_samples=5)
    num_places = layout.num_places(num_samples)
    assert num_places == -(-num_samples // 5)
    with closing(Pool(place_bytes=layout.place_bytes, num_places=4)) as pool:
        memory = pool.memory(1, num_places)
        memory[:] = 255
        batch = layout.arrays(memory, num_samples)
        for number, array in enumerate(batch.everything):
            array[...] = np.arange(array.size).reshape(array.shape) + number
        whole = map_pool(pool.path, pool.num_bytes)
        places = layout.tensor_places(pool.offset_bytes(1), num_samples)
        assert list(batch.context) == list(places.context) == ["lengths", "positions"]
        for place, array in zip(places.everything, batch.everything, strict=True):
            seen = np.frombuffer(whole, place.dtype, count=array.size, offset=place.offset_bytes).reshape(place.shape)
            assert np.array_equal(seen, array)
            assert place.offset_bytes % 64 == 0
