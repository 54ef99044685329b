"""Which run is it, and who is its client? Asked of the peers themselves, because the registry alone is not believed.

    host that joins, or that waits -- AskRun --> client, servers
                                   <-- TellRun --   the run's configuration; the client, if the sender has it

What is announced in the DHT says whom to ask, and nothing more: a configuration is taken, a run is left and a client's
place is taken on an answer over a connection, at both ends of which the swarm's key and the peer's own were proven. The
configuration travels as msgpack, compressed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import anyio
import msgspec

from shoal.clock import SystemClock
from shoal.control.role_start import RoleStart, open_role_endpoint
from shoal.errors import MALFORMED, ConfigError, ConnectionLost, RecordRejected
from shoal.ids import PeerId
from shoal.swarm.client_turn import ANSWER_WITHIN_S
from shoal.transport.base import Endpoint, PeerLost, Received
from shoal.wire.messages.base import Hop
from shoal.wire.messages.control import MAX_CONFIG_BYTES, AskRun, TellRun

_MAX_UNPACKED_BYTES: Final = 256 * 1024
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class RunTeller:
    """The side that is asked. A `transport.dispatch.Handler`.

    Attributes:
        askers: peers that have asked and are still connected; they are told of the run's end as well.
    """

    def __init__(self, endpoint: Endpoint, shared: Mapping[str, Any], client: Callable[[], PeerId | None]) -> None:
        """Wait to be asked.

        Args:
            client: returns the run's client while this peer is connected with it, or is it.

        Raises:
            ConfigError: the configuration does not fit into an answer.
        """
        self.askers: set[PeerId] = set()
        self._endpoint = endpoint
        self._packed = pack_configuration(shared)
        self._client = client
        self._clock = SystemClock()  # whoever asks compares its own

    def receive(self, event: Received) -> bool:
        """Answer."""
        if not isinstance(event.message, AskRun):
            return False
        self.askers.add(event.peer)
        self._endpoint.post(event.peer, TellRun(self._packed, self._client(), self._clock.unix_s()))
        return True

    def peer_lost(self, peer: PeerId) -> None:
        self.askers.discard(peer)


async def ask_run(start: RoleStart, run_id: str, hops: Sequence[Hop]) -> tuple[PeerId, TellRun]:
    """Ask peers of a run that this process does not belong to; return who has answered first, and what.

    Raises:
        ConnectionLost: nobody did; the message says why.
    """
    # It dials, and is dialled by nobody.
    asking = msgspec.structs.replace(start, run_id=run_id, listen_tcp=None, socket_path=f"{start.socket_path}.ask")
    silent = {hop.peer: f"no answer within {ANSWER_WITHIN_S:.0f} s" for hop in hops}
    left = set(silent)
    async with open_role_endpoint(asking) as endpoint:
        for hop in hops:
            endpoint.introduce(hop)
            endpoint.post(hop.peer, AskRun())
        with anyio.move_on_after(ANSWER_WITHIN_S):
            async for event in endpoint.events():
                match event:
                    case Received(peer, TellRun() as told):
                        return peer, told
                    case PeerLost(peer, reason):
                        silent[peer] = reason
                        left.discard(peer)
                    case _:
                        pass
                if not left:
                    break
    raise ConnectionLost("; ".join(f"{peer}: {reason}" for peer, reason in silent.items()))


def pack_configuration(shared: Mapping[str, Any]) -> bytes:
    """Return the bytes for a `TellRun`.

    Args:
        shared: JSON values, see `config.shared.shared_configuration`.

    Raises:
        ConfigError: they do not fit into the message.
    """
    packed = zlib.compress(_encode(shared), level=9)
    if len(packed) > MAX_CONFIG_BYTES:
        raise ConfigError(
            f"the configuration that all hosts share takes {len(packed)} bytes, compressed; at most {MAX_CONFIG_BYTES} "
            "are told to hosts that join: shorten model.extra or quant.rules"
        )
    return packed


def unpack_configuration(packed: bytes) -> dict[str, Any]:
    """Return what `pack_configuration` was given, by a peer of the swarm; what it says is checked by who takes it.

    Raises:
        RecordRejected: the bytes are damaged, or far larger once unpacked.
    """
    stream = zlib.decompressobj()
    try:
        raw = stream.decompress(packed, _MAX_UNPACKED_BYTES)
        if not stream.eof:
            raise RecordRejected(
                f"the run's configuration is cut off, or has more than {_MAX_UNPACKED_BYTES} bytes once unpacked"
            )
        values = cast(object, _decode(raw))
    except (zlib.error, *MALFORMED) as error:
        raise RecordRejected(f"the run's configuration cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise RecordRejected("the run's configuration is no mapping")
    return cast(dict[str, Any], values)
