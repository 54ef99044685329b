"""What waits for peers that do not read is bounded, of each and in sum, and who holds most is the one that is lost."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shoal.ids import PeerId
from shoal.transport.unsent import Unsent


class Queues:
    """What waits for each peer; `a1` and `a2` come from the source `a`."""

    def __init__(self, max_each_bytes: int, max_total_bytes: int) -> None:
        self.held: Counter[PeerId] = Counter()
        self.unsent = Unsent(max_each_bytes, max_total_bytes, lambda peer: self.held[peer], lambda peer: peer[0])

    def post(self, name: str, num_bytes: int) -> str | None:
        """Queue a message; return who is lost for it."""
        peer = PeerId(name)
        too_much = self.unsent.posted(peer, num_bytes)
        lost = None if too_much is None else too_much[0]
        if lost is not None:
            del self.held[lost]
        if lost != peer:
            self.held[peer] += num_bytes
        return lost


def test_a_peer_for_which_too_much_waits_is_lost_itself() -> None:
    queues = Queues(100, 1000)
    assert [queues.post("a1", 60), queues.post("b1", 60)] == [None, None]
    assert queues.post("a1", 60) == "a1"
    assert queues.post("b1", 40) is None


def test_a_message_for_a_peer_that_has_taken_all_before_is_taken_however_long_it_is() -> None:
    queues = Queues(100, 1000)
    assert queues.post("a1", 400) is None
    assert queues.post("a1", 1) == "a1"


def test_what_was_taken_meanwhile_does_not_count() -> None:
    queues = Queues(100, 100)
    for _ in range(10):
        assert queues.post("a1", 60) is None
        assert queues.post("b1", 30) is None
        queues.held.clear()


def test_who_comes_under_many_names_from_one_host_loses_his_own_and_not_the_one_with_most() -> None:
    queues = Queues(100, 300)
    assert queues.post("m1", 90) is None
    flood = [f"f{number}" for number in range(50)]
    lost = [queues.post(name, 20) for name in flood]
    assert set(lost) <= {None, *flood}
    assert queues.held[PeerId("m1")] == 90
    assert queues.post("m2", 30) in flood


@given(st.lists(st.tuples(st.sampled_from(["a1", "a2", "b1", "c1", "c2"]), st.integers(1, 80), st.booleans())))
def test_no_more_waits_than_may_and_one_message_whatever_is_posted_and_taken(
    posts: list[tuple[str, int, bool]],
) -> None:
    queues = Queues(100, 250)
    for name, num_bytes, reads in posts:
        queues.post(name, num_bytes)
        assert max(queues.held.values(), default=0) <= 100
        assert queues.held.total() <= 250 + 80
        if reads:
            queues.held[PeerId(name)] = 0
