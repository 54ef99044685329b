"""From verified records to a `SwarmView`: a pure function."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shoal.control.records import (
    ClientRecord,
    MirrorRecord,
    MonitorRecord,
    OtherVersion,
    Record,
    RunRecord,
    StageRecord,
    VerifiedRecord,
    hop_of,
    stage_topic,
)
from shoal.ids import PeerId, StageIndex
from shoal.swarm.view import Candidate, ClientPeer, MirrorPeer, PeerLabel, Replica, Run, SwarmView
from shoal.wire.messages.base import Hop


def build_view(records: Iterable[VerifiedRecord], labels: Mapping[PeerId, PeerLabel] | None = None) -> SwarmView:
    """Return the picture that these records give.

    A server that takes a stage or moves changes its topic and leaves its old record to expire. So of all records of one
    peer as a server, only the newest counts.

    Args:
        records: verified and not expired; at most one for each peer and topic.
        labels: see `SwarmView.labels`.
    """
    of_server: dict[PeerId, VerifiedRecord] = {}
    others: list[VerifiedRecord] = []
    for opened in records:
        if not is_server_topic(opened.topic):
            others.append(opened)
        elif opened.peer not in of_server or of_server[opened.peer].sequence < opened.sequence:
            of_server[opened.peer] = opened
    servers = [
        server_of(opened.peer, opened.record) for opened in of_server.values() if isinstance(opened.record, StageRecord)
    ]
    replicas = (s for s in servers if isinstance(s, Replica))
    candidates = (s for s in servers if not isinstance(s, Replica))
    monitors = (opened for opened in others if isinstance(opened.record, MonitorRecord))
    return SwarmView(
        replicas=tuple(sorted(replicas, key=lambda r: (r.stage, r.seniority))),
        candidates=tuple(sorted(candidates, key=lambda c: c.seniority)),
        clients=tuple(sorted(_clients(others), key=lambda c: c.place)),
        mirrors=tuple(sorted(_mirrors(others), key=lambda m: m.peer)),
        monitor=next((hop_of(opened) for opened in sorted(monitors, key=lambda o: o.peer)), None),
        run=_run(others),
        maddrs=_maddrs((*others, *of_server.values())),
        labels=labels or {},
    )


def label_of(record: Record | OtherVersion) -> PeerLabel | None:
    """Return what the peer of this record says that it is called; None where the record does not say it."""
    match record:
        case StageRecord():
            return PeerLabel("server", record.host, record.index)
        case ClientRecord():
            return PeerLabel("client", record.host)
        case MirrorRecord():
            return PeerLabel("mirror", record.host)
        case _:
            return None


def is_server_topic(topic: str) -> bool:
    """Return whether servers announce themselves under this topic."""
    return topic == stage_topic(None) or topic.startswith("stage.")


def server_of(peer: PeerId, record: StageRecord) -> Candidate:
    """Return what others see in a server's record: a `Replica` if it has a stage."""
    hop = Hop(peer, record.addresses)
    memory = (record.free_memory_bytes, record.device_memory_bytes)
    resources = (*memory, record.max_microbatch_samples, record.free_disk_bytes)
    if record.stage is None:
        return Candidate(hop, record.join_unix_s, *resources)
    return Replica(
        hop,
        record.join_unix_s,
        *resources,
        stage=StageIndex(record.stage),
        load=record.load,
        step=record.step,
        base_round=record.base_round,
        pinned=record.pinned,
        serving=record.serving,
        cap=record.cap,
    )


def _clients(records: Iterable[VerifiedRecord]) -> list[ClientPeer]:
    return [
        ClientPeer(
            hop_of(opened),
            record.join_unix_s,
            record.waits,
            tuple((each.peer, each.reason) for each in record.undialled),
            record.resumed,
        )
        for opened in records
        if isinstance(record := opened.record, ClientRecord)
    ]


def _mirrors(records: Iterable[VerifiedRecord]) -> list[MirrorPeer]:
    return [
        MirrorPeer(hop_of(opened), record.held_round)
        for opened in records
        if isinstance(record := opened.record, MirrorRecord)
    ]


def _maddrs(records: Iterable[VerifiedRecord]) -> tuple[str, ...]:
    """Who is there for the whole run comes first: the monitor, clients, mirrors, then servers by seniority."""
    order = {MonitorRecord: 0, ClientRecord: 1, MirrorRecord: 2, StageRecord: 3}
    joinable = [
        (order[type(record)], record.join_unix_s, opened.peer, record.maddrs)
        for opened in records
        if isinstance(record := opened.record, MonitorRecord | ClientRecord | MirrorRecord | StageRecord)
    ]
    return tuple(maddr for *_, maddrs in sorted(joinable) for maddr in maddrs)


def _run(records: Iterable[VerifiedRecord]) -> Run | None:
    announced = [(opened, record) for opened in records if isinstance(record := opened.record, RunRecord)]
    by_clients = {record.run_id for _, record in announced if not record.kept}
    announced = [each for each in announced if not each[1].kept or each[1].run_id not in by_clients]
    if not announced:
        return None
    opened, record = min(announced, key=lambda a: (a[1].ended, a[1].kept, a[1].join_unix_s, a[0].peer))
    return Run(
        run_id=record.run_id,
        num_stages=record.num_stages,
        client=opened.peer,
        ended=record.ended,
        kept=record.kept,
    )
