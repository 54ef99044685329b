"""What the doctor asks a swarm that it has joined."""

from __future__ import annotations

import pytest
from tests.unit.cli.doctor.test_swarm_checks import seen

from shoal.cli.doctor import swarm_checks
from shoal.cli.doctor.facts import SwarmSeen, nothing_seen
from shoal.cli.doctor.joined_facts import see_large
from shoal.control.dht import DhtNode
from shoal.control.greeting import QUESTION_BYTES
from shoal.ids import PeerId

FIRST, SECOND = PeerId("first"), PeerId("second")


class Answering(DhtNode):
    """A node whose peers answer questions of up to so many bytes."""

    def __init__(self, **most_bytes: int) -> None:
        self._most_bytes = most_bytes

    async def takes(self, peer: str, size_bytes: int) -> bool:
        return size_bytes <= self._most_bytes[peer]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        (1 << 20, 0, "ok"),
        (0, 1 << 20, "ok"),
        (QUESTION_BYTES, 1 << 20, "warning"),
        (0, 0, "warning"),
    ],
)
async def test_a_link_on_which_all_waits_behind_a_full_packet_is_found_even_if_no_short_question_passes_any_more(
    first: int, second: int, verdict: str
) -> None:
    facts = nothing_seen(6.0)
    await see_large(facts, seen(), Answering(first=first, second=second), [FIRST, SECOND])
    assert isinstance(facts.swarm, SwarmSeen)
    assert swarm_checks.large_frames(facts.swarm).condition == verdict


@pytest.mark.anyio
async def test_without_the_id_of_a_peer_nobody_is_asked() -> None:
    facts = nothing_seen(6.0)
    await see_large(facts, seen(), Answering(), [])
    assert isinstance(facts.swarm, SwarmSeen)
    judged = swarm_checks.large_frames(facts.swarm)
    assert (judged.condition, judged.evidence) == ("skipped", "no initial peer is named by its id")
