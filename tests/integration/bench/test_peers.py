"""Peer processes: called together, ended together, whatever happens to them or to us."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.runtime.supervised import gone_within

from shoal.errors import DeadlineExceeded, RemoteError
from shoal.runtime.clean_interpreter import allocator_settings
from shoal_lab.bench.peers import PeerProcesses

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
SAMPLE = "tests.integration.bench.sample_peer:main"


def test_every_peer_does_the_call_and_answers_stand_in_their_order(tmp_path: Path) -> None:
    arguments = {"left": str(tmp_path)}
    with PeerProcesses(SAMPLE, 3, arguments) as peers:
        pids = peers.pids
        assert peers.call("describe", 1.5, "x", [2]) == [[i, 3, arguments, 1.5, "x", [2]] for i in range(3)]
        assert peers.call("threads") == ["1"] * 3
    assert not gone_within(pids, 60.0)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "2"}, "each peer leaves its context"


def test_a_plain_loop_allocates_as_the_roles_do_that_it_is_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "3")
    wanted = allocator_settings()
    assert len(wanted) > 1
    assert wanted["MALLOC_ARENA_MAX"] == "3", "what the user has set stays"
    with PeerProcesses(SAMPLE, 1) as peers:
        (found,) = peers.call("environment")
    assert {name: found.get(name) for name in wanted} == wanted


def test_an_error_in_one_peer_is_raised_with_its_traceback_and_ends_the_others() -> None:
    with PeerProcesses(SAMPLE, 2) as peers:
        pids = peers.pids
        with pytest.raises(RemoteError, match=r"peer 1 .* has failed in the call fail") as raised:
            peers.call("fail", 1)
        assert "ValueError: peer 1 cannot" in str(raised.value)
        assert "sample_peer.py" in str(raised.value)
        assert not gone_within(pids, 60.0)
        with pytest.raises(RemoteError, match="have ended"):
            peers.call("describe")


def test_a_peer_that_cannot_start_is_an_error_with_its_traceback() -> None:
    with (
        pytest.raises(RemoteError, match=r"peer 1 .* in its start(.|\n)*RuntimeError: there is no such thing"),
        PeerProcesses("tests.integration.bench.sample_peer:cannot_start", 2),
    ):
        pytest.fail("it has started")


def test_a_function_that_does_not_exist_is_named() -> None:
    with (
        pytest.raises(RemoteError, match="no_such_function"),
        PeerProcesses("tests.integration.bench.sample_peer:no_such_function", 1),
    ):
        pytest.fail("it has started")


def test_a_peer_that_is_killed_is_an_error_that_says_so() -> None:
    with PeerProcesses(SAMPLE, 2) as peers:
        pids = peers.pids
        with pytest.raises(RemoteError, match=r"peer 0 .* was killed by SIGKILL in the call die"):
            peers.call("die", 0)
        assert not gone_within(pids, 60.0)


def test_a_peer_that_does_not_answer_by_the_deadline_is_named_and_ended() -> None:
    with PeerProcesses(SAMPLE, 2) as peers:
        pids = peers.pids
        with pytest.raises(DeadlineExceeded, match="the call hang: peer 1 "):
            # The other one has to answer by then, on a busy machine too.
            peers.call("hang", 1, timeout_s=3.0)
        assert not gone_within(pids, 60.0)


def test_children_that_peers_have_left_behind_are_ended_with_them() -> None:
    with PeerProcesses(SAMPLE, 2) as peers:
        children = peers.call("with_child")
    assert not gone_within(children, 60.0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_peers_in_the_middle_of_a_call_end_with_their_parent(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.integration.bench.killed_program"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as program:
        assert program.stdout is not None
        pids = json.loads(program.stdout.readline())
        assert len(pids) == 4
        program.send_signal(number)
        program.wait(60)
    assert not gone_within(pids, 60.0)
