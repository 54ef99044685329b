"""Connections between peers, what is refused on them, and whether servers can be dialled."""

from __future__ import annotations

from logging import DEBUG, WARNING

from shoal.events.base import Event
from shoal.ids import PeerId


class TransportUp(Event, frozen=True, tag="transport.up"):
    """There is a connection with a peer."""

    peer: PeerId
    peer_role: str


class SocketGone(Event, frozen=True, tag="transport.socket_gone"):
    """The socket at which peers of this host dial this process was removed, and is made again.

    Attributes:
        problem: why it cannot be made now, which is tried again; empty: it is there.
    """

    level = WARNING
    why = "somebody has cleared the folder for runtime files, as /tmp, of what was in use"
    do = "leave out shoal-* of what is cleared: a process that is started meanwhile reaches nobody"
    path: str
    problem: str


class TransportLost(Event, frozen=True, tag="transport.lost"):
    """The connection with a peer has ended, or none could be made."""

    peer: PeerId
    reason: str
    cause: str


class TransportRefused(Event, frozen=True, tag="transport.refused"):
    """A connection was refused, or closed because its peer broke a rule."""

    level = WARNING
    peer: PeerId | None
    source: str
    offence: str
    reason: str


class ProtocolViolated(Event, frozen=True, tag="protocol.violated"):
    """A peer has sent what its protocol forbids; its connection was closed."""

    level = WARNING
    peer: PeerId
    error: str


class ProtocolUnexpected(Event, frozen=True, tag="protocol.unexpected"):
    """A peer has sent a message that this role never takes; it was not used."""

    level = WARNING
    peer: PeerId
    kind: str


class RoleCounters(Event, frozen=True, tag="role.counters"):
    """What a role has counted when it ends."""

    counters: dict[str, int]


class RoleLinks(Event, frozen=True, tag="role.links"):
    """What a role has measured of its links with each peer when it ends."""

    links: dict[str, dict[str, float]]


class RoundLinks(Event, frozen=True, tag="round.links"):
    """What a server has measured of its links with each peer at the end of a round."""

    level = DEBUG
    links: dict[str, dict[str, float]]
    round: int


class ServerCame(Event, frozen=True, tag="server.came"):
    """A server that was not there when training began takes part from now on."""

    says = "{who} has come: it serves stage {stage}"
    peer: PeerId
    who: str
    stage: int


class ServerUndialled(Event, frozen=True, tag="server.undialled"):
    """A server cannot be dialled from the client's host."""

    level = WARNING
    why = "a firewall or a router stands before it, or it announces an address that leads elsewhere"
    do = (
        "on its host give an address that leads there (--public-ip), open and forward its TCP port (network.data_port "
        "fixes it, network.announce_data_port names a router's)"
    )
    says = "{who} cannot be dialled from {dialled_from}, so nobody trains over it: {reason}"
    who: str
    reason: str
    peer: PeerId | None = None
    dialled_from: str = "this host"


class ServerDialled(Event, frozen=True, tag="server.dialled"):
    """A server that could not be dialled from the client's host can be dialled now."""

    says = "{who} can be dialled from {dialled_from} now"
    who: str
    peer: PeerId | None = None
    dialled_from: str = "this host"
