"""The frames between processes of one host."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import LocalProtocolError
from shoal.runtime import frames
from shoal.runtime.fork_messages import Configure, Exited, ForkRole, Reply, Request
from shoal.runtime.frames import FrameReader, framed
from shoal.runtime.role_spec import RestartPolicy, RoleSpec

_REQUESTS = [
    Configure(["json"], 1.5),
    ForkRole(1, RoleSpec("server", 2, "a.b:c", b"\x00secret", RestartPolicy(3))),
    ForkRole(2, RoleSpec("trainer", 0, "a.b:d", output_path="/tmp/trainer_0.out")),
]


@given(cuts=st.lists(st.integers(0, 200), max_size=8))
def test_messages_arrive_whole_however_the_stream_is_cut(cuts: list[int]) -> None:
    stream = b"".join(map(framed, _REQUESTS))
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    reader: FrameReader[Request] = FrameReader(Request)
    found: list[Request] = []
    for start, end in pairwise(edges):
        found += reader.feed(stream[start:end])
    assert found == _REQUESTS


def test_a_reply_is_not_taken_for_a_request() -> None:
    frame = framed(Exited(1, -9))
    assert FrameReader[Reply](Reply).feed(frame) == [Exited(1, -9)]
    with pytest.raises(msgspec.ValidationError):
        FrameReader[Request](Request).feed(frame)


def test_a_payload_beyond_the_limit_is_refused_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "_MAX_BODY_BYTES", 100)
    with pytest.raises(LocalProtocolError, match="at most 100"):
        framed(Configure(["x" * 100], 0.0))
