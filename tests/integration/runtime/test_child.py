"""Children: what they answer, how their errors and their ends arrive, and that nothing of them is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.integration.runtime.child_program import PROGRAM, Answer, Arguments, Do, Done
from tests.integration.runtime.supervised import gone_within

from shoal.errors import ChildDied, ConfigError, DeadlineExceeded, RemoteError, ShoalError
from shoal.runtime import child as child_module
from shoal.runtime.child import Child, ChildFailed, ask

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.usefixtures("either_way")


def child(*, keeps_output: bool = False, new_session: bool = False) -> Child[Answer]:
    return Child(PROGRAM, Answer, (1, "two"), keeps_output=keeps_output, new_session=new_session)


def told(process: Child[Answer], what: str) -> None:
    process.tell(Do(what))
    assert process.hear() == Done(f"about to {what}")


def test_each_order_is_answered_as_often_as_the_child_likes() -> None:
    with child() as process:
        for _ in range(2):
            told(process, "rest")
            assert process.hear() == Done("rest")
        assert os.getpgid(process.pid) == os.getpgid(0)
    assert not gone_within([process.pid], 60.0)


def test_a_child_of_this_session_leaves_it_to_its_parent_what_an_interrupt_means() -> None:
    # A program that a shell has put into the background leaves it to others as well, and so do those that it starts.
    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    for new_session in (False, True):
        with child(new_session=new_session) as process:
            process.tell(Do("arguments"))
            session = process.pid if new_session else os.getsid(0)
            assert process.hear() == Arguments(["1", "two"], session, ignores_interrupt=is_ignored or not new_session)


def test_an_error_of_shoal_arrives_with_its_class_and_its_words() -> None:
    with child() as process:
        told(process, "refuse")
        with pytest.raises(ConfigError, match=re.escape("data.x = 1: say 2")) as raised:
            process.hear()
        assert type(raised.value) is ConfigError


def test_one_that_is_more_than_its_words_arrives_as_what_it_is_a_kind_of() -> None:
    with child() as process:
        told(process, "contradict")
        with pytest.raises(ShoalError, match="two logs") as raised:
            process.hear()
        assert type(raised.value) is ShoalError


def test_a_kind_of_error_that_is_not_known_here_arrives_as_one_of_another_process() -> None:
    for kind in ("NoSuchError", "MALFORMED", "Transient"):
        error = ChildFailed(kind, "the words").error()
        assert (type(error), str(error)) == (RemoteError, "the words")


@pytest.mark.parametrize(
    ("what", "code", "says"),
    [("die", -signal.SIGKILL, "killed by SIGKILL"), ("exit", 7, "exit code 7"), ("fail", 1, "exit code 1")],
)
def test_a_child_that_has_ended_says_how_and_what_it_printed_last(what: str, code: int, says: str) -> None:
    with child(keeps_output=True) as process:
        told(process, what)
        with pytest.raises(ChildDied, match=re.escape(f"the process {PROGRAM} has ended ({says})")) as raised:
            process.hear()
    assert raised.value.code == code
    if what == "fail":
        assert len(raised.value.lines) == 40
        assert raised.value.lines[-1] == "ValueError: this cannot be"
        assert "line 59" in raised.value.lines
        assert str(raised.value).endswith("ValueError: this cannot be")
    else:
        assert not raised.value.lines


def test_an_order_to_one_that_is_gone_is_no_error_but_its_missing_answer_is() -> None:
    with child() as process:
        told(process, "die")
        for _ in range(3):
            with pytest.raises(ChildDied):
                process.hear()
            process.tell(Do("rest"))


def test_one_that_does_not_answer_in_time_goes_on_and_is_ended_with_the_context() -> None:
    with child() as process:
        told(process, "hang")
        with pytest.raises(DeadlineExceeded, match=r"has said nothing within 0\.01 s"):
            process.hear(within_s=0.01)
        assert gone_within([process.pid], 0.0) == [process.pid]
    assert not gone_within([process.pid], 60.0)


def test_one_that_gets_time_to_end_ends_by_itself() -> None:
    process = child()
    told(process, "rest")
    assert process.hear() == Done("rest")
    assert process.close(60.0).code == 0
    assert process.close().code == 0


def test_another_thread_may_kill_it_while_this_one_listens() -> None:
    with child() as process:
        told(process, "hang")
        killer = threading.Thread(target=process.kill)
        killer.start()
        with pytest.raises(ChildDied, match="SIGKILL"):
            process.hear()
        killer.join()


async def test_that_it_has_ended_can_be_awaited() -> None:
    with child() as process:
        told(process, "die")
        await process.ended()
        process.kill()
        await process.ended()


def test_that_one_stands_still_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "LOOK_S", 0.01)
    monkeypatch.setattr(child_module, "STILL_S", 0.0)
    said: list[int] = []

    def let_go_on() -> None:
        said.append(process.pid)
        os.kill(process.pid, signal.SIGCONT)

    with child() as process:
        for number in range(1, 3):
            told(process, "stand still")
            assert process.hear(stands_still=let_go_on) == Done("stand still")
            assert said == [process.pid] * number


def test_a_question_is_answered_by_a_process_that_is_gone_then() -> None:
    assert ask(PROGRAM, Do("rest"), Done, within_s=60.0) == Done("about to rest")


def test_a_module_that_is_not_there_is_named() -> None:
    with pytest.raises(ChildDied, match="No module named no_such_program"):
        ask("no_such_program", Do("rest"), Done, within_s=60.0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_ends_with_its_parent_in_the_middle_of_an_order(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", PROGRAM, "parent"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.send_signal(number)
        parent.wait(60)
    assert not gone_within([pid], 60.0)
