"""hivemind's protocol between those who have the key of the swarm: nobody else is believed, served or noted.

    asks:    the message, and the proof that its sender has the key --> checked before anything else is looked at
    answers: the message, and the proof that its sender has the key <-- checked before anything else is looked at

p2pd proves to both ends who the other one is and hides what they say, so a proof names both and needs no more: who has
got one can show it to nobody else, and nobody else can show it. What hivemind does with a message is then done for
peers that could as well train: it looks up as many keys as are named, and notes every node that says hello. A
stranger's ping alone is answered, so that who comes with another key finds out
(`control.greeting`).
"""

# hivemind ships no type information.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUntypedBaseClass=false
# pyright: reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false
# pyright: reportUnknownParameterType=false, reportUnknownArgumentType=false

from __future__ import annotations

import hmac
from collections.abc import Sequence
from functools import cached_property
from typing import Any, cast

from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import dht_pb2

from shoal.clock import SystemClock
from shoal.control.dht_answers import FlatSerializer
from shoal.errors import RemoteProtocolError
from shoal.identity import derived_key
from shoal.ids import MAX_STAGES

_LABEL = b"shoal DHT 1"
_MOST_KEYS = MAX_STAGES + 16
"""Of one message: a swarm has a topic for each stage, and some more. Of one, several records are stored at once."""
_ASKS, _ANSWERS = b"asks", b"answers"


class Members:
    """Peers of one swarm, as seen by one of them: what it shows each other one, and who has shown it that."""

    def __init__(self, namespace: str) -> None:
        """Know nobody yet.

        Args:
            namespace: `identity.namespace`, a hash of the swarm's key and as secret.
        """
        self._key = derived_key(namespace.encode(), _LABEL)
        self._known: set[PeerID] = set()

    def __contains__(self, peer: PeerID) -> bool:
        return peer in self._known

    def __len__(self) -> int:
        """How many have shown it."""
        return len(self._known)

    def proof(self, does: bytes, sender: PeerID, receiver: PeerID) -> bytes:
        """Return what proves that a sender has the key when it asks or answers this receiver."""
        names = (does, sender.to_base58().encode(), receiver.to_base58().encode())
        return hmac.digest(self._key, b"\0".join(names), "sha3_256")

    def admit(self, proof: bytes, does: bytes, sender: PeerID, receiver: PeerID) -> bool:
        """Return whether a proof is the right one: then its sender is a member."""
        fits = hmac.compare_digest(proof, self.proof(does, sender, receiver))
        if fits:
            self._known.add(sender)
        return fits

    def dismiss(self, peer: PeerID) -> None:
        """A peer shows no proof any more: it is in another swarm now."""
        self._known.discard(peer)


def members_of(node: DHTNode) -> Members:
    """Return who has proven to a node to have the key."""
    return cast(KeyedProtocol, node.protocol).members


class _OfMember(P2PContext):
    """The context of a call whose caller has proven that it has the key."""


class KeyedProtocol(DHTProtocol):
    """hivemind's `DHTProtocol`; its `record_validator` knows the `members`."""

    # Not those of the class above, whose calls have other names.
    _rpc_handlers = _stub_type = None
    serializer = FlatSerializer

    def get_stub(self, peer: PeerID) -> Any:
        """Return what asks a peer with this node's proof."""
        return _KeyedStub(self, super().get_stub(peer), peer)

    async def rpc_ping(self, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
        """Answer also a stranger; only members are noted."""
        if isinstance(context, _OfMember) or self._has_proof(request, context):
            return self._proven(await super().rpc_ping(request, _member(context)), context)
        # A newcomer with another key is not to look for the fault in its firewall.
        return cast(Any, dht_pb2).PingResponse(peer=self.node_info, dht_time=SystemClock().unix_s(), available=True)

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        """Store what a member says.

        Raises:
            RemoteProtocolError: a stranger says it, or it is about more than there is.
        """
        self._require_proof(request, context)
        _require_few(request.keys)
        # What hivemind takes for its cache it would answer with in place of all that others have stored.
        request.in_cache[:] = [False] * len(request.keys)
        return self._proven(await super().rpc_store(request, _member(context)), context)

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        """Find what a member wants to know.

        Raises:
            RemoteProtocolError: a stranger wants to know it, or it is more than there is.
        """
        self._require_proof(request, context)
        _require_few(request.keys)
        if len(set(request.keys)) < len(request.keys):
            # Each time, all that stands there would be in the answer.
            raise RemoteProtocolError(f"{len(request.keys)} keys in one question, and not each of them once")
        return self._proven(await super().rpc_find(request, _member(context)), context)

    async def update_routing_table(self, node_id: DHTID | None, peer_id: PeerID, responded: bool = True) -> None:
        """Note members alone, whoever has answered."""
        if not responded or peer_id in self.members:
            await super().update_routing_table(node_id, peer_id, responded)

    @cached_property
    def members(self) -> Members:
        """Those who have proven to have the key."""
        return cast(Any, self.record_validator).members

    @property
    def me(self) -> PeerID:
        """Who this node is."""
        return cast(Any, self.p2p).peer_id

    def _has_proof(self, request: Any, context: Any) -> bool:
        return self.members.admit(request.auth.signature, _ASKS, context.remote_id, self.me)

    def _require_proof(self, request: Any, context: Any) -> None:
        if not self._has_proof(request, context):
            raise RemoteProtocolError("the peer has no key of this swarm")

    def _proven(self, response: Any, context: Any) -> Any:
        response.auth.signature = self.members.proof(_ANSWERS, self.me, context.remote_id)
        return response


class _KeyedStub:
    """Asks one peer, and believes its answer if it has the key."""

    def __init__(self, protocol: KeyedProtocol, stub: Any, peer: PeerID) -> None:
        self._protocol, self._stub, self._peer = protocol, stub, peer

    async def rpc_ping(self, request: Any, **how: Any) -> Any:
        """Also a stranger's answer counts as one, if it could be a node's, but it is no member for that."""
        response = await self._stub.rpc_ping(self._proven(request), **how)
        if self._is_proven(response):
            return response
        self._protocol.members.dismiss(self._peer)
        return response if len(response.peer.node_id) <= DHTID.HASH_NBYTES else None

    async def rpc_store(self, request: Any, **how: Any) -> Any:
        return self._require_proof(await self._stub.rpc_store(self._proven(request), **how))

    async def rpc_find(self, request: Any, **how: Any) -> Any:
        return self._require_proof(await self._stub.rpc_find(self._proven(request), **how))

    def _proven(self, request: Any) -> Any:
        request.auth.signature = self._protocol.members.proof(_ASKS, self._protocol.me, self._peer)
        return request

    def _is_proven(self, response: Any) -> bool:
        protocol = self._protocol
        return protocol.members.admit(response.auth.signature, _ANSWERS, self._peer, protocol.me)

    def _require_proof(self, response: Any) -> Any:
        if not self._is_proven(response):
            raise RemoteProtocolError(f"{self._peer} has answered, and has no key of this swarm")
        return response


def _require_few(keys: Sequence[bytes]) -> None:
    if len(keys) > _MOST_KEYS:
        raise RemoteProtocolError(f"{len(keys)} keys in one message, of which there are {_MOST_KEYS} at most")


def _member(context: Any) -> _OfMember:
    return _OfMember(context.handle_name, context.local_id, context.remote_id)
