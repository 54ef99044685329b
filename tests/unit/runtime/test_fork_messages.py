"""The frames between supervisor and fork server."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import LocalProtocolError
from shoal.runtime import fork_messages
from shoal.runtime.fork_messages import Configure, Exited, ForkRole, FrameBuffer

_REQUESTS = [
    Configure(["json"]),
    ForkRole(1, "server", 2, "a.b:c", b"\x00secret", ""),
    ForkRole(2, "trainer", 0, "a.b:d", b"", "/tmp/trainer_0.out"),
]


@given(cuts=st.lists(st.integers(0, 200), max_size=8))
def test_requests_arrive_whole_however_the_stream_is_cut(cuts: list[int]) -> None:
    stream = b"".join(fork_messages.encode(request) for request in _REQUESTS)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    frames = FrameBuffer()
    bodies: list[bytes] = []
    for start, end in pairwise(edges):
        bodies += frames.feed(stream[start:end])
    assert [fork_messages.decode_request(body) for body in bodies] == _REQUESTS


def test_a_reply_is_not_taken_for_a_request() -> None:
    (body,) = FrameBuffer().feed(fork_messages.encode(Exited(1, -9)))
    assert fork_messages.decode_reply(body) == Exited(1, -9)
    with pytest.raises(msgspec.ValidationError):
        fork_messages.decode_request(body)


def test_a_payload_beyond_the_limit_is_refused_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_messages, "_MAX_BODY_BYTES", 100)
    with pytest.raises(LocalProtocolError, match="at most 100"):
        fork_messages.encode(Configure(["x" * 100]))
