"""The fork server dies or hangs: roles go on, others are started by the next one, and every end stays clean."""

from __future__ import annotations

import errno
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from tests.integration.runtime.supervised import (
    DEADLINE_S,
    EAGER,
    all_end,
    gone_within,
    next_event,
    rest_of,
    start_program,
    told_by,
)
from tests.linux_calls import needs
from tests.windows import fork_server_pid

from shoal.clock import SystemClock
from shoal.errors import ConnectionLost, RemoteError
from shoal.runtime import fork_server_keeper
from shoal.runtime.fork_messages import TAG_NAME
from shoal.runtime.fork_server_process import ForkServerProcess
from shoal.runtime.fork_servers import ForkServers
from shoal.runtime.launcher_messages import InitialPeers, RoleExited, RoleReady, RoleRestarting
from shoal.runtime.linux_calls import LinuxCall, has
from shoal.runtime.process_info import descendants, read_stat, with_environment
from shoal.runtime.role_spec import RoleSpec
from shoal.runtime.run_dir import RunDir
from shoal.runtime.supervisor import Supervisor

# Hangs when it is imported for the second time in the directory that it lies in, and says so.
_SECOND_TIME = """
import pathlib, sys, threading
marker = pathlib.Path(__file__).with_suffix(".imported")
if marker.exists():
    sys.stdout.write("importing\\n")
    sys.stdout.flush()
    threading.Event().wait()
marker.touch()
"""


def _lose(supervisor: Supervisor) -> int:
    pid = fork_server_pid(supervisor)
    os.kill(pid, signal.SIGKILL)
    return pid


async def _replaced(supervisor: Supervisor, pid: int) -> None:
    """Wait until there is another fork server than this one."""
    await _until(lambda: fork_server_pid(supervisor) != pid)


async def _until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(DEADLINE_S):
        while not holds():  # noqa: ASYNC110 - what is waited for is the kernel's, and has no event
            await anyio.sleep(0.01)


def _descendants() -> set[int]:
    return {stat.pid for stat in descendants(os.getpid())}


def _of_run(supervisor: Supervisor) -> set[int]:
    """Return the processes below a supervisor, whoever is their parent."""
    entries = Path(f"/proc/{fork_server_pid(supervisor)}/environ").read_text().split("\0")
    tag = next(entry for entry in entries if entry.startswith(f"{TAG_NAME}="))
    return set(with_environment(tag))


async def test_roles_outlive_their_fork_server_and_the_next_one_serves_requests_that_come_meanwhile() -> None:
    notices: list[str] = []
    async with Supervisor(preload=["json"], notice=notices.append) as supervisor:
        echo = await supervisor.start(RoleSpec("echo", 0, "roles:echo"))
        steady = await supervisor.start(RoleSpec("server", 0, "roles:steady"))
        await echo.ready()
        await steady.ready()
        pid = _lose(supervisor)
        later = await supervisor.start(RoleSpec("server", 1, "roles:steady"))
        assert fork_server_pid(supervisor) != pid
        await later.ready()
        echo.send(InitialPeers(("a",)))
        assert (await next_event(echo, InitialPeers)).maddrs == ("a",)
        parents = [read_stat(handle.pid).parent_pid for handle in (echo, steady, later)]
        assert parents[2] == fork_server_pid(supervisor)
        assert not has(LinuxCall.PRCTL) or parents[:2] == [os.getpid()] * 2
        supervisor.kill(echo)
        assert str(await echo.wait()) == "killed by SIGKILL"
        await supervisor.stop(DEADLINE_S)
        assert [(await handle.wait()).code for handle in (steady, later)] == [0, 0]
        assert (echo.restarts, steady.restarts) == (0, 0)
    assert notices == ["the fork server has ended (killed by SIGKILL); it is started again, roles go on"]
    assert gone_within([pid, echo.pid, steady.pid, later.pid], 0) == []


