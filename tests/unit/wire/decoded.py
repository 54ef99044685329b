"""What the tests of frames share: bytes as a connection would hand them to the decoder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shoal.wire.frame import Frame
from shoal.wire.frame_decoder import FrameDecoder


def decoded(decoder: FrameDecoder, raw: bytes | bytearray | memoryview, pieces: Iterable[int] = ()) -> Iterator[Frame]:
    """Hand `raw` to the decoder in pieces of the given sizes, the rest in pieces as large as it takes.

    Yields:
        each frame, before the next bytes are handed over.
    """
    sizes, rest = iter(pieces), memoryview(raw)
    while rest:
        space = decoder.get_buffer()
        assert len(space) > 0
        num_bytes = min(next(sizes, len(space)), len(space), len(rest))
        space[:num_bytes] = rest[:num_bytes]
        rest = rest[num_bytes:]
        yield from decoder.advance(num_bytes)
