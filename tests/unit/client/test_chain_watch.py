"""What the user hears of a chain of records that was left, and what the summary says afterwards."""

from __future__ import annotations

from shoal.client.chain_watch import ChainWatch
from shoal.client.diary import LeftChain
from shoal.ids import PeerId
from shoal.swarm.records import Tip
from shoal.swarm.round_effects import ChainLeft, ReplicaIn

MET = ChainLeft(Tip(5, "ab" * 32, None), Tip(7, "cd" * 32, None), 3, 40, 6)


def test_a_chain_that_is_left_is_said_and_noted_once() -> None:
    notices: list[str] = []
    noted: list[tuple[LeftChain, ...]] = []
    chains = ChainWatch(notice=notices.append, note=noted.append)
    chains.take(ReplicaIn(PeerId("a")))
    for _ in range(2):
        chains.take(MET)
    [said] = notices
    assert "have gone on apart after round 3" in said
    assert "from record 7 (cdcdcdcd)" in said
    assert "in rounds 4 to 5 is lost (abababab), and 6 samples" in said
    left = LeftChain(5, "ab" * 32, 3, 40, 6)
    assert noted == [(left,)]
    assert chains.as_json() == [
        {"base_round": 5, "record": "ab" * 32, "common_round": 3, "samples": 40, "samples_freed": 6}
    ]
    again = ChainWatch(notice=notices.append)
    again.resume(chains.left)
    again.take(MET)
    assert (again.left, notices) == ((left,), [said])
