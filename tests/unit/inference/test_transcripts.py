"""Greedy decoding of clips, and how many of their characters are wrong."""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from shoal.config import Config
from shoal.data.catalog import open_source
from shoal.inference.evaluation import Transcribed, edit_distance, transcribed
from shoal.model.stage import StageModule


@pytest.mark.parametrize(
    ("one", "other", "edits"),
    [("", "", 0), ("abc", "abc", 0), ("abc", "", 3), ("", "ab", 2), ("kitten", "sitting", 3), ("ab", "ba", 2)],
)
def test_edits_are_the_fewest_that_make_one_text_the_other(one: str, other: str, edits: int) -> None:
    assert edit_distance(one, other) == edit_distance(other, one) == edits


def test_the_error_rate_is_of_all_characters_and_may_be_more_than_one() -> None:
    assert Transcribed([("abcd", "abcd"), ("ab", "xyz")]).character_error_rate == 0.5
    assert Transcribed([("a", "bcd")]).character_error_rate == 3


class _Hears(nn.Module):
    """Puts out the labels of the clips that it is given: each character in two frames, a blank behind, padding last."""

    def __init__(self, labels: dict[int, list[int]], frames: int) -> None:
        super().__init__()
        self.anything = nn.Parameter(torch.zeros(()))
        self._labels = labels
        self._frames = frames

    def forward(self, inputs_BT: Tensor, lengths_B: Tensor) -> Tensor:
        logits_BLV = torch.full((len(inputs_BT), self._frames, 10), -30_000.0)
        for clip, length in zip(logits_BLV, lengths_B.tolist(), strict=True):
            best = [number for label in self._labels[length] for number in (label, label, 0)]
            clip[range(len(best)), best] = 5.0
        return logits_BLV


def test_decoding_takes_the_best_of_each_frame_repeats_once_and_neither_blanks_nor_padding() -> None:
    data = {"task_type": "speech", "dataset_name": "tones", "sampling_rate": 1000, "max_audio_s": 0.5}
    config = Config.model_validate({"data": {**data, "max_characters": 8}, "model": {"family": "wav2vec2"}})
    holdout = open_source(config).holdout
    samples = [holdout.sample(index) for index in range(holdout.num_samples)]
    # Clips of one length are heard alike: as the last of them.
    labels = {int(each.context["lengths"]): [n for n in each.labels.tolist() if n > 0] for each in samples}
    heard = transcribed(cast("StageModule", _Hears(labels, 24)), holdout, "abcdefgh")
    assert len(heard.pairs) == holdout.num_samples
    for sample, (said, decoded) in zip(samples, heard.pairs, strict=True):
        assert said == "".join("abcdefgh"[number - 1] for number in sample.labels.tolist() if number > 0)
        wanted = labels[int(sample.context["lengths"])]
        assert decoded == "".join("abcdefgh"[number - 1] for number in wanted)
    assert any(one == two for said, _ in heard.pairs for one, two in pairwise(said))
