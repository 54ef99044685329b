"""The decoders of payloads (`codec/payload.py`): what the members of a round send each other."""

from __future__ import annotations

import struct
from random import Random
from typing import Final

import torch

from shoal.codec.registry import CodecSettings, codec_of
from shoal.errors import InvariantViolation, RemoteProtocolError
from shoal_lab.fuzz.mutation import changed_bytes
from shoal_lab.fuzz.parser import Parser

_LENGTHS: Final = (0, 1, 7, 255, 256, 300, 4096, 4200, 9000)
_DENSITIES: Final = (1 / 4096, 1 / 64, 1 / 16, 1.0)
"""Of the sparse codec: each has gaps of another width."""
_HEADER_BYTES: Final = 16
_FRONT: Final = struct.Struct("<HB")
"""What the receiver knows by itself, in front of every input: how many elements, and which density."""


class PayloadParser(Parser):
    """Payloads of one codec: mostly with the right header, because nothing behind another one is read."""

    def __init__(self, codec: str, seed: int) -> None:
        super().__init__(seed)
        self.name = f"payload_{codec}"
        densities = _DENSITIES if codec == "sparse" else (1.0,)
        self._codecs = [codec_of(CodecSettings(codec, density=density)) for density in densities]
        self._valid = [
            (_FRONT.pack(length, place), self._payload(length, place))
            for length in _LENGTHS
            for place in range(len(densities))
        ]

    def make(self, random: Random) -> bytes:
        front, payload = random.choice(self._valid)
        _, other = random.choice(self._valid)
        if random.random() < 0.2:
            return front + changed_bytes(payload, random, other)
        header, content = payload[:_HEADER_BYTES], bytearray(payload[_HEADER_BYTES:])
        if random.random() < 0.6:
            return front + header + changed_bytes(bytes(content), random, other)
        # Of the right size, so that all of it is read.
        for _ in range(random.choice((1, 2, 8))):
            if content:
                start = random.randrange(len(content))
                width = min(len(content) - start, random.choice((1, 2, 40)))
                content[start : start + width] = random.choice((bytes(width), b"\xff" * width, random.randbytes(width)))
        return front + header + content

    def feed(self, data: bytes, random: Random) -> bool:
        length, place = (int(number) for number in _FRONT.unpack_from(data))
        codec = self._codecs[place]
        payload = torch.tensor(list(data[_FRONT.size :]), dtype=torch.uint8)
        out_N = torch.full((length,), float("nan"))
        try:
            codec.decode((payload,), out_N)
            is_sent_N = codec.sent((payload,), length)
        except RemoteProtocolError:
            return False
        if not out_N.isfinite().all():
            raise InvariantViolation(f"a payload of {self.name} was taken with values that are no numbers")
        if is_sent_N is not None and out_N[~is_sent_N].any():
            raise InvariantViolation(f"a payload of {self.name} has values where it sends none")
        return True

    def _payload(self, length: int, place: int) -> bytes:
        values = torch.tensor([self._random.gauss(0, 1) for _ in range(length)])
        [payload] = self._codecs[place].encode(values).tensors
        return bytes(payload.numpy())
