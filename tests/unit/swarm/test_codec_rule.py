"""As what the pseudo-gradients of the next round travel, by the links that replicas have measured."""

from __future__ import annotations

import pytest

from shoal.config.diloco import AUTO_BYTES_PER_VALUE, DilocoConfig
from shoal.ids import Ballot, PeerId
from shoal.swarm.codec_rule import BLOCKING_SHARE, ROOM, CodecRule
from shoal.wire.messages.round import Join, LinkReport, Payload

A, B, C = (PeerId(name) for name in "abc")
VALUES = 20_000_000
ROUND_S = 30.0
RULE = CodecRule(AUTO_BYTES_PER_VALUE)


def join(codec: str, *links: LinkReport, stage: int = 0, num_values: int = VALUES) -> Join:
    num_bytes = round(num_values * AUTO_BYTES_PER_VALUE[codec])
    payload = Payload("0" * 64, num_bytes) if num_bytes else None
    return Join(Ballot(1, PeerId("c"), 1), 1, stage, 4, (), (), (), links=links, payload=payload)


def link(peer: PeerId, mbit: float, round_trip_ms: float = 0.0) -> LinkReport:
    return LinkReport(peer, round_trip_ms, mbit)


def chosen(before: str, mbit: float, *, rule: CodecRule = RULE, trained_s: float | None = ROUND_S) -> str:
    """Of two replicas, of which one has the better link."""
    joins = {A: join(before, link(B, 1e4)), B: join(before, link(A, mbit))}
    return rule.chosen(before, joins, trained_s)


def mbit_for(codec: str, share: float = BLOCKING_SHARE) -> float:
    """How fast a link is over which a payload takes that share of the round."""
    return VALUES * AUTO_BYTES_PER_VALUE[codec] * 8e-6 / (share * ROUND_S)


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_the_finest_codec_is_taken_that_the_slowest_link_leaves_time_for(codec: str) -> None:
    assert chosen("int8", 1.01 * mbit_for(codec)) == codec
    assert chosen("int8", 0.99 * mbit_for(codec)) != codec
    assert chosen("int8", 0.001) == "2bit", "there is nothing that takes less"


@pytest.mark.parametrize("before", ["int4", "2bit"])
def test_a_finer_one_must_leave_room(before: str) -> None:
    assert chosen(before, 1.01 * ROOM * mbit_for("int8")) == "int8"
    assert chosen(before, 0.99 * ROOM * mbit_for("int8")) == "int4"


def test_the_same_link_does_not_change_the_codec_to_and_fro() -> None:
    for mbit in range(1, 400):
        first = chosen("int8", float(mbit))
        assert chosen(first, float(mbit)) == first


def test_while_steps_go_on_payloads_may_travel() -> None:
    mbit = 1.01 * mbit_for("int8", BLOCKING_SHARE + 0.5)
    assert chosen("int8", mbit) == "2bit"
    said = {"inner_steps": 10, "overlap_steps": 5, "averaging_compression": "auto"}
    rule = CodecRule.of(DilocoConfig.model_validate(said))
    assert rule is not None
    assert chosen("int8", mbit, rule=rule) == "int8"


def test_what_is_not_known_changes_nothing() -> None:
    assert chosen("2bit", 1e9, trained_s=None) == "2bit"
    assert RULE.chosen("int4", {A: join("int4"), B: join("int4")}, ROUND_S) == "int4"
    assert RULE.chosen("int4", {A: join("int4", link(B, 0.0)), B: join("int4")}, ROUND_S) == "int4"
    assert RULE.chosen("", {}, ROUND_S) == RULE.chosen("another version's", {}, ROUND_S) == "int8"


def test_a_round_trip_counts_and_a_host_has_no_links() -> None:
    joins = {A: join("int8", link(B, 1e6, round_trip_ms=2e3)), B: join("int8")}
    assert RULE.chosen("int8", joins, ROUND_S) == "2bit"
    joins = {A: join("int8", LinkReport(B, 0.0, 0.0, is_local=True)), B: join("int8")}
    assert RULE.chosen("2bit", joins, ROUND_S) == "int8"


def test_links_to_others_than_members_of_the_stage_do_not_count() -> None:
    slow = (link(B, 0.001), link(C, 0.001), link(A, 0.001), link(PeerId("gone"), 0.001))
    joins = {A: join("int8", *slow), B: join("int8", stage=1), C: join("int8", num_values=0)}
    assert RULE.chosen("int8", joins, ROUND_S) == "int8"


def test_without_auto_there_is_no_rule() -> None:
    assert CodecRule.of(DilocoConfig(averaging_compression="int4")) is None
