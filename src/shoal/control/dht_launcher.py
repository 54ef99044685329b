"""Starts p2pd and a hivemind node on it, so that hivemind checks records, tells the time and logs as we do."""

# hivemind ships no type information; what crosses this file's border is typed.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import msgspec
from hivemind.dht import node as dht_node
from hivemind.dht import protocol, routing
from hivemind.dht.node import DHTNode
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2P
from hivemind.utils import timed_storage
from hivemind.utils.logging import use_hivemind_log_handler

from shoal.clock import SystemClock
from shoal.control.dht_answers import believe_records_alone
from shoal.control.dht_daemon import end_daemon, start_daemon, unless_it_ends
from shoal.control.keyed_protocol import KeyedProtocol, Members
from shoal.control.maddrs import check_port_free, is_loopback, pinned
from shoal.control.record_checker import RecordChecker
from shoal.control.record_holders import REPLICAS
from shoal.errors import MALFORMED, ConfigError
from shoal.events.base import emit
from shoal.events.registry import DhtPortTaken

logger = logging.getLogger(__name__)

WAIT_TIMEOUT_S = 1.0
"""A request that takes longer is given up. Frozen peers cost it a few times over, so nothing that trains waits here."""
# After the first initial peer has answered, the others get this long.
_BOOTSTRAP_GRACE_S = 0.2
_IDLE_TIMEOUT_S = 4.0

_decode_bytes = msgspec.msgpack.Decoder(bytes).decode
_decode_text = msgspec.msgpack.Decoder(str).decode


class SignedRecords(RecordValidatorBase):
    """hivemind's question whether a record is valid, answered by a `RecordChecker`.

    Attributes:
        members: who has the key with which records are sealed, see `keyed_protocol`.
    """

    def __init__(self, checker: RecordChecker, members: Members) -> None:
        self._checker = checker
        self.members = members

    def validate(self, record: DHTRecord) -> bool:
        try:
            subkey, value = _decode_text(record.subkey), _decode_bytes(record.value)
        except MALFORMED:
            return self._checker.malformed(record.subkey)
        return self._checker.check(record.key, subkey, value, record.expiration_time)


@dataclass(frozen=True)
class DhtLauncher:
    """Everything that it takes to start p2pd and a node on it.

    Attributes:
        any_maddrs: the same as they were asked for, with any free port where none was named.
    """

    namespace: str
    state_dir: Path
    key_file: Path
    checker: RecordChecker
    initial_peers: tuple[str, ...]
    host_maddrs: tuple[str, ...]
    any_maddrs: tuple[str, ...]
    announce_maddrs: tuple[str, ...]
    startup_timeout_s: float

    def pinned(self, visible: Sequence[str]) -> DhtLauncher:
        """Return the same with the ports on which p2pd listens now in place of any free ones."""
        if self.announce_maddrs:
            # What it shows are these, and their ports may be those of a router.
            return self
        return replace(self, host_maddrs=pinned(self.host_maddrs, visible))

    def _free_maddrs(self) -> tuple[str, ...]:
        """The addresses to listen on; any free port where somebody has taken the one of before."""
        try:
            for maddr in self.host_maddrs:
                check_port_free(maddr)
        except ConfigError as error:
            emit(logger, DhtPortTaken(str(error)))
            return self.any_maddrs
        return self.host_maddrs

    async def launch(self, initial_peers: Sequence[str]) -> tuple[P2P, DHTNode]:
        """Start both; whatever goes wrong, no process is left."""
        # On loopback alone there is no NAT to get through.
        wide = not all(is_loopback(maddr) for maddr in self.host_maddrs)
        daemon = await start_daemon(
            self.state_dir,
            initial_peers,
            host_maddrs=self._free_maddrs(),
            announce_maddrs=self.announce_maddrs or None,
            identity_path=str(self.key_file),
            check_if_identity_free=False,
            idle_timeout=_IDLE_TIMEOUT_S,
            startup_timeout=self.startup_timeout_s,
            nat_port_map=wide,
            auto_nat=wide,
            use_relay=wide,
        )
        try:
            node = await unless_it_ends(daemon, self._node_on(daemon, initial_peers), self.startup_timeout_s)
        except BaseException:  # cancelled or failed, a daemon that was started must not outlive this call
            await end_daemon(daemon)
            raise
        believe_records_alone(node)
        return daemon, node

    async def _node_on(self, daemon: P2P, initial_peers: Sequence[str]) -> DHTNode:
        return await DHTNode.create(
            daemon,
            initial_peers=initial_peers,
            wait_timeout=WAIT_TIMEOUT_S,
            bootstrap_timeout=_BOOTSTRAP_GRACE_S,
            num_replicas=REPLICAS,
            # Reads have to be fresh, so caches would only add copies.
            cache_locally=False,
            cache_nearest=0,
            record_validator=SignedRecords(self.checker, Members(self.namespace)),
            # A peer behind a NAT, which cannot be dialled back, may still join: it warns.
            strict=False,
        )


def keep_time() -> None:
    """Let hivemind tell the time by our clock, which the wall clock's steps do not move, instead of by `time.time`."""
    for module in (timed_storage, routing, protocol, dht_node):
        cast(Any, module).get_dht_time = SystemClock().unix_s


def speak_keyed() -> None:
    """Have hivemind's nodes speak with members of the swarm alone."""
    cast(Any, dht_node).DHTProtocol = KeyedProtocol


def calm_logging() -> None:
    """Send hivemind's and p2pd's messages through our handlers, from warnings upwards."""
    use_hivemind_log_handler("nowhere")
    logging.getLogger("hivemind").setLevel(logging.WARNING)
    # hivemind renames the level for the whole process.
    logging.addLevelName(logging.WARNING, "WARNING")
    os.environ.setdefault("GOLOG_LOG_LEVEL", "ERROR")
