"""What the doctor makes of what it has seen of a swarm."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.cli.doctor import swarm_checks
from shoal.cli.doctor.diagnosis import Condition, Judged, skipped
from shoal.cli.doctor.facts import ClientSeen, SwarmSeen, nothing_seen
from shoal.control.initial_peers import Obstacle
from shoal.ids import PeerId, StageIndex
from shoal.swarm.view import Candidate, ClientPeer, PeerLabel, Replica, Run, SwarmView
from shoal.wire.handshake import PROTOCOL_VERSION
from shoal.wire.messages.base import Hop

RUN = Run("r-1", 2, PeerId("c"))
MINE = Replica(Hop(PeerId("mine"), ("unix:here:/s", "tcp:10.0.0.5:7")), 0.0, stage=StageIndex(0))
OTHER = Candidate(Hop(PeerId("other"), ("unix:there:/s", "tcp:10.0.0.6:7")), 0.0)
LABELS = {PeerId("mine"): PeerLabel("server", "box", 1)}


def seen(*, run: Run | None = RUN, client: ClientPeer | None = None, **values: Any) -> SwarmSeen:
    view = SwarmView((MINE,), (OTHER,), () if client is None else (client,), run=run, labels=LABELS)
    given: dict[str, Any] = {
        "machine": "here",
        "own_prefix": "ours",
        "key_fingerprint": "ab-cd",
        "prefixes": ("ours",),
        "ahead_s": 0.1,
        "takes_large": True,
        "large_bytes": 65536,
        "view": view,
        "other_versions": {},
    }
    return SwarmSeen(**{**given, **values})


def client_of(*undialled: tuple[str, str]) -> ClientPeer:
    named = tuple((PeerId(peer), reason) for peer, reason in undialled)
    return ClientPeer(Hop(PeerId("c"), ("tcp:10.0.0.1:7",)), 0.0, undialled=named)


def found(judged: Judged, condition: str, evidence: str, remedy: str) -> None:
    assert judged.condition == condition, judged
    assert evidence in judged.evidence
    assert remedy in judged.remedy


def peers(looks: dict[str, Obstacle | None], *, are_remembered: bool = False) -> Judged:
    facts = nothing_seen(6.0)
    facts.peers, facts.are_remembered = looks, are_remembered
    return swarm_checks.peers_reached(facts)


def test_each_peer_that_cannot_be_joined_at_is_said_with_its_remedy_and_one_that_can_is_enough() -> None:
    refused, silent = Obstacle("a", "h port 1: refused", "start it"), Obstacle("b", "h port 2: no answer", "open it")
    found(peers({"a": refused, "b": silent}), "failed", "port 1: refused\nh port 2: no answer", "start it\nopen it")
    found(peers({"a": refused, "b": None}), "warning", "1 of 2 initial peers can be joined at", "start it")
    assert peers({"a": None, "b": None}).condition is Condition.OK


def test_of_remembered_peers_some_may_be_gone_and_without_any_the_run_is_over() -> None:
    gone = Obstacle("a", "refused", "start it")
    assert peers({"a": gone, "b": None}, are_remembered=True).condition is Condition.OK
    judged = peers({"a": gone, "b": gone}, are_remembered=True)
    found(judged, "skipped", "any of the 2 peers of this host's newest run, so it is over", "")


def test_another_key_and_another_prefix_are_told_apart() -> None:
    judged = swarm_checks.swarm_key(seen(run=None, prefixes=(None, None)))
    found(judged, "failed", "whose fingerprint is ab-cd", "`shoal key fingerprint`")
    judged = swarm_checks.swarm_prefix(seen(run=None, prefixes=("theirs", None)))
    found(judged, "failed", "experiment_prefix = theirs, not ours", "--experiment-prefix theirs")
    assert swarm_checks.swarm_key(seen(run=None, prefixes=("theirs", None))).condition is Condition.OK
    assert swarm_checks.swarm_prefix(seen(run=None, prefixes=(None,))).condition is Condition.SKIPPED
    for prefixes in ((), ("ours",), ("ours", "theirs", None)):
        run = RUN if not prefixes else None
        for check in (swarm_checks.swarm_key, swarm_checks.swarm_prefix):
            assert check(seen(run=run, prefixes=prefixes)).condition is Condition.OK
            assert check(seen(run=None, prefixes=())).condition is Condition.SKIPPED


def test_a_swarm_without_a_run_and_one_whose_run_has_ended_are_found() -> None:
    found(swarm_checks.swarm_run(seen(run=None)), "failed", "announces no run called ours", "on the client's host")
    found(swarm_checks.swarm_run(seen(run=Run("r-1", 2, PeerId("c"), ended=True))), "failed", "r-1 has ended", "start")
    assert swarm_checks.swarm_run(seen()).condition is Condition.OK
    for other in (seen(run=None, prefixes=(None,)), seen(run=None, other_versions={PeerId("x"): 4})):
        assert swarm_checks.swarm_run(other).condition is Condition.SKIPPED


@pytest.mark.parametrize(
    ("ahead_s", "condition"), [(2.9, "ok"), (-2.9, "ok"), (4.0, "warning"), (-29.0, "warning"), (31.0, "failed")]
)
def test_a_clock_is_judged_by_what_records_and_the_dht_allow(ahead_s: float, condition: str) -> None:
    side = "ahead of" if ahead_s > 0 else "behind"
    remedy = "" if condition == "ok" else "timedatectl set-ntp true"
    found(swarm_checks.clock(seen(ahead_s=ahead_s)), condition, f"{abs(ahead_s):.1f} s {side} this host's", remedy)


def test_a_clock_that_nobody_has_told_is_not_said_to_agree() -> None:
    assert swarm_checks.clock(seen(ahead_s=None)).condition is Condition.SKIPPED


def test_peers_of_another_version_are_named_and_fatal_where_there_are_no_others() -> None:
    others = {PeerId("old"): PROTOCOL_VERSION - 1}
    found(swarm_checks.protocol(seen(other_versions=others)), "warning", "peer old speaks protocol version", "install")
    found(swarm_checks.protocol(seen(run=None, other_versions=others)), "failed", "upgrade the other side", "install")
    assert swarm_checks.protocol(seen()).condition is Condition.OK
    assert swarm_checks.protocol(seen(run=None)).condition is Condition.SKIPPED


def test_large_frames_that_stall_are_found_where_small_ones_pass() -> None:
    found(swarm_checks.large_frames(seen(takes_large=False)), "warning", "one of 64 KiB is not", "mtu 1280")
    assert swarm_checks.large_frames(seen()).condition is Condition.OK
    assert swarm_checks.large_frames(seen(takes_large=skipped("not known"))).condition is Condition.SKIPPED


def test_a_client_that_cannot_be_dialled_and_keys_set_against_the_run_are_found() -> None:
    client = client_of()
    lost = ClientSeen(client, "client@desk", "10.0.0.1:7: refused")
    found(swarm_checks.client_reached(lost), "failed", "client@desk: 10.0.0.1:7: refused", "network.data_port")
    assert swarm_checks.client_configuration(lost).condition is Condition.SKIPPED
    other = ClientSeen(client, "client@desk", "", "diloco.inner_steps = 7: the run has 5")
    assert swarm_checks.client_reached(other).condition is Condition.OK
    found(swarm_checks.client_configuration(other), "failed", "inner_steps = 7", "leave these keys out")
    assert swarm_checks.client_configuration(ClientSeen(client, "client@desk", "")).condition is Condition.OK


def test_a_server_of_this_host_that_the_client_cannot_dial_is_found() -> None:
    judged = swarm_checks.dialled_back(seen(client=client_of(("other", "no"), ("mine", "10.0.0.5:7: refused"))))
    found(judged, "failed", "cannot dial server 1@box: 10.0.0.5:7: refused", "--network.data-port")
    assert "other" not in judged.evidence
    judged = swarm_checks.dialled_back(seen(client=client_of(("other", "no"))))
    assert judged.condition is Condition.OK
    assert "server 1@box" in judged.evidence
    for nobody in (seen(), seen(client=client_of(), machine="elsewhere")):
        assert swarm_checks.dialled_back(nobody).condition is Condition.SKIPPED


def test_what_is_not_known_is_skipped_with_the_reason_and_never_passed() -> None:
    facts = nothing_seen(6.0, "nobody knows")
    for check in swarm_checks.SWARM_CHECKS:
        assert check.judge(facts) == skipped("nobody knows"), check.name
