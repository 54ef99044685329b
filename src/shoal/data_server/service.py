"""The role's entry: opens the data set, listens on a Unix socket, serves until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio

from shoal.clock import SystemClock
from shoal.config.schema import Config
from shoal.control.counter_report import counters_reported
from shoal.control.role_start import DataServerSpec, open_role_endpoint
from shoal.data.catalog import open_source, opening_of
from shoal.data.server import DataService
from shoal.data.source import DataSet
from shoal.data.text_corpus import Say
from shoal.data_server.fitting import require_taken
from shoal.data_server.opening import OpeningProgress
from shoal.errors import ConfigError
from shoal.events.base import Event, emit, tell
from shoal.events.data import DatasetOpened, TokensProgress
from shoal.pipeline.role_hooks import role_hooks
from shoal.runtime.control_pipe import RoleControl
from shoal.runtime.launcher_messages import RoleDoes, RoleReady
from shoal.transport.dispatch import dispatch
from shoal.wire.messages.base import Hop

logger = logging.getLogger(__name__)


async def main(spec: bytes, control: RoleControl) -> None:
    """Run a data server.

    Args:
        control: is told `RoleReady` once batches can be asked for.

    Raises:
        ConfigError: the data set cannot be opened, or the model does not take its samples.
    """
    start = DataServerSpec.begun(spec)
    await control.until_stopped(_serve, start, start.config(), control)


async def _serve(start: DataServerSpec, config: Config, control: RoleControl) -> None:
    loop = asyncio.get_running_loop()

    def show(event: Event) -> None:
        if isinstance(event, TokensProgress):
            opening.told()
            does(event)
        else:
            tell(logger, event, control.notice)

    def does(event: Event) -> None:
        tell(logger, event, lambda text: control.tell(RoleDoes(text)))

    def say(event: Event) -> None:
        # Of a thread that nobody waits for any more, nobody hears.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(show, event)

    opening = OpeningProgress(config.data.dataset_name, does, SystemClock())
    dataset = await opening.through(partial(_opened, config, say))
    socket_path = Path(start.socket_path)
    emit(logger, DatasetOpened(dataset.name, dataset.train.num_samples, dataset.holdout.num_samples))
    # The client dials its data server: no address is needed.
    client = None if start.client is None else Hop(start.client, ())
    async with (
        open_role_endpoint(start) as endpoint,
        counters_reported(endpoint, start.label, lambda: client, SystemClock()),
    ):
        service = DataService(
            endpoint=endpoint,
            dataset=dataset,
            samples_per_step=config.diloco.samples_per_step,
            seed=config.run.seed,
            deterministic=config.run.deterministic,
            num_workers=config.data.num_workers,
            opening=opening_of(config, dataset.windows),
            client=start.client,
            pool_directory=socket_path.parent,
        )
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(service.run)
                group.start_soon(dispatch, endpoint, role_hooks(start).handlers((service,)))
                control.tell(RoleReady())
        finally:
            service.close()
            if dataset.windows is not None:
                dataset.windows.close()


def _opened(config: Config, say: Say) -> DataSet:
    dataset = open_source(config, say)
    try:
        require_taken(config, dataset)
    except ConfigError:
        if dataset.windows is not None:
            dataset.windows.close()
        raise
    return dataset
