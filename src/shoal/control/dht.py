"""The adapter to hivemind: a DHT node in our own event loop that carries sealed records.

hivemind starts one `p2pd` process (libp2p, written in Go) per node and speaks to it over a Unix socket. When this
process dies, however it dies, that connection closes and p2pd ends by itself within 0.1 s; in the moment before it
stands, p2pd's own idle timeout ends it (`dht_launcher`).
"""

# hivemind ships no type information; what crosses this file's border is typed.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

import anyio
from google.protobuf.message import DecodeError
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError
from hivemind.proto import dht_pb2
from hivemind.utils.multiaddr import Multiaddr

from shoal.clock import Backoff, Clock, Deadline, SystemClock
from shoal.control.dht_daemon import CLOSE_TIMEOUT_S, answers, child_of, connect, end_daemon, unless_it_ends
from shoal.control.dht_launcher import WAIT_TIMEOUT_S, DhtLauncher, calm_logging, keep_time, speak_keyed
from shoal.control.dht_lookup import Found, QuickLookup
from shoal.control.greeting import Greeter, new_question
from shoal.control.keyed_protocol import members_of
from shoal.control.lost_peers import LostPeers
from shoal.control.maddrs import check_port_free, is_loopback, outward, peer_in
from shoal.control.record_checker import RecordChecker
from shoal.control.records import TTL_S, VerifiedRecord, require_small
from shoal.errors import BootstrapError, InvariantViolation
from shoal.events.base import emit
from shoal.events.registry import DhtDeaf, DhtRetrying
from shoal.identity import Identity
from shoal.ids import PeerId
from shoal.telemetry.registry import MetricRegistry

logger = logging.getLogger(__name__)

# Enough to find back into the swarm by.
_LOOK_AROUND_S = 1.0
_MAX_NEIGHBOURS = 16

LOOK_EVERY_S = 5.0
"""Between looks at the addresses of this host: half of the time in which each record is renewed, and so stored."""

_ALONE_S = 5.0
"""So long p2pd need not be asked again whether it answers, by a node that has never known another one."""

_GREETING = "shoal.greeting"
_GREETING_TIMEOUT_S = 3.0
_DIAL_TIMEOUT_S = 5.0
_START_ERRORS = (P2PDaemonError, RuntimeError, OSError, EOFError)


class _Answer(NamedTuple):
    """What stood under some topics, and when and of how many holders that was asked."""

    topics: tuple[str, ...]
    holders: int | None
    asked_s: float
    values: list[tuple[str, str, bytes]]

    def serves(self, topics: tuple[str, ...], holders: int | None, since_s: float) -> bool:
        """Return whether it does for who asks this, and whom an answer since then serves."""
        is_as_wide = self.holders is None or (holders is not None and holders <= self.holders)
        return topics == self.topics and is_as_wide and self.asked_s >= since_s


_Question = tuple[tuple[str, ...], int | None]
"""Topics, and how many holders are asked."""


@dataclass
class _UnderWay:
    """A question that somebody has asked, and that others need not ask as well; over: answered, or given up."""

    asked_s: float
    over: anyio.Event = field(default_factory=anyio.Event)


