"""What a newcomer learns of a swarm before it sees any record of it."""

from __future__ import annotations

import pytest

from shoal.control.greeting import Greeter, misfit, new_question
from shoal.ids import PeerId

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
OURS = Greeter(KEY, "sandbox")
PEER = PeerId("peer")


def test_the_prefix_is_read_with_the_key_of_the_swarm_alone() -> None:
    question = new_question()
    answer = OURS.answer(question, PEER)
    assert b"sandbox" not in answer
    assert Greeter(KEY, "elsewhere").prefix_in(answer, question, PEER) == "sandbox"
    assert Greeter(OTHER_KEY, "sandbox").prefix_in(answer, question, PEER) is None


def test_an_answer_is_for_one_question_and_of_one_peer() -> None:
    question = new_question()
    answer = OURS.answer(question, PEER)
    assert OURS.prefix_in(answer, new_question(), PEER) is None
    assert OURS.prefix_in(answer, question, PeerId("another")) is None
    assert OURS.prefix_in(answer[:-1], question, PEER) is None
    assert OURS.prefix_in(b"", question, PEER) is None
    assert OURS.prefix_in(answer + bytes(512), question, PEER) is None


@pytest.mark.parametrize("prefix", ["", "a b", "$(reboot)", "a;b", "../a", "-x", "a\n", "a" * 65, "\x1b[2J"])
def test_what_could_be_no_prefix_is_none_whoever_says_it(prefix: str) -> None:
    question = new_question()
    assert OURS.prefix_in(Greeter(KEY, prefix).answer(question, PEER), question, PEER) is None


@pytest.mark.parametrize("question", [b"", b"x" * 31, b"x" * 33, b"x" * 100_000])
def test_what_is_no_question_gets_no_answer(question: bytes) -> None:
    assert OURS.answer(question, PEER) == b""


def test_what_does_not_fit_is_named_with_its_remedy() -> None:
    assert misfit(OURS, []) is None, "whoever tells nothing may be of an older version"
    assert misfit(OURS, [None, "sandbox"]) is None
    assert "experiment_prefix = mine, not sandbox" in str(misfit(OURS, [None, "mine"]))
    assert "--experiment-prefix mine" in str(misfit(OURS, [None, "mine"]))
    assert "another swarm key" in str(misfit(OURS, [None]))
    assert "shoal key fingerprint" in str(misfit(OURS, [None]))
