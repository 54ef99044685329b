"""Augmentation: what becomes of an image, of what that is a function, and what stays as it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from shoal.config import Config
from shoal.config.training import AugmentConfig
from shoal.data.augmentation import Augmentation, _mixed
from shoal.data.catalog import open_source
from shoal.data.preparation import Content, prepare
from shoal.data.source import Array, DataSet
from shoal.errors import ConfigError
from shoal.swarm.sample_ranges import Ranges
from shoal.wire.messages.base import SampleRange

BOTH = {"crop_padding": 2, "horizontal_flip": True}


def augmented(augment: dict[str, Any], passes: list[int], indices: list[int], seed: int = 3) -> Array:
    """Return images (n, 2, 5, 7) of the same numbered pixels."""
    images = np.tile(np.arange(70, dtype=np.float32).reshape(1, 2, 5, 7), (len(indices), 1, 1, 1))
    change = Augmentation(AugmentConfig(**augment), seed, (2, 5, 7), "numbers")
    change.apply(images, np.array(indices), np.array(passes))
    return images


def digits(augment: dict[str, Any] | None, **run: Any) -> DataSet:
    data = {"dataset_name": "digits", "task_type": "cv", "img_size": 8, "num_channels": 1, "augment": augment or {}}
    return open_source(Config.model_validate({"data": data, "model": {"family": "mlp"}, "run": run}))


def prepared(dataset: DataSet, samples: Ranges, indices: list[int], *, is_holdout: bool = False) -> Array:
    batch = dataset.fields.each(lambda spec: spec.empty(len(indices)))
    prepare(dataset, Content(samples, is_holdout), np.array(indices), batch)
    return batch.inputs


def test_an_image_is_moved_within_its_mirror_images_and_perhaps_mirrored() -> None:
    number = 4000
    images = augmented(BOTH, [0] * number, list(range(number)))
    original = augmented({}, [0], [0])[0]
    padded = np.pad(original, ((0, 0), (2, 2), (2, 2)), mode="reflect")
    windows = {
        (row, column, flip): window[..., ::-1] if flip else window
        for row in range(5)
        for column in range(5)
        for flip in (False, True)
        for window in [padded[:, row : row + 5, column : column + 7]]
    }
    counts = {key: int((images == window).all(axis=(1, 2, 3)).sum()) for key, window in windows.items()}
    assert sum(counts.values()) == number, "each is one of them"
    # 80 of each are expected; binomial, so six standard deviations are 53.
    assert all(27 <= count <= 133 for count in counts.values())


def test_what_is_not_wanted_is_not_done() -> None:
    original = augmented({}, [0], [0])[0]
    moved = augmented({"crop_padding": 1}, [0] * 50, list(range(50)))
    assert {tuple(np.sign(np.diff(image[0, 2, 1:-1])).tolist()) for image in moved} == {(1.0,) * 4}
    flipped = augmented({"horizontal_flip": True}, [0] * 50, list(range(50)))
    assert {image.tobytes() for image in flipped} == {original.tobytes(), original[..., ::-1].tobytes()}


def test_it_follows_from_seed_pass_and_sample_and_nothing_else() -> None:
    together = augmented(BOTH, [0, 0, 5, 5, 0], [7, 8, 7, 9, 1000])
    for place, (number, index) in enumerate([(0, 7), (0, 8), (5, 7), (5, 9), (0, 1000)]):
        assert np.array_equal(augmented(BOTH, [number], [index])[0], together[place])
    many = list(range(200))
    first = augmented(BOTH, [0] * 200, many)
    for other in (augmented(BOTH, [1] * 200, many), augmented(BOTH, [0] * 200, many, seed=4)):
        same = int((first == other).all(axis=(1, 2, 3)).sum())
        # Of 50 forms each one has; binomial, 4 are expected.
        assert same <= 16


def test_it_is_the_same_in_every_version() -> None:
    pixels = augmented(BOTH, [0, 0, 1, 2**40], [0, 1, 0, 10**9], seed=0)
    assert pixels[:, 0, 0, 0].tolist() == [6.0, 7.0, 5.0, 15.0]


def test_its_numbers_are_those_of_splitmix64() -> None:
    # Of the generator's first numbers from 1234567 on, as other programs have them.
    states = np.uint64(1234567) + np.arange(1, 6, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert _mixed(states).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_batches_are_changed_by_their_pass_and_held_out_samples_never() -> None:
    plain, changed = digits(None), digits(BOTH, seed=5)
    indices = [3, 9, 27, 4]
    two_passes = (SampleRange(0, 10, 12), SampleRange(1, 0, 2))
    images = prepared(changed, two_passes, indices)
    expected = prepared(plain, two_passes, indices)
    Augmentation(AugmentConfig(**BOTH), 5, (1, 8, 8), "digits").apply(
        expected, np.array(indices), np.array([0, 0, 1, 1])
    )
    assert np.array_equal(images, expected)
    assert not np.array_equal(images, prepared(plain, two_passes, indices))
    held_out = (SampleRange(0, 0, 50),)
    every = list(range(50))
    before = prepared(plain, held_out, every, is_holdout=True)
    assert np.array_equal(prepared(changed, held_out, every, is_holdout=True), before)
    assert np.array_equal(changed.holdout.read(np.array(every)).inputs, before)


@pytest.mark.parametrize("padding", [8, 20])
def test_a_padding_as_large_as_the_image_is_refused(padding: int) -> None:
    with pytest.raises(ConfigError, match=rf"data\.augment\.crop_padding = {padding}: images of .* 8 x 8 pixels"):
        digits({"crop_padding": padding})


def test_what_is_no_image_is_not_changed() -> None:
    with pytest.raises(ConfigError, match=r"data\.augment changes images .* samples of \[5\]"):
        Augmentation(AugmentConfig(horizontal_flip=True), 0, (5,), "numbers")
    with pytest.raises(ValidationError, match=r"data\.augment: changes images, and data\.task_type is llm"):
        Config.model_validate({"data": {"augment": {"horizontal_flip": True}}})