@dataclass(eq=False, repr=False)
class DhtNode:
    """One peer of the DHT, made by `create`.

    Attributes:
        checker: verifies what others store here or answer, and counts what it drops.
        maddrs: where others can join through this node, as of when it has stored something last: the network of the
            host may give it another address at any time.
    """

    peer_id: PeerId
    namespace: str
    checker: RecordChecker
    launcher: DhtLauncher
    greeter: Greeter | None = None
    maddrs: tuple[str, ...] = field(default=(), init=False)
    _daemon: P2P | None = None
    _node: DHTNode | None = None
    _lookup: QuickLookup | None = None
    _neighbours: tuple[str, ...] = ()
    _difference_s: float | None = None
    _deaf: bool = False
    _astray: bool = False
    _strays: bool = False
    _lost: LostPeers = field(default_factory=LostPeers)
    _looked_s: float = -math.inf
    _answer: _Answer | None = None
    _under_way: dict[_Question, _UnderWay] = field(default_factory=dict[_Question, _UnderWay])
    _answered_s: float = -math.inf

    @classmethod
    async def create(
        cls,
        identity: Identity,
        *,
        namespace: str,
        state_dir: Path,
        clock: Clock,
        metrics: MetricRegistry | None = None,
        initial_peers: Sequence[str] = (),
        host_maddrs: Sequence[str] = ("/ip4/127.0.0.1/tcp/0",),
        announce_maddrs: Sequence[str] = (),
        bootstrap_timeout_s: float = 20.0,
        greeter: Greeter | None = None,
        strays: bool = False,
        gone: Sequence[str] = (),
    ) -> DhtNode:
        """Start a node and join the swarm.

        Args:
            namespace: `identity.namespace(swarm_key, experiment_prefix)`; records of other namespaces are refused.
            state_dir: existing private directory with a short path, for the key file and the sockets of p2pd.
            clock: for expiries, and for the pauses between attempts.
            metrics: counts the records that are dropped; None: they are not counted.
            initial_peers: multiaddresses of peers to join; empty starts a new swarm.
            host_maddrs: multiaddresses to listen on; if all are loopback, no NAT traversal is started.
            announce_maddrs: multiaddresses to tell others; empty: those to listen on.
            greeter: tells newcomers to which swarm this peer belongs; None: it does not.
            strays: the host was in the swarm before: where none of the initial peers answers, it is alone and looks
                for them, see `revive`.
            gone: multiaddresses of peers that are not waited for, but are looked for from then on.

        Raises:
            BootstrapError: none of the initial peers answered in time, or p2pd did not start.
            ConfigError: a port to listen on is taken.
        """
        calm_logging()
        keep_time()
        speak_keyed()
        for maddr in host_maddrs:
            check_port_free(maddr)
        checker = RecordChecker(
            namespace, lambda topic: _key(namespace, topic).to_bytes(), clock, metrics or MetricRegistry()
        )
        launcher = DhtLauncher(
            namespace=namespace,
            state_dir=state_dir,
            key_file=state_dir / f"{identity.peer_id}.key",
            checker=checker,
            initial_peers=tuple(initial_peers),
            host_maddrs=tuple(host_maddrs),
            any_maddrs=tuple(host_maddrs),
            announce_maddrs=tuple(announce_maddrs),
            startup_timeout_s=bootstrap_timeout_s,
        )
        # A file of this name holds this very key.
        with suppress(FileExistsError):
            identity.to_p2p_key_file(launcher.key_file)
        dht = cls(identity.peer_id, namespace, checker, launcher, greeter)
        dht._strays = strays
        deadline = Deadline.after(clock, bootstrap_timeout_s)
        backoff = Backoff(first_s=0.1, max_s=2.0)
        while True:
            try:
                await dht.revive()
            except BootstrapError as error:
                if dht._astray:
                    return dht
                if not initial_peers or deadline.expired():
                    raise
                emit(logger, DhtRetrying(str(error)))
                await backoff.wait(clock)
            else:
                dht._neighbours = tuple(gone) or dht._neighbours
                dht._lost.due([peer_in(maddr) for maddr in gone], clock.now_s())
                return dht

    async def revive(self) -> None:
        """Start p2pd, also again after it has died: at the addresses that others know, if nobody took them meanwhile.

        One that was in the swarm and reaches nobody of it now goes astray: it stays up without neighbours, where those
        who look for it at the same time find it, and each further call looks for the others.

        Raises:
            BootstrapError: it did not start, or reached neither the initial peers nor those that it knew last.
        """
        # The initial peers may have died or moved since; those of the last connections are in the swarm.
        known = (*self.launcher.initial_peers, *self._neighbours)
        if self._astray and self._daemon is not None and self._runs and await answers(self._daemon):
            await self._find_back(known)
            return
        await self._end()
        try:
            await self._start(known)
        except _START_ERRORS as error:
            await self._end()
            if (self.maddrs or self._strays) and known:
                await self._go_astray()
            raise BootstrapError(_bootstrap_message(known, error)) from error

    async def _go_astray(self) -> None:
        try:
            await self._start(())
        except _START_ERRORS:
            await self._end()
        else:
            self._astray = True

    async def _start(self, initial_peers: Sequence[str]) -> None:
        launcher = self.launcher
        self._daemon, node = await launcher.launch(initial_peers)
        self._node, self._lookup = node, QuickLookup(node)
        if initial_peers and (self.maddrs or self._strays) and not node.protocol.routing_table.peer_id_to_uid:
            raise P2PDaemonError("only peers without the key of this swarm answer there")
        visible = await unless_it_ends(self._daemon, self._appear(self._daemon), launcher.startup_timeout_s)
        self.maddrs, self.launcher = outward(visible), launcher.pinned(visible)

    async def _find_back(self, known: Sequence[str]) -> None:
        """Dial those that it knew; one that has needed nobody to begin with is content with being found."""
        node = self._node
        if node is None:
            raise InvariantViolation("a DHT node looks for others before it is started")
        async with anyio.create_task_group() as tasks:
            for peer, maddrs in _by_peer(known).items():
                tasks.start_soon(self._dial, node, peer, maddrs)
        if self.launcher.initial_peers and not node.protocol.routing_table.peer_id_to_uid:
            raise BootstrapError(_bootstrap_message(known, P2PDaemonError("none of them can be dialled")))
        self._astray = False

    async def _dial(self, node: DHTNode, peer: PeerID, maddrs: Sequence[Multiaddr]) -> None:
        """Have p2pd connect to a peer whose addresses it does not know, and the peer be a neighbour if it is there."""
        if self._daemon is None:
            return
        with suppress(P2PDaemonError, OSError, EOFError), anyio.move_on_after(_DIAL_TIMEOUT_S):
            if maddrs:
                await connect(self._daemon, peer, maddrs)
            await self._ask(node, peer)

    async def _appear(self, daemon: P2P) -> tuple[str, ...]:
        """Greet newcomers from now on; return the addresses at which they find this node."""
        await daemon.add_protobuf_handler(_GREETING, self._greet, cast(Any, dht_pb2).NodeInfo)
        return await self.visible_maddrs()

    async def visible_maddrs(self) -> tuple[str, ...]:
        """Return the multiaddresses, with peer id, under which others can join through this node."""
        if self._daemon is None:
            return ()
        return tuple(str(maddr) for maddr in await self._daemon.get_visible_maddrs(latest=True))

    async def _look_where_it_is(self) -> None:
        # The processes of a host store a record every second or so, and p2pd tells its addresses to who dials it anew.
        now_s = SystemClock().now_s()
        if now_s - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now_s
        with suppress(P2PDaemonError, OSError, EOFError), anyio.move_on_after(_LOOK_AROUND_S):
            found = outward(await self.visible_maddrs())
            # Without a network it will most likely be again where it was.
            is_known = not all(map(is_loopback, found)) or all(map(is_loopback, self.maddrs))
            if found and is_known and set(found) != set(self.maddrs):
                self.maddrs = found

    async def prefixes_of(self, peers: Iterable[str]) -> list[str | None]:
        """Return the prefixes of the swarms of those peers who tell theirs; None is of one with another swarm key."""
        found: list[str | None] = []
        async with anyio.create_task_group() as tasks:
            for peer in peers:
                tasks.start_soon(self._ask_prefix, peer, found)
        return found

    async def takes(self, peer: str, size_bytes: int) -> bool:
        """Return whether a question of this size reaches a peer that greets, and the answer to it comes back.

        Where a link loses large packets alone, short questions are answered as ever.
        """
        daemon, kind = self._daemon, cast(Any, dht_pb2).NodeInfo
        if daemon is None:
            return False
        with suppress(P2PDaemonError, OSError, EOFError, ValueError), anyio.move_on_after(_GREETING_TIMEOUT_S):
            # What is no question is answered by nothing, but it is answered: what the peer says of it does not matter.
            with suppress(P2PHandlerError, DecodeError):
                who = PeerID.from_base58(peer)
                await daemon.call_protobuf_handler(who, _GREETING, kind(node_id=bytes(size_bytes)), kind)
            return True
        return False

    async def ahead_s(self) -> float | None:
        """Return by how much the clock of a neighbour is ahead of this host's, to half of the time that it takes to
        ask; None: no neighbour says."""
        node = self._node
        if node is None:
            return None
        for peer in tuple(node.protocol.routing_table.peer_id_to_uid)[:1]:
            with suppress(P2PDaemonError, P2PHandlerError, OSError, EOFError), anyio.move_on_after(_LOOK_AROUND_S):
                request: Any = cast(Any, dht_pb2).PingRequest(peer=node.protocol.node_info)
                asked_unix_s = SystemClock().unix_s()
                answer: Any = await node.protocol.get_stub(peer).rpc_ping(request, timeout=WAIT_TIMEOUT_S)
                return float(answer.dht_time) - (asked_unix_s + SystemClock().unix_s()) / 2
        return None

    async def store(self, topic: str, value: bytes, expires_unix_s: float, peer: PeerId | None = None) -> bool:
        """Store a sealed record under a topic and a peer's id.

        Args:
            peer: another process of this host, for which this node stores it; None: this peer.

        Returns:
            Whether some peer took it. A peer refuses a record that does not expire later than the one before it.

        Raises:
            RecordRejected: it is too large.
        """
        require_small(topic, value)
        await self._look_where_it_is()
        node, lookup, subkey = self._node, self._lookup, str(peer or self.peer_id)
        if node is None or lookup is None:
            return False
        stored = await lookup.store(_key(self.namespace, topic), subkey, value, expires_unix_s)
        # Meanwhile `revive` may have put another node in its place.
        if stored.everywhere or node is not self._node:
            return stored.taken
        # Who has it already takes it no second time.
        return (
            bool(await node.store(_name(self.namespace, topic), value, expires_unix_s, subkey=subkey)) or stored.taken
        )

    async def get(
        self, topics: Iterable[str], holders: int | None = None, age_s: float = 0.0
    ) -> tuple[VerifiedRecord, ...]:
        """Return all believable records under these topics, the newest of each peer and topic, from all who answer."""
        opened = [self.checker.accept(*each) for each in await self.found(tuple(topics), holders, age_s)]
        records = tuple(record for record in opened if record is not None)
        if all(record.peer == self.peer_id for record in records):
            await self._compare_clocks()
        return records

    async def found(
        self, topics: tuple[str, ...], holders: int | None = None, age_s: float = 0.0
    ) -> list[tuple[str, str, bytes]]:
        """Return what stands under these topics, unverified: topic, peer and sealed record of each.

        Args:
            holders: how many holders of each topic's records to ask; None: every peer that may be one.
            age_s: what another process of this host was answered does as well, if it asked no longer ago.
        """
        asked_s = SystemClock().now_s()
        since_s = asked_s - age_s
        known = self._known(topics, holders, since_s)
        other = self._under_way.get((topics, holders))
        if known is None and other is not None and other.asked_s >= since_s:
            # The processes of a host ask at the same ticks. An answer serves all of them; if there is none, each asks.
            await other.over.wait()
            known = self._known(topics, holders, since_s)
        if known is not None:
            return known
        own = self._under_way[topics, holders] = _UnderWay(asked_s)
        try:
            values = await self._asked(topics, holders)
            if values is not None:
                self._answer = _Answer(topics, holders, asked_s, values)
        finally:
            if self._under_way.get((topics, holders)) is own:
                del self._under_way[topics, holders]
            own.over.set()
        return values or []

    def at_hand(
        self, topics: tuple[str, ...], holders: int | None = None, age_s: float = 0.0
    ) -> list[tuple[str, str, bytes]] | None:
        """Return what `found` returns if nobody has to be asked for it; None: somebody has."""
        return self._known(topics, holders, SystemClock().now_s() - age_s)

    def _known(
        self, topics: tuple[str, ...], holders: int | None, since_s: float
    ) -> list[tuple[str, str, bytes]] | None:
        """Return what was answered since then, or where this node has never known another one what it holds itself."""
        answer = self._answer
        if answer is not None and answer.serves(topics, holders, since_s):
            return answer.values
        now_s = SystemClock().now_s()
        if self._lookup is None or not self._lost.is_empty or now_s - self._answered_s >= _ALONE_S or not self.alive:
            return None
        keys = {_key(self.namespace, topic): topic for topic in topics}
        found = self._lookup.alone(tuple(keys))
        return None if found is None else self._sealed(found, keys)

    async def _asked(self, topics: Sequence[str], holders: int | None) -> list[tuple[str, str, bytes]] | None:
        """Ask for what stands under these topics; None: p2pd does not answer."""
        daemon, node, lookup = self._daemon, self._node, self._lookup
        if daemon is None or node is None or lookup is None:
            return None
        keys = {_key(self.namespace, topic): topic for topic in topics}
        found = None if holders is None else await lookup.read(tuple(keys), holders)
        if found is None:
            # Whatever has happened, other nodes may be the nearest now: stores have to look for them as well.
            lookup.forget_all()
            if not await answers(daemon):
                # Meanwhile `revive` may have put another one in its place.
                if daemon is self._daemon:
                    emit(logger, DhtDeaf())
                    self._deaf = True
                return None
            self._answered_s = SystemClock().now_s()
            await self._look_around(daemon, node)
        await self._seek_lost(node)
        if found is None:
            found = lookup.alone(tuple(keys))
        if found is None:
            found = await self._search(node, tuple(keys))
        return self._sealed(found, keys)

    def _sealed(self, found: Found, keys: Mapping[DHTID, str]) -> list[tuple[str, str, bytes]]:
        """Return topic, peer and record of each value; what is none of ours is counted."""
        sealed: list[tuple[str, str, bytes]] = []
        for key, values in found.items():
            for subkey, value in values.items():
                if isinstance(subkey, str) and isinstance(value, bytes):
                    sealed.append((keys[key], subkey, value))
                else:
                    self.checker.malformed(subkey)
        return sealed

    @property
    def alive(self) -> bool:
        """Whether p2pd runs and answers, and somebody was found; else the node sees only what it has stored itself."""
        return self._runs and not self._deaf and not self._astray

    @property
    def _runs(self) -> bool:
        return self._daemon is not None and self._node is not None and child_of(self._daemon) is not None

    @property
    def clock_differences(self) -> Mapping[PeerId, tuple[float, str]]:
        return self.checker.clock_differences

    @property
    def clock_difference_s(self) -> float | None:
        return self.checker.clock_difference_s or self._difference_s

    async def aclose(self) -> None:
        """Leave the DHT and end p2pd; bounded, and safe to call while being cancelled."""
        await self._end()
        self.launcher.key_file.unlink(missing_ok=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.aclose()

    async def _search(self, node: DHTNode, keys: Sequence[DHTID]) -> Found:
        """Ask all who are near to the keys, as hivemind does."""
        # An infinite expiry asks all the nearest peers and merges: the first answer alone would hide newer records.
        answered = cast(dict[DHTID, Any], await node.get_many_by_id(keys, float("inf")))
        found: Found = {}
        for key, answer in answered.items():
            if answer is not None and isinstance(answer.value, dict):
                items = cast(dict[object, Any], answer.value).items()
                found[key] = {subkey: item.value for subkey, item in items}
        return found

    async def _look_around(self, daemon: P2P, node: DHTNode) -> None:
        """Remember which members are connected, for the time after p2pd's death."""
        if not members_of(node):
            return
        # p2pd may be dying; `alive` says so. hivemind closes the connection of a call only at its end, so none is
        # cancelled in the middle.
        with suppress(P2PDaemonError, OSError, EOFError), anyio.move_on_after(_LOOK_AROUND_S, shield=True):
            peers = [peer for peer in await daemon.list_peers() if peer.peer_id in members_of(node)]
            found = [f"{maddr}/p2p/{peer.peer_id.to_base58()}" for peer in peers for maddr in peer.addrs]
            # While it is alone, those that it knew last are still the ones to look for.
            self._neighbours = tuple(found[:_MAX_NEIGHBOURS]) or self._neighbours

    async def _seek_lost(self, node: DHTNode) -> None:
        """Ask some of those that this node has known and hivemind has forgotten; who answers is known again.

        A p2pd that was started since knows no addresses. Where the node has found back to a part of the swarm, it has
        to be told those of the initial peers.
        """
        present = [peer.to_base58() for peer in node.protocol.routing_table.peer_id_to_uid]
        lost = self._lost.due(present, SystemClock().now_s())
        if not lost:
            return
        maddrs = _by_peer((*self.launcher.initial_peers, *self._neighbours))
        with anyio.CancelScope(shield=True):  # a question ends after `WAIT_TIMEOUT_S`
            async with anyio.create_task_group() as tasks:
                for peer in map(PeerID.from_base58, lost):
                    tasks.start_soon(self._dial, node, peer, maddrs.get(peer, []))

    async def _ask(self, node: DHTNode, peer: PeerID) -> None:
        if await node.protocol.call_ping(peer) is not None:
            node.blacklist.register_success(peer)

    async def _greet(self, request: Any, _context: object) -> Any:
        """Answer a newcomer; see `control.greeting`."""
        answer = b"" if self.greeter is None else self.greeter.answer(request.node_id, self.peer_id)
        return cast(Any, dht_pb2).NodeInfo(node_id=answer)

    async def _ask_prefix(self, peer: str, found: list[str | None]) -> None:
        daemon, greeter, kind = self._daemon, self.greeter, cast(Any, dht_pb2).NodeInfo
        if daemon is None or greeter is None:
            return
        question = new_question()
        # A peer that answers nothing, as of an older version, tells nothing.
        with (
            suppress(P2PDaemonError, P2PHandlerError, OSError, EOFError, ValueError, DecodeError),
            anyio.move_on_after(_GREETING_TIMEOUT_S),
        ):
            who = PeerID.from_base58(peer)
            answer: Any = await daemon.call_protobuf_handler(who, _GREETING, kind(node_id=question), kind)
            if answer.node_id:
                found.append(greeter.prefix_in(answer.node_id, question, PeerId(peer)))

    async def _compare_clocks(self) -> None:
        """Ask a neighbour for its time: to a clock that is ahead, all that others announce has expired, unseen."""
        ahead_s = await self.ahead_s()
        if ahead_s is not None:
            self._difference_s = ahead_s if abs(ahead_s) > TTL_S else None

    async def _end(self) -> None:
        node, daemon, answers_calls = self._node, self._daemon, self._runs and not self._deaf
        self._node = self._daemon = self._lookup = None
        self._looked_s, self._answered_s, self._answer = -math.inf, -math.inf, None
        self._under_way.clear()  # nobody waits for what this p2pd was asked
        self._deaf = self._astray = False
        # A dead p2pd never answers that it has taken the handlers away.
        if node is not None and answers_calls:
            with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
                await node.shutdown()
        if daemon is not None:
            await end_daemon(daemon)


def is_peer_maddr(maddr: str) -> bool:
    """Whether it is a multiaddress that ends with a peer's id: others announce what they like."""
    try:
        return bool(_by_peer((maddr,)))
    except ValueError:
        return False


def _by_peer(maddrs: Iterable[str]) -> dict[PeerID, list[Multiaddr]]:
    """Return the addresses of each peer, of multiaddresses that end with its id; others are left out."""
    found: dict[PeerID, list[Multiaddr]] = {}
    for each in maddrs:
        maddr, ends_with_id, peer = each.rpartition("/p2p/")
        if ends_with_id:
            found.setdefault(PeerID.from_base58(peer), []).append(Multiaddr(maddr))
    return found


def _name(namespace: str, topic: str) -> str:
    return f"{namespace}/{topic}"


@lru_cache(maxsize=1024)
def _key(namespace: str, topic: str) -> DHTID:
    return DHTID.generate(source=_name(namespace, topic))


def _bootstrap_message(initial_peers: Sequence[str], error: Exception) -> str:
    if not initial_peers:
        return f"the DHT node did not start: {error}"
    return (
        f"none of the initial peers answered ({', '.join(initial_peers)}): {error}; "
        "check that the run is up and that these addresses are the ones it printed last"
    )
