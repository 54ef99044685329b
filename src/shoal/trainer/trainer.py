"""The parts of a trainer, put together: what the role's process runs, and a cluster in one process as well.

endpoint -> StepDriver (replicas), Feed (data server), TrainerLoop (client)
"""

from __future__ import annotations

import anyio

from shoal.clock import Clock
from shoal.config.schema import Config
from shoal.data.feed import Feed
from shoal.model.registry import is_wrapped
from shoal.pipeline.driver import StepDriver
from shoal.pipeline.role_hooks import NO_HOOKS, RoleHooks
from shoal.trainer.loop import TrainerLoop
from shoal.transport.base import Endpoint
from shoal.transport.dispatch import dispatch
from shoal.wire.messages.base import Hop


class Trainer:
    """One slot's trainer."""

    def __init__(
        self,
        *,
        config: Config,
        endpoint: Endpoint,
        slot: int,
        generation: int,
        client: Hop,
        data_server: Hop,
        clock: Clock,
        hooks: RoleHooks = NO_HOOKS,
    ) -> None:
        """Connect the parts.

        Args:
            endpoint: `run` takes its events.
            slot: the pipeline that is its home; also its number in step ids.
            generation: counts the starts of this slot's trainer in the run, from 1.
        """
        self._endpoint, self._hooks = endpoint, hooks
        pipeline = config.model_pipeline
        self._feed = Feed(endpoint=endpoint, data_server=data_server, trainer=slot, generation=generation, clock=clock)
        self._driver = StepDriver(
            endpoint=endpoint,
            trainer=slot,
            generation=generation,
            window=pipeline.microbatches_in_flight,
            evaluation_window=pipeline.evaluations_in_flight,
            max_grad_norm=config.diloco.max_grad_norm,
            clock=clock,
            step_timeout_s=pipeline.forward_timeout_s + pipeline.backward_timeout_s,
            is_wrapped=is_wrapped(config),
        )
        self._loop = TrainerLoop(
            endpoint=endpoint,
            feed=self._feed,
            driver=self._driver,
            config=config,
            client=client,
            slot=slot,
            generation=generation,
            clock=clock,
        )

    async def run(self) -> None:
        """Say hello to the client and train until cancelled."""
        async with anyio.create_task_group() as tasks:
            handlers = self._hooks.handlers((self._driver, self._feed, self._loop))
            tasks.start_soon(dispatch, self._endpoint, handlers, self._driver.peer_found)
            tasks.start_soon(self._feed.run)
            tasks.start_soon(self._loop.run)
