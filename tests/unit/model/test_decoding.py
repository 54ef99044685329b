"""Decoding with kept keys is the forward pass, and a row's bits do not depend on what is computed beside it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from shoal.config import Config
from shoal.errors import LocalProtocolError
from shoal.model.decoding import BLOCK_TOKENS, Span, StageDecoder
from shoal.model.gpt import GptFamily, GptShape
from shoal.model.registry import load_family
from shoal.model.stage import StageModule, build_stage

CONTEXT = 3 * BLOCK_TOKENS
FAMILY = GptFamily(GptShape(seq_len=CONTEXT, width=32, num_layers=2, num_heads=4))
TOKENS = torch.randint(256, (4, CONTEXT), generator=torch.Generator().manual_seed(7))
RESNET = Config.model_validate({"model": {"family": "resnet18"}, "data": {"dataset_name": "digits", "task_type": "cv"}})
BLOCKS = tuple(tuple(range(3 * each, 3 * each + 3))[::-1] for each in range(4))
"""Of each sequence; not in the order of memory."""


def stages(dtype: torch.dtype, num_stages: int = 1) -> list[StageModule]:
    return [build_stage(FAMILY, stage, num_stages, seed=1, dtype=dtype).eval() for stage in range(num_stages)]


def decode(decoders: list[StageDecoder], parts: list[tuple[int, int, int]]) -> Tensor:
    """The logits after parts of sequences, (sequence, from, to), in one packed batch."""
    spans: list[Span] = []
    start = 0
    for sequence, first, last in parts:
        spans.append(Span(start, last - first, first, BLOCKS[sequence]))
        start += last - first
    rows = torch.cat([TOKENS[sequence, first:last] for sequence, first, last in parts])
    for decoder in decoders:
        rows = decoder.decode(rows, spans)
    return rows


def test_token_after_token_gives_the_logits_of_the_forward_pass() -> None:
    module = stages(torch.float64)[0]
    with torch.no_grad():
        expected = module(TOKENS[:1])[0]
    decoders = [StageDecoder(each, 12) for each in stages(torch.float64, 2)]
    first = decode(decoders, [(0, 0, 5)])
    found = [decode(decoders, [(0, at, at + 1)])[0] for at in range(5, CONTEXT)]
    torch.testing.assert_close(torch.stack([first[0], *found]), expected[4:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("end", [1, 3, BLOCK_TOKENS, BLOCK_TOKENS + 1, 150, CONTEXT])
def test_a_prompt_in_pieces_beside_others_gives_the_bits_of_the_prompt_alone(end: int) -> None:
    module = stages(torch.float32)[0]
    alone = decode([StageDecoder(module, 12)], [(2, 0, end)])[0]
    decoder = StageDecoder(module, 12)
    cuts = sorted({0, 1, end // 3, end // 2, end - 1, end} - {end + 1})
    found = alone
    for first, last in itertools.pairwise(cuts):
        others = [(0, first, last), (2, first, last), (3, first, first + 1)]
        found = decode([decoder], others)[1]
    assert torch.equal(found, alone)
    # As a replica that takes over computes it: all at once, or but for the last token.
    token_by_token = StageDecoder(module, 12)
    for at in range(end):
        found = decode([token_by_token], [(2, at, at + 1)])[0]
    assert torch.equal(found, alone)


def test_a_block_that_another_sequence_has_left_changes_nothing() -> None:
    module = stages(torch.float32)[0]
    alone = decode([StageDecoder(module, 12)], [(1, 0, 40)])[0]
    used = StageDecoder(module, 12)
    decode([used], [(1, 60, CONTEXT), (2, 0, CONTEXT)])
    assert torch.equal(decode([used], [(1, 0, 40)])[0], alone)


def test_a_family_that_does_not_generate_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="does not generate"):
        StageDecoder(build_stage(load_family(RESNET.model, RESNET.data), 0, 1, seed=1), 1)
