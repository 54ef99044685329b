"""A role over its restarts, as its launcher holds it."""

from __future__ import annotations

import pytest

from shoal.runtime.control_pipe import ControlPipe
from shoal.runtime.role_handle import RoleEvent, RoleHandle
from shoal.runtime.role_spec import RoleSpec

pytestmark = pytest.mark.anyio


class Pipe(ControlPipe):
    """Keeps what is sent."""

    def __init__(self) -> None:
        super().__init__(lambda _: None)
        self.sent: list[object] = []

    def send(self, message: object) -> None:
        self.sent.append(message)


async def test_a_process_gets_no_answer_to_what_the_one_before_has_asked() -> None:
    role = RoleHandle(RoleSpec("client", 0, "package.module:main"))
    first, second = Pipe(), Pipe()
    role.connect(first)
    role.deliver({"event": "request", "request": "start_trainer", "id": 0})
    role.connect(second)
    role.deliver({"event": "request", "request": "adopt", "id": 0})
    requests: list[RoleEvent] = []
    async for event in role.events:
        requests.append(event)
        if len(requests) == 2:
            break
    for request in requests:
        role.reply(request, to=request.fields["request"])
    assert first.sent == []
    assert second.sent == [{"reply": 0, "to": "adopt"}]
