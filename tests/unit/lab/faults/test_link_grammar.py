"""What users write for a link, and what they are told when it is none."""

from __future__ import annotations

import pytest

from shoal.errors import ConfigError
from shoal_lab.faults.link import Link, LinkConditions
from shoal_lab.faults.link_grammar import parse_link


@pytest.mark.parametrize(
    ("text", "conditions"),
    [
        ("20mbit", LinkConditions(rate_bytes_per_s=2.5e6)),
        ("500kbit", LinkConditions(rate_bytes_per_s=62_500)),
        ("1.5gbit", LinkConditions(rate_bytes_per_s=187.5e6)),
        ("150ms", LinkConditions(delay_s=0.075)),
        (" 20Mbit , 2s ", LinkConditions(rate_bytes_per_s=2.5e6, delay_s=1.0)),
        ("800us,jitter=20ms,loss=1%", LinkConditions(delay_s=0.0004, jitter_s=0.01, loss=0.01)),
    ],
)
def test_a_link_is_the_same_in_both_directions_and_times_are_of_the_round_trip(
    text: str, conditions: LinkConditions
) -> None:
    link = parse_link(text)
    for direction in (link.outward, link.inward):
        for field in LinkConditions.__slots__:
            assert getattr(direction, field) == pytest.approx(getattr(conditions, field))
    assert link.round_trip_s == pytest.approx(2 * conditions.delay_s)
    assert link.seed == 0


def test_the_seed_is_the_users() -> None:
    assert parse_link("seed=3,loss=2%") == Link(LinkConditions(loss=0.02), LinkConditions(loss=0.02), 3)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "'' is no rate"),
        ("20", "'20' is no rate"),
        ("20mb", "'20mb' is no rate.*20mbit,150ms"),
        ("-5ms", "'-5ms'"),
        ("20mbit,,5ms", "'' is no rate"),
        ("jitter=5", "'jitter=5'"),
        ("loss=0.01", "'loss=0.01'"),
        ("seed=-1", "'seed=-1'"),
        ("colour=red", "'colour=red'"),
        ("5ms,6ms", "delay is given twice"),
        ("0mbit", "'0mbit': a link needs a rate above zero"),
        ("loss=60%", "'loss=60%': a link that loses 60%"),
    ],
)
def test_what_is_no_link_is_named_with_the_whole_text(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parse_link(text)
    assert repr(text) in str(caught.value)


def test_conditions_that_cannot_be_are_refused() -> None:
    for wrong in ({"delay_s": -1.0}, {"jitter_s": float("inf")}, {"rate_bytes_per_s": 0.0}, {"bytes_per_flip": 0.0}):
        with pytest.raises(ConfigError, match="a link needs"):
            LinkConditions(**wrong)
