"""The plain loop alone: what `shoal trainer --run-locally --trainer-id -1` does. One process, no swarm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import anyio
import anyio.to_thread
from rich.console import Console

from shoal.checkpoint.start_weights import StartWeights
from shoal.cli.cuts import has_cut, is_settled, profiled_device, with_cut, with_known_cut, with_weights
from shoal.cli.display import print_event
from shoal.cli.exits import DONE
from shoal.cli.model import costs_on_device_thread
from shoal.clock import SystemClock
from shoal.config import Config
from shoal.data.catalog import open_source, opening_of
from shoal.data.feed import Feed
from shoal.data.server import DataService
from shoal.ids import PeerId
from shoal.model.partition import counts_by_cost
from shoal.pipeline.torch_device import device_initialiser
from shoal.runtime.device_thread import DeviceThread
from shoal.server.cost_cache import CostCache
from shoal.trainer.baseline import PlainLoop
from shoal.trainer.baseline_run import BaselineReport, run_baseline
from shoal.transport.dispatch import dispatch
from shoal.transport.memory import MemoryNetwork


def run_baseline_locally(config: Config) -> int:
    """Train the configuration in this process and print its losses as it goes.

    Raises:
        ConfigError: the data set or the model does not fit the configuration, or there is no such device.
    """
    console = Console()

    def report(now: BaselineReport) -> None:
        if now.eval_loss is None:
            return
        trained = f"  loss/baseline {now.loss:.3f}  {now.samples_per_s:.0f} samples/s" if now.loss is not None else ""
        console.print(f"step {now.step}/{config.diloco.total_steps}  eval loss {now.eval_loss:.3f}{trained}")

    train_baseline(config, report)
    return DONE


def train_baseline(config: Config, report: Callable[[BaselineReport], None]) -> PlainLoop:
    """Train the configuration in this process and return the loop with the trained model.

    Args:
        report: called after every step and evaluation.

    Raises:
        ConfigError: as `run_baseline_locally`.
    """
    return anyio.run(partial(_run, _settled(config), report), backend_options={"use_uvloop": True})


def _settled(config: Config) -> Config:
    """Cut the model where a run on this machine does, since random draws belong to a stage, and find its weights."""
    config = with_known_cut(config)
    if is_settled(config):
        return config
    found = costs_on_device_thread(config, measure=not config.run.deterministic, cache=CostCache.of_user())
    if config.lacks_weights:
        config = with_weights(config, StartWeights(config).digests())
    if has_cut(config):
        return config
    return with_cut(config, counts_by_cost(found.costs, config.num_stages, is_tied=found.is_tied))


async def _run(config: Config, report: Callable[[BaselineReport], None]) -> PlainLoop:
    device_name = profiled_device(config)
    network = MemoryNetwork(encode=False)
    server, trainer = (network.endpoint(PeerId(name)) for name in ("data_server", "baseline"))
    dataset = await anyio.to_thread.run_sync(open_source, config, print_event, abandon_on_cancel=True)
    service = DataService(
        endpoint=server,
        dataset=dataset,
        samples_per_step=config.diloco.samples_per_step,
        seed=config.run.seed,
        deterministic=config.run.deterministic,
        num_workers=config.data.num_workers,
        opening=opening_of(config, dataset.windows),
        client=None,
    )
    feed = Feed(endpoint=trainer, data_server=server.hop, trainer=-1, generation=1)
    trained: list[PlainLoop] = []

    try:
        async with (
            DeviceThread(device_initialiser(device_name, config.servers.threads[0])) as device,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(service.run)
            tasks.start_soon(dispatch, server, (service,))
            tasks.start_soon(dispatch, trainer, (feed,))
            trained.append(await run_baseline(config, feed, device, device_name, SystemClock(), report))
            tasks.cancel_scope.cancel()
        return trained[0]
    finally:
        service.close()
        if dataset.windows is not None:
            dataset.windows.close()
