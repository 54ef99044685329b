"""Trains a configuration as a plain loop in this process, fed by a data server like any trainer.

It reads the stream of training batches in order, without leases: the very batches that the one trainer of an
undisturbed swarm would get.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from shoal.clock import Clock
from shoal.codec.raw import from_wire
from shoal.config.schema import Config
from shoal.data.feed import Feed
from shoal.data.microbatch import Microbatch
from shoal.model.meta import trained_names, units_of
from shoal.model.registry import load_family
from shoal.optim.inner import require_matches
from shoal.optim.schedule import LrSchedule
from shoal.pipeline.configured_stage import configured_stage
from shoal.quant.coverage import require_quantisable
from shoal.runtime.device_thread import DeviceThread
from shoal.trainer.baseline import PlainLoop


@dataclass(frozen=True, slots=True)
class BaselineReport:
    """Where the loop stands after a step or an evaluation.

    Attributes:
        loss: mean training loss of the last step, in nats; None before the first.
        eval_loss: mean held-out loss, in nats; None: it was not measured now.
        samples_per_s: over all steps so far.
    """

    step: int
    samples: int
    loss: float | None
    eval_loss: float | None
    samples_per_s: float


async def run_baseline(
    config: Config,
    feed: Feed,
    device: DeviceThread,
    device_name: str,
    clock: Clock,
    report: Callable[[BaselineReport], None],
) -> PlainLoop:
    """Train `outer_steps * inner_steps` steps. Evaluate where the swarm does, before the first and after the last.

    Args:
        feed: the endpoint's events are dispatched to it.
        device_name: as torch names it.
        report: called after every step and evaluation.

    Returns:
        The loop with the trained model.

    Raises:
        ConfigError: the model does not fit the configuration, or there is no such device.
        ConnectionLost: the data server is gone.
    """
    sizes = await feed.hello()
    loop = await device.run(_build, config, device_name)
    schedule = LrSchedule.from_config(config.diloco)
    samples, training_s = 0, 0.0
    loss: float | None = None

    def report_now(step: int, eval_loss: float | None) -> None:
        rate = samples / training_s if training_s else 0.0
        report(BaselineReport(step, samples, loss, eval_loss, rate))

    for step in range(config.diloco.total_steps):
        base_round, begun = divmod(step, config.diloco.inner_steps)
        if not begun and config.run.evaluates(base_round, config.diloco.outer_steps):
            report_now(step, await _evaluate(loop, feed, device, sizes.num_holdout))
        batch = await feed.read_train(step)
        begun_s = clock.now_s()
        loss, _ = await device.run(loop.step, _tensors(batch.microbatches(config)), step, schedule.lr(step))
        training_s += clock.now_s() - begun_s
        samples += batch.num_samples
        feed.give_back(batch)
        report_now(step + 1, None)
    report_now(config.diloco.total_steps, await _evaluate(loop, feed, device, sizes.num_holdout))
    return loop


async def _evaluate(loop: PlainLoop, feed: Feed, device: DeviceThread, num_holdout: int) -> float:
    loss_sum, num_targets = 0.0, 0
    async for batch in feed.holdout(0, num_holdout):
        part_sum, part_targets = await device.run(loop.evaluate, _tensors(batch.eval_parts()))
        loss_sum, num_targets = loss_sum + part_sum, num_targets + part_targets
    return loss_sum / max(1, num_targets)


def _build(config: Config, device_name: str) -> PlainLoop:
    family = load_family(config.model, config.data)
    require_quantisable(config.quant, units_of(config))
    require_matches(config.diloco.inner_optim, trained_names(config))
    stages = [configured_stage(config, family, stage, device_name) for stage in range(config.num_stages)]
    return PlainLoop(
        stages, config.diloco.inner_optim, config.diloco.max_grad_norm, run_seed=config.run.seed, trainer=0
    )


def _tensors(parts: list[Microbatch]) -> list[tuple[Tensor, ...]]:
    return [tuple(map(from_wire, part.fields.everything)) for part in parts]
