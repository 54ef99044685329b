"""Answers whoever asks how the run is while its data server is not there yet: that may list many files or make tokens.

Nobody else knows of this client then, since it has not joined the swarm. A client that is started again has peers that
send it what it must not miss; its data server serves already.
"""

from __future__ import annotations

from dataclasses import dataclass

import anyio

from shoal.config.schema import Config
from shoal.errors import ControlError
from shoal.runtime.control_pipe import RoleControl
from shoal.runtime.launcher_messages import StartDataServer
from shoal.transport.base import Endpoint, Received
from shoal.transport.dispatch import Handler, Rest, dispatch
from shoal.wire.messages.control import MAX_STATE_CHARS, AskStatus, RunStatus


@dataclass(eq=False, repr=False)
class OpeningAnswers(Handler):
    """The client's side of `shoal status` until the data server serves."""

    endpoint: Endpoint
    config: Config
    control: RoleControl

    def receive(self, event: Received) -> bool:
        """Answer the question; what it is beside that waits for the run."""
        if not isinstance(event.message, AskStatus):
            return False
        state = f"starting: {self.control.doing or 'waiting for the data server'}"
        rounds, stages = self.config.diloco.outer_steps, self.config.num_stages
        status = RunStatus(state[:MAX_STATE_CHARS], 0, rounds, 0, 0, None, None, 0.0, None, (), num_stages=stages)
        self.endpoint.post(event.peer, status)
        return True


async def data_server_started(control: RoleControl, endpoint: Endpoint, config: Config, *, is_new: bool) -> bool:
    """Have the launcher start the data server, and wait until it serves; return whether it does, and not the run's end
    is wanted.

    Args:
        is_new: no peer knows this client.

    Raises:
        ControlError: it could not be started.
    """
    async with anyio.create_task_group() as tasks:

        async def stop_when_told() -> None:
            await control.stopping.wait()
            tasks.cancel_scope.cancel()

        tasks.start_soon(stop_when_told)
        if is_new:
            tasks.start_soon(dispatch, endpoint, (OpeningAnswers(endpoint, config, control), Rest()))
        answer = await control.request(StartDataServer())
        tasks.cancel_scope.cancel()
        if answer.error:
            raise ControlError(f"the data server could not be started: {answer.error}")
        return True
    return False
