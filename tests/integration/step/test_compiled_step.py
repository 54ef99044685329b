"""A pipeline of compiled stages trains the bits of a plain loop of compiled stages, whatever the schedule."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.families import gpt, resnet, tied_gpt

from shoal.config.diloco import InnerOptimConfig
from shoal.model.compiled import compile_stage
from shoal.model.stage import StageModule, build_stage
from shoal.swarm.step_operations import Schedule
from shoal.trainer.baseline import PlainLoop

from .test_equality_step import SCHEDULE, SEED, assert_same_state, image_batches, text_batches

MakeSwarm = Callable[..., Any]
NUM_STAGES = 2
NUM_STEPS = 4

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler"),
]


@pytest.mark.parametrize("case", ["gpt", "tied", "resnet"])
async def test_compiled_stages_are_bit_equal_to_a_plain_loop_of_them(
    make_swarm: MakeSwarm, user_caches: Path, case: str
) -> None:
    # Microbatches of 3 are compiled, those of 2 and 1 are not.
    family = {"gpt": gpt, "tied": tied_gpt, "resnet": resnet}[case]()
    batches = (image_batches((3, 2, 3)) if case == "resnet" else text_batches((3, 2, 3, 1)))[:NUM_STEPS]

    def prepare(module: StageModule) -> None:
        compile_stage(module, {3}, user_caches / "compiled")

    def loop(*, compiled: bool) -> PlainLoop:
        stages = [build_stage(family, s, NUM_STAGES, seed=SEED) for s in range(NUM_STAGES)]
        for stage in stages if compiled else ():
            prepare(stage)
        return PlainLoop(stages, InnerOptimConfig(), 0.5, SEED, 0)

    plain, uncompiled = loop(compiled=True), loop(compiled=False)
    usual = [uncompiled.step(batch, n, SCHEDULE.lr(n)) for n, batch in enumerate(batches)]
    expected = [plain.step(batch, n, SCHEDULE.lr(n)) for n, batch in enumerate(batches)]
    assert expected != usual, "compiled code computes other bits: it was used"
    for schedule in (Schedule.ONE_F_ONE_B, Schedule.GPIPE):
        for checkpointing in (False, True):
            options = {"schedule": schedule, "activation_checkpointing": checkpointing, "prepare": prepare}
            async with make_swarm(family, NUM_STAGES, seed=SEED, max_grad_norm=0.5, **options) as swarm:
                results = [await swarm.train(batch, n, SCHEDULE.lr(n)) for n, batch in enumerate(batches)]
                assert [(each.loss, each.grad_norm) for each in results] == expected
                for stage, [replica] in zip(plain.stages, swarm.replicas, strict=True):
                    assert_same_state(stage, replica.compute.module)