async def test_roles_of_the_next_fork_server_have_the_time_of_the_others_though_the_wall_clock_was_set_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hour_s = 3600.0
    # As if it had been set back by an hour since this program was started.
    monkeypatch.setattr(SystemClock, "began_unix_s", SystemClock.began_unix_s + hour_s)
    async with Supervisor(preload=["json"]) as supervisor:
        told = await told_by(await supervisor.start(RoleSpec("server", 0, "roles:dated")))
        assert told["unix_s"] == pytest.approx(SystemClock().unix_s(), abs=hour_s / 2)
        await _replaced(supervisor, _lose(supervisor))
        told = await told_by(await supervisor.start(RoleSpec("server", 1, "roles:dated")))
        assert told["unix_s"] == pytest.approx(SystemClock().unix_s(), abs=hour_s / 2)


async def test_the_user_is_told_why_it_has_ended_also_where_the_next_one_starts_at_the_second_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notices: list[str] = []
    start_again, refusals = ForkServers.start_again, [OSError(errno.EAGAIN, "no more processes")]

    def refused_once(servers: ForkServers) -> ForkServerProcess:
        if refusals:
            raise refusals.pop()
        return start_again(servers)

    monkeypatch.setattr(ForkServers, "start_again", refused_once)
    async with Supervisor(preload=["json"], notice=notices.append) as supervisor:
        await supervisor.preloaded()
        await _replaced(supervisor, _lose(supervisor))
    assert notices == ["the fork server has ended (killed by SIGKILL); it is started again, roles go on"]


@needs(LinuxCall.PRCTL, "only the code is known that a role says, and this one ends without a word")
@pytest.mark.parametrize("code", [0, 3])
async def test_the_exit_code_of_an_adopted_role_is_the_right_one(code: int) -> None:
    async with Supervisor() as supervisor:
        handle = await supervisor.start(RoleSpec("obeying", 0, "roles:obeying", restart=EAGER))
        await handle.ready()
        await _replaced(supervisor, _lose(supervisor))
        handle.send(InitialPeers((str(code),)))
        assert (await next_event(handle, RoleExited)).status.code == code
        if code:
            # The policy is what it was: it has failed, and is started again by the next fork server.
            await next_event(handle, RoleReady)
            assert read_stat(handle.pid).parent_pid == fork_server_pid(supervisor)
        else:
            assert await rest_of(handle) == []


async def test_a_role_that_is_killed_with_the_fork_server_is_started_again_and_its_orphans_are_not_left() -> None:
    async with Supervisor() as supervisor:
        spec = RoleSpec("server", 0, "roles:parent", restart=EAGER)
        handle = await supervisor.start(spec)
        children = (await told_by(handle))["children"]
        frozen = fork_server_pid(supervisor)
        # It sees nothing of the role's end, and cannot kill what the role leaves.
        os.kill(frozen, signal.SIGSTOP)
        os.kill(handle.pid, signal.SIGKILL)
        await all_end([handle.pid])
        os.kill(frozen, signal.SIGKILL)
        assert (await next_event(handle, RoleExited)).status.code == -signal.SIGKILL
        await all_end(children)
        await next_event(handle, RoleReady)
        await supervisor.stop(DEADLINE_S)
        assert (await handle.wait()).ok
    assert _descendants().isdisjoint(children)


async def test_processes_that_a_killed_adopted_role_leaves_are_killed_at_once_and_reaped() -> None:
    async with Supervisor() as supervisor:
        handle = await supervisor.start(RoleSpec("server", 0, "roles:parent"))
        other = await supervisor.start(RoleSpec("server", 1, "roles:parent"))
        children = (await told_by(handle))["children"]
        others = (await told_by(other))["children"]
        await _replaced(supervisor, _lose(supervisor))
        os.kill(handle.pid, signal.SIGKILL)
        assert str(await handle.wait()) == "killed by SIGKILL"
        await all_end(children)
        await _until(lambda: _descendants().isdisjoint([handle.pid, *children]))
        assert gone_within(others, 0) == others
        await supervisor.stop(DEADLINE_S)
        assert (await other.wait()).ok


