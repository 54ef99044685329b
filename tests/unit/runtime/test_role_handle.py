"""A role over its restarts, as its launcher holds it."""

from __future__ import annotations

from shoal.runtime.control_pipe import ControlPipe
from shoal.runtime.launcher_messages import (
    Adopt,
    FromRole,
    LauncherAnswer,
    LauncherReplies,
    RoleAsks,
    StartTrainer,
    ToRole,
)
from shoal.runtime.role_handle import RoleHandle
from shoal.runtime.role_spec import ExitStatus, RoleSpec


class Pipe(ControlPipe[FromRole]):
    """Keeps what is sent."""

    def __init__(self) -> None:
        super().__init__(lambda _: None, FromRole)
        self.sent: list[FromRole | ToRole] = []

    def send(self, message: FromRole | ToRole) -> None:
        self.sent.append(message)


async def test_a_process_gets_no_answer_to_what_the_one_before_has_asked() -> None:
    role = RoleHandle(RoleSpec("client", 0, "package.module:main"))
    first, second = Pipe(), Pipe()
    role.connect(first)
    role.deliver(RoleAsks(0, StartTrainer(1, 2)))
    role.connect(second)
    role.deliver(RoleAsks(0, Adopt()))
    for _ in range(2):
        asked = await anext(role.events)
        assert isinstance(asked, RoleAsks)
        role.reply(asked, LauncherAnswer(str(asked.request)))
    assert first.sent == []
    assert second.sent == [LauncherReplies(0, LauncherAnswer("Adopt()"))]
    role.exited(ExitStatus(1))
    role.reply(asked, LauncherAnswer())
    assert len(second.sent) == 1, "nobody waits for an answer of a process that has ended"
