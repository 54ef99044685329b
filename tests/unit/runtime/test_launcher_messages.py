"""What a launcher and its roles say to each other survives the way over a pipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import msgspec
import pytest

from shoal.ids import PeerId
from shoal.runtime import launcher_messages as messages
from shoal.runtime.launcher_messages import FromRole, PipeMessage, ToRole

ADOPTION = messages.Adoption(
    {0: 3, 1: 1}, [1], [messages.LostProcess("client", 1.5), messages.LostProcess("server", 0.1, 2, PeerId("p"))]
)
FROM_ROLE: list[FromRole] = [
    messages.RoleReady(),
    messages.ServerReady(1),
    messages.MonitorReady(("/m",)),
    messages.ScoutReady("run", {"model": {"blocks": [1, None]}}),
    messages.RoleFailed("why", "ConfigError"),
    messages.JoinedDht(("/a", "/b")),
    messages.UserNotice("a\nb"),
    messages.IdentityIsCopied("server@box at tcp:10.0.0.2:5", yields=True),
    messages.InitialPeers(()),
    messages.DialledBack(""),
    messages.WorkDone({"steps": 7.0, "share": 0.1}),
    messages.PeerSilent(PeerId("p"), "the client", 2.5),
    messages.PeerHeard(PeerId("p"), "the client"),
    messages.LastOfStage(1, 7, "no client"),
    messages.ServerMayLeave(1, 7, True),
    messages.RunAnnounced(False),
    messages.RunConcluded("it is over", True),
    messages.CostsFound([0.1, 2.0], "measured", 0.3, ["slow"], is_tied=False),
    messages.StatusChanged({"loss/train": 0.1}, {"loss/train": 1e-9}),
    messages.RoleLeaving(),
    messages.RunUnwanted(),
    messages.RunSummary({"exit": "done", "losses": [None, 0.1]}),
    messages.RoleDoes("opening /data (for 2 s)"),
    messages.RoleAsks(0, messages.StartDataServer()),
    messages.RoleAsks(1, messages.ReplaceDataServer()),
    messages.RoleAsks(2, messages.StartTrainer(1, 4)),
    messages.RoleAsks(3, messages.Adopt()),
]
TO_ROLE: list[ToRole] = [
    messages.StopRole("the data server has ended"),
    messages.InitialPeers(("/m",)),
    messages.LeaveTogether((PeerId("p"),)),
    messages.RoleDoes("opening /data (for 2 s)"),
    messages.LauncherReplies(2, messages.LauncherAnswer("no memory")),
    messages.LauncherReplies(3, ADOPTION),
]


@pytest.mark.parametrize("message", FROM_ROLE, ids=repr)
def test_what_a_role_says_is_what_its_launcher_hears(message: FromRole) -> None:
    assert msgspec.json.decode(msgspec.json.encode(message), type=FromRole) == message


@pytest.mark.parametrize("message", TO_ROLE, ids=repr)
def test_what_a_launcher_says_is_what_its_role_hears(message: ToRole) -> None:
    assert msgspec.json.decode(msgspec.json.encode(message), type=ToRole) == message


def _kinds(base: type[PipeMessage]) -> Iterator[type[PipeMessage]]:
    """Yield every class of messages."""
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)


def test_every_message_is_said_in_one_of_these_tests() -> None:
    said = [*FROM_ROLE, *TO_ROLE]
    asked = [message.request for message in FROM_ROLE if isinstance(message, messages.RoleAsks)]
    replies = [message.reply for message in TO_ROLE if isinstance(message, messages.LauncherReplies)]
    tried = {type(each) for each in (*said, *asked, *replies)}
    assert {type(message) for message in FROM_ROLE} == set(get_args(FromRole))
    assert {type(message) for message in TO_ROLE} == set(get_args(ToRole))
    assert {kind for kind in _kinds(PipeMessage) if kind is not messages.LauncherRequest} == tried
