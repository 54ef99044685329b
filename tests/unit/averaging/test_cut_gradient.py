"""A pseudo-gradient that is encoded in pieces is what it would be at once."""

from __future__ import annotations

import pytest
import torch
from tests.threads import one_thread as one_thread
from tests.unit.averaging.conftest import FakeStage

from shoal.averaging import cut_gradient
from shoal.averaging.cut_gradient import Brought, bring_in_pieces
from shoal.averaging.gathered import payload_of
from shoal.averaging.replica_state import ReplicaState
from shoal.codec.gathered import GatheredCodec
from shoal.codec.registry import CodecSettings, codec_of
from shoal.optim.fragments import Fragment
from shoal.optim.merge import Merge
from shoal.optim.outer import OuterSgd

OUTER = OuterSgd(0.5)
N = 3 * (1 << 18) + 100


def gathered(name: str) -> GatheredCodec:
    codec = codec_of(CodecSettings(name, 0.95))
    assert isinstance(codec, GatheredCodec)
    return codec


def bring(
    codec: GatheredCodec, fragment: Fragment, base: torch.Tensor, cut: torch.Tensor, residual: torch.Tensor
) -> tuple[int, float, Brought | None]:
    """The number of its pieces, and what they come to."""
    pieces, count = bring_in_pieces(codec, fragment, base, cut, (residual,)), 0
    while True:
        try:
            next(pieces)
        except StopIteration as done:
            return (count, *done.value)
        count += 1


@pytest.mark.parametrize("codec", ["int8", "int4", "2bit", "sparse"])
@pytest.mark.parametrize("fragment", [Fragment(), Fragment(1, 3)], ids=["all", "a third"])
def test_pieces_come_to_the_bytes_that_encoding_at_once_gives(
    codec: str, fragment: Fragment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut_gradient, "PIECE_BYTES", 1 << 18)
    generator = torch.Generator().manual_seed(1)
    base, cut, residual = (torch.randn(N, generator=generator) for _ in range(3))
    before = [each.clone() for each in (base, cut, residual)]
    count, norm, brought = bring(gathered(codec), fragment, base, cut, residual)
    assert brought is not None
    values = fragment.take(base) - fragment.take(cut)
    [payload], [left] = gathered(codec).encode(values, (fragment.take(residual),))
    assert torch.equal(brought.payload_P, payload)
    assert torch.equal(brought.residual[0], left)
    assert norm == pytest.approx(values.double().norm().item(), rel=1e-12)
    assert count > 10
    assert all(map(torch.equal, before, (base, cut, residual)))
    assert brought.announced == payload_of(payload)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_parameters_that_are_not_finite_are_found_in_any_fragment(wrong: float) -> None:
    base, cut = torch.zeros(N), torch.zeros(N)
    cut[5000] = wrong  # of the second fragment
    _, norm, brought = bring(gathered("int8"), Fragment(0, 3), base, cut, torch.zeros(N))
    assert norm != norm
    assert brought is None


def test_a_swap_ends_what_is_being_encoded_and_forgets_the_cut() -> None:
    stage = FakeStage(2 * N)
    state = ReplicaState(stage, OUTER, gathered("int8"), merge=Merge.CARRY)
    assert state.encode_some(), "there is no cut"
    stage.cut = stage.parameters - 1
    assert not state.encode_some()
    state.restore()
    assert stage.cut is None
    assert state.encode_some()
    assert state.brought_payload is None
    # The next round brings what is cut then.
    stage.cut = stage.parameters - 2
    norm, _ = state.brought()
    assert norm == pytest.approx(2 * (2 * N) ** 0.5)


def test_what_is_trained_behind_the_cut_does_not_change_what_is_brought() -> None:
    brought = []
    for further in (0.0, 3.0):
        stage = FakeStage(2 * N)
        state = ReplicaState(stage, OUTER, gathered("int8"), merge=Merge.CARRY)
        stage.parameters -= 0.5
        stage.cut = stage.parameters.clone()
        while not state.encode_some():
            stage.parameters -= further
        stage.parameters -= further
        brought.append(state.brought())
    assert brought[0] == brought[1]
    assert brought[0][1] is not None


@pytest.mark.parametrize("what", ["floats", "parameters"])
@pytest.mark.parametrize("merge", list(Merge))
def test_what_is_not_finite_at_the_join_does_not_count_and_is_not_kept_though_the_cut_was_finite(
    what: str, merge: Merge
) -> None:
    stage = FakeStage(N)
    state = ReplicaState(stage, OUTER, gathered("int8"), merge=merge)
    stage.cut = stage.parameters - 1
    while not state.encode_some():
        pass
    getattr(stage, what)[1] = float("nan")
    norm, payload = state.brought()
    assert norm != norm
    assert payload is None
    state.swap(state.hashes, keeps_rest=True)
    assert getattr(stage, what).isfinite().all()
