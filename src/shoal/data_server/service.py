"""The role's entry: opens the data set, listens on a Unix socket, serves until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.to_thread

from shoal.clock import SystemClock
from shoal.config.schema import Config
from shoal.control.counter_report import counters_reported
from shoal.control.role_start import DataServerSpec, open_role_endpoint
from shoal.data.catalog import open_source, opening_of
from shoal.data.server import DataService
from shoal.events.base import Event, emit, tell
from shoal.events.data import DatasetOpened
from shoal.pipeline.role_hooks import role_hooks
from shoal.runtime.control_pipe import RoleControl
from shoal.runtime.launcher_messages import RoleReady
from shoal.transport.dispatch import dispatch
from shoal.wire.messages.base import Hop

logger = logging.getLogger(__name__)


async def main(spec: bytes, control: RoleControl) -> None:
    """Run a data server.

    Args:
        control: is told `RoleReady` once batches can be asked for.

    Raises:
        ConfigError: the data set cannot be opened.
    """
    start = DataServerSpec.begun(spec)
    await control.until_stopped(_serve, start, start.config(), control)


async def _serve(start: DataServerSpec, config: Config, control: RoleControl) -> None:
    loop = asyncio.get_running_loop()

    def show(event: Event) -> None:
        tell(logger, event, control.notice)

    def say(event: Event) -> None:
        # Of a thread that nobody waits for any more, nobody hears.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(show, event)

    # A download, or making tokens of text, may take long: stopping does not wait for it.
    dataset = await anyio.to_thread.run_sync(open_source, config, say, abandon_on_cancel=True)
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
