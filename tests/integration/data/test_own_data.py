"""Data of a user's own through the data server and its workers: the same batches by whomever, also with bad samples."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from tests.integration.data.test_data_workers import all_batches
from tests.unit.data.host import host
from tests.unit.data.own_sets import Pictures

from shoal.config import Config
from shoal.data.catalog import open_source, opening_of
from shoal.errors import SampleError
from shoal.events.base import Event
from shoal.events.data import SamplesSkipped
from shoal.wire.messages.base import StepRange
from shoal.wire.messages.feed import PlanRound


def pictures(data: dict[str, Any], num_classes: int = 4) -> Config:
    name = f"{Pictures.__module__}:Pictures"
    values = {"dataset_name": name, "task_type": "cv", "num_channels": 1, "img_size": 4, "eval_split": "test", **data}
    return Config.model_validate({"data": values, "model": {"family": "mlp", "num_classes": num_classes}})


@pytest.mark.parametrize("window", [None, 16])
async def test_batches_of_own_data_with_bad_samples_are_the_same_with_no_one_and_three_workers(
    window: int | None,
) -> None:
    arguments = {"count": 50, "bad": [3, 4, 21]}
    config = pictures({"arguments": arguments, "max_bad_fraction": 0.06, "shuffle_window": window})
    runs: list[list[bytes]] = []
    for num_workers in (0, 1, 3):
        said: list[Event] = []
        dataset = open_source(config, said.append)
        async with host(batch=7, seed=5, dataset=dataset, num_workers=num_workers, opening=opening_of(config)) as at:
            runs.append(await all_batches(at))
        assert dataset.skipped is not None
        # Of what is held out, too: samples 3 to 19 are read.
        numbers = {each.which.partition("[")[2] for each in dataset.skipped.take_new()}
        assert numbers == {"3]", "4]", "21]"}
        assert [event.skipped for event in said if isinstance(event, SamplesSkipped)] == [1, 2, 4]
    assert runs[0] == runs[1] == runs[2]


async def test_augmented_batches_are_the_same_with_no_one_and_three_workers_and_held_out_ones_as_without() -> None:
    runs: list[list[bytes]] = []
    changes = {"crop_padding": 2, "horizontal_flip": True}
    for num_workers, augment in ((0, {}), (0, changes), (1, changes), (3, changes)):
        data = {"dataset_name": "digits", "img_size": 8, "eval_split": None, "augment": augment}
        # 54 are left to train on, so that there are two passes.
        config = pictures({**data, "holdout_fraction": 0.97}, num_classes=10)
        dataset, opening = open_source(config), opening_of(config)
        async with host(batch=7, seed=5, dataset=dataset, num_workers=num_workers, opening=opening) as at:
            runs.append(await all_batches(at))
    plain, *changed = runs
    assert changed[0] == changed[1] == changed[2]
    assert all(one != other for one, other in zip(plain[:-1], changed[0][:-1], strict=True))
    assert plain[-1] == changed[0][-1]


@pytest.mark.parametrize("num_workers", [0, 2])
async def test_more_bad_samples_than_allowed_end_the_data_server_whoever_meets_them(num_workers: int) -> None:
    config = pictures({"arguments": {"count": 50, "bad": list(range(0, 50, 10))}, "max_bad_fraction": 0.03})
    dataset = open_source(config)

    async def train_a_pass() -> None:
        async with host(batch=10, dataset=dataset, num_workers=num_workers, opening=opening_of(config)) as at:
            feed = at.trainer(0)
            at.tell(PlanRound(1, 1, StepRange(0, 6)))
            for step in range(5):
                await feed.lease(1, step)
            await anyio.sleep_forever()

    with pytest.raises(ExceptionGroup) as caught:
        await train_a_pass()
    # Two may meet one each at the same time.
    assert caught.group_contains(SampleError, match=r"[45] of 100 samples .* more than data\.max_bad_fraction = 0\.03")
