"""The one picture of the swarm that roles act on: an immutable value with pure queries.

It is built by `control.membership` from the registry's records, less the peers that the data plane has lost. A server
that hosts no stage yet is a *candidate*; one that does is a *replica* of that stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from shoal.ids import PeerId, StageIndex
from shoal.wire.messages.base import Hop, ReplicaRef

NO_BASE = -1
"""`base_round` of a replica that holds no record's parameters yet; D_0 is computed, so 0 is what a fresh one holds."""

_NAMED_BY = 8
"""So many of its last characters tell a peer id from others, where a person reads them."""
_MAX_ASKED = 4
"""Servers, at a time: any of them knows which run it is."""

_UNIX = "unix:"
"""How an address `unix:<machine>:/path` begins."""
_TCP = "tcp:"
"""How an address `tcp:host:port` begins."""


def network_host(hop: Hop) -> str:
    """Return the host of the first address at which other machines reach a peer; empty if none can."""
    found = network_places(hop)
    return found[0].rpartition(":")[0] if found else ""


def network_places(hop: Hop) -> tuple[str, ...]:
    """Return where other machines reach a peer, as `host:port`."""
    return tuple(each.removeprefix(_TCP) for each in hop.addresses if each.startswith(_TCP))


def hosts_of(hop: Hop) -> frozenset[str]:
    """Return the name of a peer's machine; none if there are no others. Addresses on the network do not tell it: two
    homes may use the same ones."""
    found = (address.removeprefix(_UNIX) for address in hop.addresses if address.startswith(_UNIX))
    return frozenset(place.partition(":")[0] for place in found if not place.startswith("/"))


@dataclass(frozen=True)
class PeerLabel:
    """What a peer says that it is called. It is for people: nothing is decided by it.

    Attributes:
        index: its number among those of its role on its host; None: its host has one.
    """

    role: str
    host: str
    index: int | None = None

    def __str__(self) -> str:
        number = "" if self.index is None else f" {self.index}"
        return f"{self.role.replace('_', ' ')}{number}@{self.host}"


def label_of_role(role: str, index: int, host: str) -> PeerLabel:
    """Return what a role's process is called; a host has several servers and trainers, and one of each other role."""
    return PeerLabel(role, host, index if role in ("server", "trainer") else None)


@dataclass(frozen=True)
class Candidate:
    """A server that waits for a stage.

    Attributes:
        join_unix_s: when it joined, by its own wall clock; only the order counts.
        free_memory_bytes: host memory that a stage may use there, from when the server started; 0 is not known, and
            nothing is refused for it.
        device_memory_bytes: likewise of its device, where that has memory of its own (a GPU); 0: it computes in the
            host's memory.
        max_microbatch_samples: the most samples that its user lets it take in a microbatch of any stage; None: any
            number. Which stage it takes depends on it, and not on the `cap` of one that it hosts already.
        free_disk_bytes: that a stage may use of its disk, in place of memory; 0: none.
    """

    hop: Hop
    join_unix_s: float
    free_memory_bytes: int = 0
    device_memory_bytes: int = 0
    max_microbatch_samples: int | None = None
    free_disk_bytes: int = 0

    @property
    def peer(self) -> PeerId:
        """Its peer id."""
        return self.hop.peer

    @property
    def seniority(self) -> tuple[float, PeerId]:
        """Orders servers: who joined first, first; the same for everybody."""
        return (self.join_unix_s, self.hop.peer)

    @property
    def hosts(self) -> frozenset[str]:
        return hosts_of(self.hop)


@dataclass(frozen=True, kw_only=True)
class Replica(Candidate):
    """One server's copy of one stage.

    Attributes:
        load: steps that are open there.
        step: steps that it has committed since it joined.
        base_round: the last round whose record it holds (`NO_BASE`: none).
        pinned: its stage was given by its user; it is never asked to move.
        serving: it has opened a step; its stage is no longer a free choice.
        cap: the most samples that it takes in a microbatch of this stage, because its user says so or for want of
            memory; None: any number.
    """

    stage: StageIndex
    load: float = 0.0
    step: int = 0
    base_round: int = 0
    pinned: bool = False
    serving: bool = False
    cap: int | None = None

    @property
    def ref(self) -> ReplicaRef:
        """What a trainer is told of it."""
        return ReplicaRef(self.hop, self.cap)


@dataclass(frozen=True)
class ClientPeer:
    """A client, when it joined, whether it waits for its turn, which servers it has dialled in vain, and why, and
    whether its run goes on from a checkpoint."""

    hop: Hop
    join_unix_s: float
    waits: bool = False
    undialled: tuple[tuple[PeerId, str], ...] = ()
    resumed: bool = False

    @property
    def peer(self) -> PeerId:
        """Its peer id."""
        return self.hop.peer

    @property
    def place(self) -> tuple[bool, float, PeerId]:
        """Orders clients: those that do not wait, then who joined first; the same for everybody."""
        return (self.waits, self.join_unix_s, self.hop.peer)