async def test_whenever_the_fork_server_is_killed_each_role_that_was_asked_for_runs_exactly_once() -> None:
    rng = random.Random(7)
    async with Supervisor() as supervisor:
        await supervisor.preloaded()
        for turn in range(4):
            handles = []

            async def start(index: int, turn: int = turn, handles: list = handles) -> None:
                handles.append(await supervisor.start(RoleSpec(f"role_{turn}", index, "roles:steady")))

            async with anyio.create_task_group() as tasks:
                for index in range(12):
                    tasks.start_soon(start, index)
                await anyio.sleep(rng.uniform(0.0, 0.02))
                _lose(supervisor)
            with anyio.fail_after(DEADLINE_S):
                for handle in handles:
                    await handle.ready()
            running = [handle.pid for handle in supervisor.roles]
            await _until(lambda running=running: _of_run(supervisor) == {fork_server_pid(supervisor), *running})
            assert all(handle.restarts == 0 for handle in supervisor.roles)
        await supervisor.stop(DEADLINE_S)
        assert [str(await handle.wait()) for handle in supervisor.roles] == ["exit code 0"] * 48


async def test_a_fork_server_that_hangs_is_replaced_when_something_is_asked_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fork_server_keeper, "_ANSWER_TIMEOUT_S", 2.0)
    notices: list[str] = []
    async with Supervisor(notice=notices.append) as supervisor:
        first = await supervisor.start(RoleSpec("server", 0, "roles:steady", restart=EAGER))
        await first.ready()
        frozen = fork_server_pid(supervisor)
        os.kill(frozen, signal.SIGSTOP)
        second = await supervisor.start(RoleSpec("server", 1, "roles:steady"))
        await second.ready()
        assert gone_within([frozen], 0) == []
        # The same when what it owes is the end of a role.
        frozen = fork_server_pid(supervisor)
        os.kill(frozen, signal.SIGSTOP)
        os.kill(second.pid, signal.SIGKILL)
        assert str(await second.wait()) == "killed by SIGKILL"
        assert gone_within([frozen], 0) == []
        await supervisor.stop(DEADLINE_S)
        assert (await first.wait()).ok
    assert len(notices) == 2
    assert "it did not answer and was killed" in notices[0]


async def test_a_run_whose_fork_server_hangs_ends_gracefully_and_does_not_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As long as it may take while a run goes on, it may not take at the end.
    monkeypatch.setattr(fork_server_keeper, "_ANSWER_TIMEOUT_S", 1e6)
    async with Supervisor() as supervisor:
        handle = await supervisor.start(RoleSpec("server", 0, "roles:steady"))
        family = await supervisor.start(RoleSpec("server", 1, "roles:parent"))
        pids = [fork_server_pid(supervisor), handle.pid, family.pid, *(await told_by(family))["children"]]
        await handle.ready()
        os.kill(fork_server_pid(supervisor), signal.SIGSTOP)
        with anyio.fail_after(DEADLINE_S):
            await supervisor.stop(1e6)
        assert [(await each.wait()).code for each in (handle, family)] == [0, 0]
    assert gone_within(pids, 0) == []


