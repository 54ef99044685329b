"""The registry: the DHT, records in it, the addresses of the swarm, and which run it announces."""

from __future__ import annotations

from logging import DEBUG, ERROR, WARNING

from shoal.events.base import Event
from shoal.ids import PeerId


class DhtJoined(Event, frozen=True, tag="dht.joined"):
    """A role of this host takes part in the DHT at these addresses."""

    role: str
    maddrs: list[str]


class DhtTakenOver(Event, frozen=True, tag="dht.taken_over"):
    """The process that had the DHT node of this host has ended: this role has one from now on, for all of them."""

    maddrs: list[str]


class LanUnannounced(Event, frozen=True, tag="lan.unannounced"):
    """The run cannot be announced on the local network: hosts there have to be told an address."""

    error: str


class DhtRetrying(Event, frozen=True, tag="dht.retrying"):
    """The DHT could not be joined yet; it is tried again."""

    error: str


class DhtDeaf(Event, frozen=True, tag="dht.deaf"):
    """The daemon p2pd of this role does not answer any more; it is started again."""

    level = WARNING


class DhtDisconnected(Event, frozen=True, tag="dht.disconnected"):
    """The connection to p2pd has ended."""

    level = DEBUG
    error: str


class DhtDaemonKilled(Event, frozen=True, tag="dht.daemon_killed"):
    """The daemon p2pd did not end when asked, and was killed."""

    level = WARNING
    pid: int


class DhtPortTaken(Event, frozen=True, tag="dht.port_taken"):
    """Another program listens at the port that p2pd had before, so that it takes a free one."""

    level = WARNING
    error: str


class RegistryDhtLost(Event, frozen=True, tag="registry.dht_lost"):
    """The DHT node of this host has died; it is started again."""

    level = ERROR


class RegistryDhtBack(Event, frozen=True, tag="registry.dht_back"):
    """This role reaches the DHT again, and announces itself anew."""


class RegistryDhtUnreachable(Event, frozen=True, tag="registry.dht_unreachable"):
    """The DHT cannot be joined again yet; it is tried again."""

    level = WARNING
    error: str


class RegistryStoreRefused(Event, frozen=True, tag="registry.store_refused"):
    """No node of the DHT has taken a record; it is stored again soon."""

    topic: str


class RegistryReadGivenUp(Event, frozen=True, tag="registry.read_given_up"):
    """A read of the DHT took too long and was given up; the next one follows."""

    level = WARNING
    after_s: float


class RecordRefused(Event, frozen=True, tag="record.rejected"):
    """A record of the DHT was not believed."""

    level = WARNING
    subkey: str
    reason: str


class ClockDiffers(Event, frozen=True, tag="clock.differs"):
    """The clock of a peer differs from this host's so much that neither believes the other's records."""

    level = WARNING
    do = "set the clocks of both hosts, best by NTP"
    peer: PeerId
    ahead_s: int


class ClockCaughtUp(Event, frozen=True, tag="clock.caught_up"):
    """The time of records goes on from the wall clock, which agrees with other hosts: this one has not counted for so
    long, as a virtual machine that was paused."""

    level = WARNING
    behind_s: int


class PeerOtherVersion(Event, frozen=True, tag="peer.other_version"):
    """A peer has another version of shoal, and takes no part."""

    level = WARNING
    do = "install the same version on all hosts"
    peer: PeerId
    reason: str


class StageChosen(Event, frozen=True, tag="stage.chosen"):
    """A server has chosen the stage that it serves."""

    stage: int
    servers: int


class PeersUnwritten(Event, frozen=True, tag="peers.unwritten"):
    """The file with the addresses at which the swarm can be joined could not be written."""

    level = ERROR
    why = "the folder takes no file"
    do = "do it soon: who joins reads there where the swarm is"
    says = "cannot write {path} ({reason}); it may be out of date"
    path: str
    reason: str


class ScoutFoundRun(Event, frozen=True, tag="run.found"):
    """The scout has found a run that a client announces and that its peers confirm."""

    run: str
    client: PeerId


class RunUnconfirmed(Event, frozen=True, tag="run.unconfirmed"):
    """A run is announced, and none of its peers could be asked about it."""

    level = WARNING
    why = "its peers are dead, or their TCP ports are closed to this host"
    do = "see network.data_port and --public-ip on the client's host"
    run: str
    reason: str


class ScoutWatching(Event, frozen=True, tag="scout.watching"):
    """The scout watches the run for its host."""

    run: str


class RunIsAnnounced(Event, frozen=True, tag="run.announced"):
    """A client announces the run again."""

    says = "run {run} is announced again"
    run: str


class RunIsSilent(Event, frozen=True, tag="run.silent"):
    """No client announces the run any more; this host does, so that another client can find it."""

    why = "the client's host is lost or cut off; or this host was cut off, or stood still, and others have given it up"
    do = "wait: it goes on by itself if the client is there; else continue it from another host, or end this by Ctrl-C"
    says = "nobody announces run {run} to this host, nor is its client connected: this host keeps its state and waits"
    run: str


class RunHasEnded(Event, frozen=True, tag="run.over"):
    """The run is over, so that this host leaves."""

    says = "{reason}: this host leaves"
    run: str
    reason: str


class RunOverIgnored(Event, frozen=True, tag="run.over_ignored"):
    """A client that no longer leads the run has said that it is over; another one goes on with it."""

    level = WARNING
    run: str
    peer: PeerId


class IdentityCopied(Event, frozen=True, tag="identity.copied"):
    """A process of another host has the identity of one of this host, and both take part in the swarm.

    Attributes:
        who, by: the one of this host, and the other one.
        yields: whether the one of this host takes another identity; else that is expected of the other one.
    """

    level = WARNING
    why = "a home folder, a disk or an image with the identities of one host was copied to another one"
    do = (
        "nothing where servers or mirrors are meant: one of two takes another identity by itself, and the run goes on. "
        "Of two clients end one, remove ~/.config/shoal/identities on its host, and start it again"
    )
    says = "{who} and {by} have the same identity"
    who: str
    by: str
    yields: bool