@dataclass(frozen=True)
class MirrorPeer:
    """A mirror. Of every stage it holds the state of record `held_round`, or of a newer one; `NO_BASE`: not of all."""

    hop: Hop
    held_round: int = NO_BASE

    @property
    def peer(self) -> PeerId:
        """Its peer id."""
        return self.hop.peer


@dataclass(frozen=True)
class Run:
    """The training job as it is announced, `ended` and `kept` as in `control.records.RunRecord`."""

    run_id: str
    num_stages: int
    client: PeerId
    ended: bool = False
    kept: bool = False


@dataclass(frozen=True)
class SwarmView:
    """Everything that is known to be there now.

    Attributes:
        replicas: sorted by stage, then by seniority.
        candidates: sorted by seniority.
        clients: the one that trains first, then the longest-serving.
        mirrors: sorted by peer id.
        run: what the longest-serving client has announced; one that goes on comes before one that has ended. What hosts
            of servers announce counts while no client says anything of that run.
        maddrs: where the DHT can be joined; who is likely to be there for the whole run comes first.
        labels: of those that announce themselves, and of those that did: who is lost is still spoken of.
    """

    replicas: tuple[Replica, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    clients: tuple[ClientPeer, ...] = ()
    mirrors: tuple[MirrorPeer, ...] = ()
    monitor: Hop | None = None
    run: Run | None = None
    maddrs: tuple[str, ...] = ()
    labels: Mapping[PeerId, PeerLabel] = field(default_factory=dict[PeerId, PeerLabel])

    def name_of(self, peer: PeerId, role: str = "peer") -> str:
        """Return what people call a peer: `server 1@box2`; `server 1@box2#8abcd123` where that is not only one peer.

        Args:
            role: of a peer that does not announce itself, if it is known.
        """
        return self._names.get(peer) or f"{role} ...{peer[-_NAMED_BY:]}"

    def host_of(self, peer: PeerId) -> str:
        """Return what people call a peer's host; empty if it has not said it."""
        return self.labels[peer].host if peer in self.labels else ""

    def by_stage(self, stage: int) -> tuple[Replica, ...]:
        """Return the replicas of one stage, by seniority."""
        return tuple(r for r in self.replicas if r.stage == stage)

    def num_replicas(self, num_stages: int) -> tuple[int, ...]:
        """Return the number of replicas of each stage 0..num_stages-1."""
        counts = [0] * num_stages
        for replica in self.replicas:
            if replica.stage < num_stages:
                counts[replica.stage] += 1
        return tuple(counts)

    def missing_stages(self, num_stages: int) -> tuple[StageIndex, ...]:
        """Return the stages that have no replica."""
        return tuple(StageIndex(s) for s, count in enumerate(self.num_replicas(num_stages)) if not count)

    def max_pipelines(self, num_stages: int) -> int:
        """Return how many disjoint complete pipelines the replicas allow."""
        return min(self.num_replicas(num_stages), default=0)

    def replica(self, peer: PeerId) -> Replica | None:
        """Return a peer's replica, if it has one."""
        return self._replica_of.get(peer)

    @property
    def informed(self) -> tuple[Hop, ...]:
        """Who can say which run it is: its clients, and some of the servers."""
        clients = (client.hop for client in self.clients if not client.waits)
        return (*clients, *(server.hop for server in self.replicas[:_MAX_ASKED]))

    @property
    def num_servers(self) -> int:
        """Servers with and without a stage."""
        return len(self.replicas) + len(self.candidates)

    @property
    def num_peers(self) -> int:
        """All peers that announce themselves."""
        return self.num_servers + len(self.clients) + len(self.mirrors) + (self.monitor is not None)

    def without(self, peers: Collection[PeerId]) -> SwarmView:
        """Return the view as if these peers were gone."""
        return replace(
            self,
            replicas=tuple(r for r in self.replicas if r.peer not in peers),
            candidates=tuple(c for c in self.candidates if c.peer not in peers),
            clients=tuple(c for c in self.clients if c.peer not in peers),
            mirrors=tuple(m for m in self.mirrors if m.peer not in peers),
            monitor=None if self.monitor is not None and self.monitor.peer in peers else self.monitor,
        )

    def placed(self, stages: Mapping[PeerId, int]) -> SwarmView:
        """Return the view with replicas at the stages that they themselves have named: records come later."""
        moved = (
            replace(r, stage=StageIndex(stages[r.peer])) if stages.get(r.peer, r.stage) != r.stage else r
            for r in self.replicas
        )
        return replace(self, replicas=tuple(sorted(moved, key=lambda r: (r.stage, r.seniority))))

    @cached_property
    def _replica_of(self) -> dict[PeerId, Replica]:
        return {replica.peer: replica for replica in self.replicas}

    @cached_property
    def _names(self) -> dict[PeerId, str]:
        texts = {peer: str(label) for peer, label in self.labels.items()}
        bearers = Counter(texts.values())
        return {peer: text if bearers[text] == 1 else f"{text}#{peer[-_NAMED_BY:]}" for peer, text in texts.items()}
