"""The role's entry: opens the data set, listens on a Unix socket, serves until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from shoal.clock import Clock, SystemClock
from shoal.config.model import NATIVE_FAMILIES
from shoal.config.schema import Config
from shoal.control.counter_report import counters_reported
from shoal.control.role_start import DataServerSpec, open_role_endpoint
from shoal.data.catalog import open_source, opening_of
from shoal.data.server import DataService
from shoal.data.source import ArraySpec, DataSet
from shoal.data.text_corpus import Say
from shoal.errors import ConfigError
from shoal.events.base import Event, emit, tell
from shoal.events.data import DatasetOpened, DatasetOpening, TokensProgress
from shoal.model.registry import load_family
from shoal.pipeline.role_hooks import role_hooks
from shoal.runtime.control_pipe import RoleControl
from shoal.runtime.launcher_messages import RoleDoes, RoleReady
from shoal.transport.dispatch import dispatch
from shoal.wire.messages.base import Hop

logger = logging.getLogger(__name__)
FIRST_S: Final = 2.0
"""What is open before that, nothing is said of."""
_EVERY_S: Final = 5.0
_QUIET_S: Final = 8.0
"""Nobody else has said for so long how far it is."""


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


def require_taken(config: Config, dataset: DataSet) -> None:
    """Check that a family of somebody's own takes the samples; of shoal's own that is known when they are opened.

    Servers would refuse each step for it.

    Raises:
        ConfigError: It does not.
    """
    if config.model.family in NATIVE_FAMILIES:
        return
    try:
        problems = list(_problems(config, dataset))
    except ConfigError:
        return  # what is wrong with it is said by those who build it
    if problems:
        raise ConfigError("\n".join(problems))


def _problems(config: Config, dataset: DataSet) -> Iterator[str]:
    family, given = load_family(config.model, config.data), dataset.fields
    asked = {"input_spec": (family.input_spec(), given.inputs), "label_spec": (family.label_spec(), given.labels)}
    for spec, (wanted, found) in asked.items():
        if found.shape == wanted.shape and wanted.takes(found.dtype):
            continue
        what = "inputs" if spec == "input_spec" else "labels"
        yield (
            f"a sample of data.dataset_name = {config.data.dataset_name} has {what} {_text(found)}, and {spec}() of "
            f"model.family = {config.model.family} says {_text(ArraySpec(wanted.dtype, wanted.shape))}; make them agree"
        )


def _text(spec: ArraySpec) -> str:
    return f"{spec.dtype}{list(spec.shape)}"


class OpeningProgress:
    """Says how far a data server is that does not serve yet, since many files, a slow disk or the hub may take long.

    Who opens the data set, a library mostly, tells nothing meanwhile. So the files of a folder are counted beside, and
    what is said otherwise, as of tokens that are made, goes first.

    Args:
        dataset: Its name; the folder where it is one.
        show: Shows an event.
    """

    def __init__(self, dataset: str, show: Callable[[Event], None], clock: Clock) -> None:
        self._dataset, self._show, self._clock = dataset, show, clock
        self._folder = Path(dataset).expanduser()
        self._begun_s, self._told_s = clock.now_s(), float("-inf")
        self._files, self._is_counted, self._is_over = 0, False, False

    def told(self) -> None:
        """Somebody has said how far it is."""
        self._told_s = self._clock.now_s()

    async def through(self, open: Callable[[], DataSet]) -> DataSet:
        """Return what `open` returns, in a thread; meanwhile it is said. Raises what it raises, in a group."""
        opened: list[DataSet] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._say)
            # A download, or making tokens of text, may take long: stopping does not wait for it.
            opened.append(await anyio.to_thread.run_sync(open, abandon_on_cancel=True))
            tasks.cancel_scope.cancel()
        return opened[0]

    async def _say(self) -> None:
        await self._clock.sleep_s(FIRST_S)
        try:
            async with anyio.create_task_group() as tasks:
                is_folder = await anyio.to_thread.run_sync(self._folder.is_dir, abandon_on_cancel=True)
                if is_folder:
                    tasks.start_soon(self._count)
                while True:
                    now_s = self._clock.now_s()
                    if now_s - self._told_s >= _QUIET_S:
                        elapsed_s = round(now_s - self._begun_s)
                        files = self._files if is_folder else None
                        self._show(DatasetOpening(self._dataset, files, self._is_counted, elapsed_s))
                    await self._clock.sleep_s(_EVERY_S)
        finally:
            self._is_over = True

    async def _count(self) -> None:
        await anyio.to_thread.run_sync(self._count_files, abandon_on_cancel=True)

    def _count_files(self) -> None:
        for _, _, names in os.walk(self._folder):
            self._files += len(names)
            if self._is_over:
                return
        self._is_counted = True
