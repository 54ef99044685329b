"""Where the client was last is kept for its owner alone, by swarm."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from anyio.lowlevel import checkpoint
from tests.alongside import alongside, until
from tests.unit.control.test_seen_peers import VIEW

from shoal.config import load_config
from shoal.control.known_client import keep_known_client, known_client, remember_client
from shoal.ids import PeerId
from shoal.runtime.waking import Signal
from shoal.swarm.view import ClientPeer, SwarmView
from shoal.wire.messages.base import Hop

KEY, OTHER = bytes(32), bytes([1] * 32)
CLIENT = Hop(PeerId("c"), ("tcp:10.0.0.1:5000",))
ONE, TWO = "/ip4/10.0.0.1/tcp/50000/p2p/A", "/ip4/10.0.0.2/tcp/50000/p2p/B"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_it_is_found_by_any_address_of_its_swarm_and_by_no_other_key_or_name(cache: Path) -> None:
    remember_client(KEY, "sandbox", "r-1", CLIENT, (ONE, TWO), ())
    known = known_client(KEY, "sandbox", (TWO,))
    assert known is not None
    assert (known.run_id, known.hop) == ("r-1", CLIENT)
    for key, name, peers in ((OTHER, "sandbox", (TWO,)), (KEY, "mine", (TWO,)), (KEY, "sandbox", ("/ip4/10.0.0.9",))):
        assert known_client(key, name, peers) is None
    (file,) = [path for path in cache.rglob("*") if path.is_file()]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_file_that_cannot_be_read_is_as_if_there_were_none(cache: Path) -> None:
    remember_client(KEY, "sandbox", "r-1", CLIENT, (ONE,), ())
    (file,) = [path for path in cache.rglob("*") if path.is_file()]
    for content in (b"", b"{}", b"\xff", b'{"run_id": 1}'):
        file.write_bytes(content)
        assert known_client(KEY, "sandbox", (ONE,)) is None


def test_the_newest_one_counts() -> None:
    remember_client(KEY, "sandbox", "r-1", CLIENT, (ONE,), ())
    remember_client(KEY, "sandbox", "r-2", Hop(PeerId("d"), ()), (ONE,), ())
    known = known_client(KEY, "sandbox", (ONE,))
    assert known is not None
    assert known.run_id == "r-2"


def test_addresses_of_peers_that_are_gone_do_not_pile_up_from_join_to_join() -> None:
    invited = tuple(f"/ip4/10.0.0.{number}/tcp/1/p2p/I" for number in range(5))
    told = invited
    for join in range(30):
        live = tuple(f"/ip4/10.1.{join}.{number}/tcp/1/p2p/L" for number in range(20))
        remember_client(KEY, "sandbox", f"r-{join // 2}", CLIENT, live, told)
        known = known_client(KEY, "sandbox", invited)
        assert known is not None, "by what its user was told, a host knows which swarm is meant"
        assert known.initial_peers[:16] == live[:16], "who was there last comes first"
        assert set(invited) <= set(known.initial_peers)
        assert len(known.initial_peers) <= 24
        # As `shoal join` begins the next time.
        told = tuple(dict.fromkeys((*invited, *known.initial_peers)))
    assert len(told) <= 24


class _Membership:
    """A view that a test changes."""

    def __init__(self) -> None:
        self.view = SwarmView(maddrs=(TWO,))
        self.changes = Signal()

    async def changed(self) -> SwarmView:
        await self.changes.wait()
        return self.view

    def show(self, view: SwarmView) -> None:
        self.view = view
        self.changes.notify()


async def test_a_host_of_servers_keeps_where_the_client_of_its_run_is_and_follows_it() -> None:
    membership = _Membership()
    start = SimpleNamespace(config=load_config, swarm_key=KEY, initial_peers=(ONE,))
    prefix = load_config().experiment_prefix

    def known(peer: str = ONE) -> Hop | None:
        found = known_client(KEY, prefix, (peer,))
        return None if found is None else found.hop

    moved = replace(VIEW, clients=(ClientPeer(Hop(PeerId("d"), ("tcp:10.0.0.2:5000",)), 0.0),), maddrs=(TWO,))
    other = replace(moved, run=replace(moved.run, run_id="another"), clients=VIEW.clients)
    async with alongside(lambda: keep_known_client(start, "r-1", membership)):  # type: ignore[arg-type]
        for _ in range(5):
            await checkpoint()
        assert known() is None
        membership.show(VIEW)
        await until(lambda: known() == VIEW.clients[0].hop)
        membership.show(moved)
        await until(lambda: known(TWO) == moved.clients[0].hop)
        membership.show(other)
        for _ in range(5):
            await checkpoint()
        membership.show(replace(moved, clients=()))
        for _ in range(5):
            await checkpoint()
    assert known(ONE) == moved.clients[0].hop
