"""What a swarm says on the local network, and who can read it; and how it is found over loopback multicast."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext

import anyio
import pytest
from zeroconf import NonUniqueNameException, ServiceStateChange

from shoal.control import lan
from shoal.control.lan import FoundSwarm, announced, find_on_lan, hears_itself, mark_of, opened, sealed

KEY, OTHER = bytes(range(32)), bytes(32)
PEERS = tuple(
    f"/ip4/203.0.113.{number}/tcp/50000/p2p/12D3KooWFrCUuswLZqfWycRGiHa1uWQcg{number}" for number in (7, 8, 9)
)
SWARM = FoundSwarm("herd", PEERS, 1000.0)


def _read(text: dict[str, bytes]) -> dict[bytes, bytes | None]:
    return {name.encode(): value for name, value in text.items()}


def test_who_has_the_key_reads_it_and_nobody_else_does() -> None:
    text = sealed(KEY, SWARM)
    assert opened(KEY, _read(text)) == SWARM
    assert opened(OTHER, _read(text)) is None
    assert all(len(name) + 1 + len(value) <= 255 for name, value in text.items())
    content = b"".join(text.values())
    assert not any(word in content for word in (b"herd", b"203.0.113", b"12D3"))
    assert mark_of(KEY) != mark_of(OTHER)


@pytest.mark.parametrize("text", [{}, {b"0": b""}, {b"0": None}, {b"0": b"x" * 200}, {b"9": b"x" * 200}])
def test_what_is_no_text_of_a_swarm_is_nothing(text: dict[bytes, bytes | None]) -> None:
    assert opened(KEY, text) is None


@pytest.mark.parametrize("prefix", ["", "a b", "$(reboot)", "../a", "-x", "a\n", "a" * 65, "\x1b[2J"])
def test_a_text_with_what_could_be_no_prefix_is_nothing(prefix: str) -> None:
    assert opened(KEY, _read(sealed(KEY, FoundSwarm(prefix, PEERS, 1000.0)))) is None


def test_a_text_that_was_changed_is_nothing() -> None:
    text = _read(sealed(KEY, SWARM))
    first = text[b"0"] or b""
    for at in (0, 12, len(first) - 1):
        changed = bytearray(first)
        changed[at] ^= 1
        assert opened(KEY, text | {b"0": bytes(changed)}) is None


@pytest.fixture
def own_key() -> bytes:
    """The key of a swarm that no other test announces meanwhile."""
    return os.urandom(32)


def _browser(names: list[str]) -> type:
    """What has heard these names at once."""

    class Browser:
        def __init__(self, _zeroconf: object, _kind: str, handlers: list[Callable[..., None]]) -> None:
            for name in names:
                handlers[0](name=name, state_change=ServiceStateChange.Added)

        async def async_cancel(self) -> None:
            pass

    return Browser


async def test_an_announcement_of_this_host_comes_back_to_it() -> None:
    assert await hears_itself(60.0)


@pytest.mark.anyio
async def test_a_swarm_is_found_by_its_key_and_name_and_not_once_it_is_gone(own_key: bytes) -> None:
    with anyio.fail_after(120):
        async with announced(own_key, SWARM):
            assert await find_on_lan(own_key, None, 60.0) == SWARM
            assert await find_on_lan(own_key, "herd", 60.0) == SWARM
            assert await find_on_lan(own_key, "flock", 1.5) is None
            assert await find_on_lan(OTHER, None, 1.5) is None
        assert await find_on_lan(own_key, None, 1.5) is None


@pytest.mark.anyio
@pytest.mark.parametrize("is_first", [True, False])
async def test_of_two_that_open_the_newer_one_is_taken_whoever_answers_first(
    is_first: bool, own_key: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = FoundSwarm("herd", PEERS[2:], 900.0)
    texts = {
        "a": sealed(own_key, SWARM if is_first else recorded),
        "b": sealed(own_key, recorded if is_first else SWARM),
    }
    monkeypatch.setattr(
        lan, "AsyncServiceBrowser", _browser([f"{mark_of(own_key)}-{name}.{lan.SERVICE}" for name in texts])
    )

    class Info:
        """Answers at once."""

        def __init__(self, _kind: str, name: str) -> None:
            text = texts[name.partition("-")[2][0]]
            self.properties = {key.encode(): value for key, value in text.items()}

        async def async_request(self, *_: object) -> bool:
            return True

    monkeypatch.setattr(lan, "AsyncServiceInfo", Info)
    with anyio.fail_after(120):
        assert await find_on_lan(own_key, None, 60.0) == SWARM


@pytest.mark.anyio
@pytest.mark.parametrize(("num_taken", "is_announced"), [(1, True), (99, False)])
async def test_somebody_who_claims_a_name_costs_a_try_and_one_who_claims_all_no_more_than_the_announcement(
    num_taken: int, is_announced: bool, own_key: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    async def register(_own: lan.AsyncZeroconf, info: lan.ServiceInfo) -> None:
        tried.append(info.name)
        if len(tried) <= num_taken:
            raise NonUniqueNameException

    monkeypatch.setattr(lan.AsyncZeroconf, "async_register_service", register)
    with nullcontext() if is_announced else pytest.raises(OSError, match="NonUniqueName"):
        async with announced(own_key, SWARM):
            pass
    assert len(set(tried)) == len(tried) == (2 if is_announced else 3)


@pytest.mark.anyio
async def test_names_that_are_none_are_passed_over(own_key: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["evil.example.", "x.evil._other._tcp.local.", f"{chr(0)}x.{lan.SERVICE}", f"x.y.z.{lan.SERVICE}"]
    monkeypatch.setattr(lan, "AsyncServiceBrowser", _browser([f"{mark_of(own_key)}-{name}" for name in names]))
    monkeypatch.setattr(lan, "_RESOLVE_MS", 50)
    with anyio.fail_after(120):
        assert await find_on_lan(own_key, None, 0.5) is None


@pytest.mark.anyio
async def test_of_names_without_end_some_are_looked_at(own_key: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{mark_of(own_key)}-{number}.{lan.SERVICE}" for number in range(10)]
    looked_at: list[str] = []

    class Info:
        """Nobody answers for it."""

        def __init__(self, _kind: str, name: str) -> None:
            looked_at.append(name)

        async def async_request(self, *_: object) -> bool:
            return False

    monkeypatch.setattr(lan, "AsyncServiceBrowser", _browser(names))
    monkeypatch.setattr(lan, "AsyncServiceInfo", Info)
    monkeypatch.setattr(lan, "_MAX_NAMES_IN_ALL", 4)
    with anyio.fail_after(120):
        assert await find_on_lan(own_key, None, 60.0) is None
    assert looked_at == names[:4]