@pytest.fixture
def second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory whose module `second_time` can be imported once, and hangs the second fork server."""
    (tmp_path / "second_time.py").write_text(_SECOND_TIME)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


async def test_stop_does_not_wait_for_a_fork_server_that_is_still_importing(second_time: Path) -> None:
    refused: list[str] = []
    async with Supervisor(preload=["second_time"]) as supervisor:
        killed = await supervisor.start(RoleSpec("server", 0, "roles:steady", restart=EAGER))
        steady = await supervisor.start(RoleSpec("server", 1, "roles:steady"))
        await killed.ready()
        await steady.ready()
        await _replaced(supervisor, _lose(supervisor))
        os.kill(killed.pid, signal.SIGKILL)
        await next_event(killed, RoleRestarting)

        async def start() -> None:
            try:
                await supervisor.start(RoleSpec("server", 2, "roles:steady"))
            except ConnectionLost as error:
                refused.append(str(error))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(start)
            await anyio.wait_all_tasks_blocked()
            with anyio.fail_after(DEADLINE_S):
                await supervisor.stop(1000.0)
        assert refused == ["server 2 is not started: the supervisor is stopping"]
        assert (await steady.wait()).ok
        assert str(await killed.wait()) == "killed by SIGKILL"


async def _lose_all(pids: list[int]) -> None:
    async with Supervisor() as supervisor:
        handle = await supervisor.start(RoleSpec("server", 0, "roles:parent"))
        pids += [handle.pid, *(await told_by(handle))["children"]]
        while True:
            pids.append(_lose(supervisor))
            await _replaced(supervisor, pids[-1])


async def test_a_fork_server_that_dies_again_and_again_ends_the_run_and_leaves_nothing() -> None:
    pids: list[int] = []
    with pytest.raises(ConnectionLost, match=r"has ended 6 times within 60 s \(the last time: killed by SIGKILL\)"):
        await _lose_all(pids)
    assert gone_within(pids, 0) == []
    assert _descendants().isdisjoint(pids)


async def _lose_with(preload: Path, pids: list[int]) -> None:
    async with Supervisor(preload=[preload.stem]) as supervisor:
        handle = await supervisor.start(RoleSpec("server", 0, "roles:steady"))
        await handle.ready()
        pids.append(handle.pid)
        os.unlink(preload)
        _lose(supervisor)
        await anyio.sleep_forever()


async def test_a_fork_server_that_cannot_preload_any_more_ends_the_run_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "soon_gone.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    pids: list[int] = []
    with pytest.raises(RemoteError, match="fork server cannot preload: cannot import soon_gone"):
        await _lose_with(tmp_path / "soon_gone.py", pids)
    assert gone_within(pids, 0) == []


async def test_a_system_without_what_an_import_needs_is_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "needs_memory.py").write_text("raise OSError(30, 'Read-only file system')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RemoteError, match=r"cannot import needs_memory: .*Read-only file system: see whether /dev/shm"):
        async with Supervisor(preload=["needs_memory"]) as supervisor:
            await supervisor.preloaded()
    assert "Traceback" not in capfd.readouterr().err


def test_kill_9_of_the_supervisor_right_after_the_fork_server_leaves_nothing(tmp_path: Path) -> None:
    program, pids, run_dir = start_program(tmp_path)
    with program:
        os.kill(pids[0], signal.SIGKILL)
        program.kill()
    # Nobody but the roles is left to see the lifeline cut.
    assert gone_within(pids, DEADLINE_S) == []
    assert not run_dir.exists()


def test_kill_9_of_the_supervisor_while_the_next_fork_server_imports_leaves_nothing(
    second_time: Path, tmp_path: Path
) -> None:
    program, pids, run_dir = start_program(tmp_path, "second_time")
    with program:
        # Frozen, it cannot watch its lifeline, and no fork server has it below itself.
        os.kill(pids[3], signal.SIGSTOP)
        os.kill(pids[0], signal.SIGKILL)
        assert program.stdout is not None
        assert program.stdout.readline() == b"importing\n"
        children = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
        pids += [int(pid) for pid in children]
        program.kill()
    assert gone_within(pids, DEADLINE_S) == []
    assert not run_dir.exists()


def test_kill_9_of_the_supervisor_leaves_no_role_of_an_earlier_fork_server(tmp_path: Path) -> None:
    program, pids, run_dir = start_program(tmp_path)
    with program:
        for pid in pids[2:4]:
            os.kill(pid, signal.SIGSTOP)
        os.kill(pids[0], signal.SIGKILL)
        assert program.stdout is not None
        assert program.stdout.readline() == b"again\n"
        program.kill()
    assert gone_within(pids, DEADLINE_S) == []
    with RunDir(tmp_path):
        assert not run_dir.exists()
