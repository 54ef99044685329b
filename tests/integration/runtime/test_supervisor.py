"""The supervisor with real processes: start, messages, restart, and every way in which a run can end."""

from __future__ import annotations

import errno
import gc
import os
import platform
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from anyio.abc import TaskStatus
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

from shoal.errors import ConnectionLost, RemoteError
from shoal.runtime import fork_server_keeper
from shoal.runtime.fork_servers import ForkServers
from shoal.runtime.launch import Launch
from shoal.runtime.launcher_messages import (
    InitialPeers,
    LauncherAnswer,
    RoleAsks,
    RoleExited,
    RoleFailed,
    RoleGivenUp,
    RoleReady,
    RoleRestarted,
    RoleRestarting,
    ScoutReady,
    StartTrainer,
    UserNotice,
)
from shoal.runtime.linux_calls import LinuxCall
from shoal.runtime.role_handle import RoleHandle
from shoal.runtime.role_spec import RestartPolicy, RoleSpec
from shoal.runtime.run_dir import RunDir
from shoal.runtime.supervisor import Supervisor


def _shown(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text().rstrip("\0\n")


async def test_three_roles_get_ready_and_leave_gracefully_in_the_order_asked_for(tmp_path: Path) -> None:
    async with Supervisor(preload=["json"]) as supervisor:
        handles = [
            await supervisor.start(RoleSpec(role, 0, "roles:steady", role.encode()))
            for role in ("server", "trainer", "monitor")
        ]
        for handle in handles:
            # The main thread, and the one that watches the lifeline.
            assert await told_by(handle) == {"payload": handle.spec.role, "threads": 2}
        left: list[str] = []

        async def note(handle: RoleHandle) -> None:
            await handle.wait()
            left.append(handle.spec.role)

        async with anyio.create_task_group() as tasks:
            for handle in handles:
                tasks.start_soon(note, handle)
            await supervisor.stop(DEADLINE_S, order=[["trainer"], ["server"]])
        assert left == ["trainer", "server", "monitor"]
        for handle in handles:
            assert (await handle.wait()).ok
            assert await rest_of(handle) == [ScoutReady, UserNotice, RoleExited]
        pid = fork_server_pid(supervisor)
    assert gone_within([pid], 0) == []


async def test_a_role_looks_for_garbage_as_often_as_usual_but_not_among_what_was_imported_for_all() -> None:
    async with Supervisor(preload=["json"]) as supervisor:
        role = await supervisor.start(RoleSpec("server", 0, "roles:collecting"))
        said = await told_by(role)
        assert said["threshold"] == list(gc.get_threshold())
        assert said["num_frozen"] > 1000


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="others keep what is freed as they like")
async def test_a_role_computes_in_memory_that_it_has_already() -> None:
    async with Supervisor() as supervisor:
        role = await supervisor.start(RoleSpec("server", 0, "roles:computing"))
        _, *again = (await told_by(role))["faults"]
    assert max(again) < 1000, "of 24,576 pages"


@needs(LinuxCall.PRCTL, "a process is called as its program is")
async def test_ps_shows_what_a_process_is() -> None:
    async with Supervisor() as supervisor:
        handle = await supervisor.start(RoleSpec("data_server", 3, "roles:steady"))
        await handle.ready()
        assert _shown(handle.pid, "comm") == "shoal:data_se:3"
        assert _shown(handle.pid, "cmdline") == "shoal:data_server:3"
        assert _shown(fork_server_pid(supervisor), "cmdline") == "shoal:fork_server"


async def test_messages_go_to_a_role_and_requests_get_their_reply() -> None:
    async with Supervisor() as supervisor:
        echo = await supervisor.start(RoleSpec("echo", 0, "roles:echo"))
        echo.send(InitialPeers(("a", "b")))
        assert (await next_event(echo, InitialPeers)).maddrs == ("a", "b")
        asking = await supervisor.start(RoleSpec("client", 0, "roles:asking"))
        request = await next_event(asking, RoleAsks)
        assert request == RoleAsks(0, StartTrainer(7, 1), generation=1)
        asking.reply(request, LauncherAnswer("no room"))
        assert (await next_event(asking, UserNotice)).text == "no room"
        assert (await asking.wait()).ok


async def test_a_role_gives_way_as_much_as_it_is_told_also_when_it_is_started_again() -> None:
    own = os.nice(0)
    async with Supervisor() as supervisor:
        plain = await supervisor.start(RoleSpec("trainer", 0, "roles:steady"))
        await plain.ready()
        nice = await supervisor.start(RoleSpec("server", 0, "roles:steady", restart=EAGER, nice=3))
        await next_event(nice, RoleReady)
        assert _niceness(plain.pid) == {own}
        assert _niceness(nice.pid) == {min(19, own + 3)}, "of all its threads"
        os.kill(nice.pid, signal.SIGKILL)
        await next_event(nice, RoleReady)
        assert _niceness(nice.pid) == {min(19, own + 3)}


def _niceness(pid: int) -> set[int]:
    return {os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir(f"/proc/{pid}/task")}


async def test_output_of_a_role_goes_to_its_file(tmp_path: Path) -> None:
    path = tmp_path / "noisy_0.log"
    async with Supervisor() as supervisor:
        handle = await supervisor.start(RoleSpec("noisy", 0, "roles:noisy", output_path=str(path)))
        assert (await handle.wait()).ok
    assert sorted(path.read_text().splitlines()) == ["to standard error", "to standard output"]


async def test_a_role_serves_though_the_file_of_its_output_does_not_answer(tmp_path: Path) -> None:
    path = tmp_path / "noisy_0.out"
    os.mkfifo(path)  # whoever opens it to write waits for a reader, as for the server of a disk
    async with Supervisor() as supervisor:
        handle = await supervisor.start(RoleSpec("steady", 0, "roles:steady", output_path=str(path)))
        await next_event(handle, RoleReady)
        os.close(os.open(path, os.O_RDONLY))  # it has asked for it, and prints there from now on


@pytest.mark.parametrize(
    ("payload", "code", "reason"),
    [(b"user", 2, "device: there is no cuda:9"), (b"group", 2, "device: there is no cuda:9"), (b"bug", 1, "a bug")],
)
async def test_a_failing_role_says_why_and_exits_with_the_right_code(
    payload: bytes, code: int, reason: str, tmp_path: Path
) -> None:
    async with Supervisor() as supervisor:
        spec = RoleSpec("failing", 0, "roles:failing", payload=payload, output_path=str(tmp_path / "log"))
        handle = await supervisor.start(spec)
        error = await next_event(handle, RoleFailed)
        assert error.reason == reason
        assert (await handle.wait()).code == code
        with pytest.raises(RemoteError, match=f"failing:0 ended before it was ready: {reason}"):
            await handle.ready()
    assert ("Traceback" in (tmp_path / "log").read_text()) == (payload == b"bug")


async def test_a_killed_role_is_reported_restarted_and_given_up_at_last() -> None:
    async with Supervisor() as supervisor:
        handle = await supervisor.start(RoleSpec("server", 0, "roles:steady", restart=EAGER))
        pids: set[int] = set()
        for attempt in range(3):
            # A process may say that it serves before the fork server has said which one it is.
            await next_event(handle, RoleRestarted if attempt else RoleReady)
            pids.add(handle.pid)
            os.kill(handle.pid, signal.SIGKILL)
            assert (await next_event(handle, RoleExited)).status.code == -signal.SIGKILL
        assert await rest_of(handle) == [RoleGivenUp]
        assert len(pids) == 3
        assert handle.restarts == 2
        assert str(await handle.wait()) == "killed by SIGKILL"


async def test_a_role_that_cannot_be_started_again_is_said_to_have_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(_: RoleHandle) -> None:
        raise RemoteError("no memory")

    async with Supervisor() as supervisor:
        handle = await supervisor.start(RoleSpec("server", 0, "roles:steady", restart=EAGER))
        await next_event(handle, RoleReady)
        monkeypatch.setattr(supervisor, "_launch", fails)
        os.kill(handle.pid, signal.SIGKILL)
        assert (await next_event(handle, RoleFailed)).reason == "no memory"
        assert await rest_of(handle) == []
    assert "role.restart_failed" in caplog.messages


async def test_a_role_for_which_no_file_is_left_is_refused_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    async with Supervisor() as supervisor:
        handle = await supervisor.start(RoleSpec("server", 0, "roles:steady"))
        with monkeypatch.context() as patch:
            patch.setattr("shoal.runtime.supervisor.socket.socketpair", fails)
            with pytest.raises(RemoteError, match="trainer:0 cannot be started: too many open files"):
                await supervisor.start(RoleSpec("trainer", 0, "roles:steady"))
        await next_event(handle, RoleReady)


async def test_a_role_that_serves_on_is_started_again_when_somebody_has_told_it_to_end() -> None:
    async with Supervisor() as supervisor:
        policy = replace(EAGER, serves_on=True)
        handle = await supervisor.start(RoleSpec("data_server", 0, "roles:steady", restart=policy))
        await next_event(handle, RoleReady)
        os.kill(handle.pid, signal.SIGTERM)
        await next_event(handle, RoleRestarted)
        await next_event(handle, RoleReady)


@pytest.mark.parametrize("error", [RemoteError("cannot fork"), OSError(errno.EMFILE, "too many open files")])
async def test_a_role_that_cannot_be_started_for_a_moment_is_started_at_the_next_try(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Supervisor() as supervisor:
        launch, failures = supervisor._launch, [error]

        async def fails_once(handle: RoleHandle) -> Launch:
            if failures:
                raise failures.pop()
            return await launch(handle)

        handle = await supervisor.start(RoleSpec("server", 0, "roles:steady", restart=EAGER))
        await next_event(handle, RoleReady)
        monkeypatch.setattr(supervisor, "_launch", fails_once)
        os.kill(handle.pid, signal.SIGKILL)
        await next_event(handle, RoleRestarted)
        await next_event(handle, RoleReady)
    assert not failures


@pytest.mark.parametrize("only_killed", [True, False])
async def test_whose_error_is_its_last_word_is_not_started_again(only_killed: bool) -> None:
    policy = replace(EAGER, only_killed=only_killed)
    async with Supervisor() as supervisor:
        handle = await supervisor.start(RoleSpec("client", 0, "roles:failing_later", restart=policy))
        with anyio.fail_after(DEADLINE_S):
            status = await handle.wait()
    assert status.code == 1
    assert handle.last_error == "a bug"
    assert handle.restarts == (0 if only_killed else 2)


async def test_nor_is_one_that_would_meet_the_same_error_again() -> None:
    policy = replace(EAGER, serves_on=True, last_words=frozenset({"ZeroDivisionError"}))
    async with Supervisor() as supervisor:
        handle = await supervisor.start(RoleSpec("data_server", 0, "roles:failing_later", restart=policy))
        with anyio.fail_after(DEADLINE_S):
            assert (await handle.wait()).code == 1
    assert handle.restarts == 0


async def test_stop_does_not_wait_for_the_pause_before_a_restart() -> None:
    policy = RestartPolicy(max_restarts=1, first_delay_s=1000.0, max_delay_s=1000.0)
    async with Supervisor() as supervisor:
        handle = await supervisor.start(RoleSpec("server", 0, "roles:steady", restart=policy))
        await handle.ready()
        os.kill(handle.pid, signal.SIGKILL)
        await next_event(handle, RoleRestarting)
        with anyio.fail_after(DEADLINE_S):
            await supervisor.stop(1000.0)
        assert not handle.running


async def test_processes_that_a_killed_role_leaves_are_killed_at_once() -> None:
    async with Supervisor() as supervisor:
        handle = await supervisor.start(RoleSpec("server", 0, "roles:parent"))
        other = await supervisor.start(RoleSpec("server", 1, "roles:parent"))
        children = (await told_by(handle))["children"]
        others = (await told_by(other))["children"]
        os.kill(handle.pid, signal.SIGKILL)
        await handle.wait()
        # Without a subreaper it is the supervisor who kills them, so it has to go on.
        await all_end(children)
        assert gone_within(others, 0) == others
        await supervisor.stop(DEADLINE_S)
        assert (await other.wait()).ok


async def test_a_role_that_does_not_leave_in_time_is_killed() -> None:
    async with Supervisor() as supervisor:
        handle = await supervisor.start(RoleSpec("stubborn", 0, "roles:stubborn"))
        handle.reply(await next_event(handle, RoleAsks), LauncherAnswer())
        await supervisor.stop(0.1)
        assert str(await handle.wait()) == "killed by SIGKILL"


async def test_a_role_that_is_stopped_before_it_serves_leaves_gracefully_too() -> None:
    async with Supervisor() as supervisor:
        handles = [await supervisor.start(RoleSpec("server", index, "roles:steady")) for index in range(3)]
        await supervisor.stop(DEADLINE_S)
        for handle in handles:
            assert (await handle.wait()).ok


async def test_leaving_the_context_without_stop_kills_everything() -> None:
    async with Supervisor() as supervisor:
        handle = await supervisor.start(RoleSpec("server", 0, "roles:parent"))
        pids = [fork_server_pid(supervisor), handle.pid, *(await told_by(handle))["children"]]
    assert gone_within(pids, 0) == []
    assert str(await handle.wait()) == "killed by SIGKILL"


async def test_an_error_in_the_body_comes_out_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        async with Supervisor():
            raise ZeroDivisionError


@pytest.mark.parametrize(
    ("module", "reason"),
    [("no_such_module", "no_such_module"), ("starts_a_thread", "starts_a_thread"), ("has_a_bug", "exit code 1")],
)
async def test_a_module_that_cannot_be_preloaded_is_an_error_that_says_why(
    module: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "has_a_bug.py").write_text("1 / 0\n")
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.raises(RemoteError, match=f"cannot preload: .*{reason}"):
            async with Supervisor(preload=[module]) as supervisor:
                await supervisor.start(RoleSpec("server", 0, "roles:steady"))
    finally:
        sys.path.remove(str(tmp_path))


async def test_a_library_whose_allocator_would_start_a_thread_is_preloaded() -> None:
    pytest.importorskip("pyarrow")
    async with Supervisor(preload=["pyarrow"]) as supervisor:
        role = await supervisor.start(RoleSpec("server", 0, "roles:knowing", b"pyarrow"))
        assert (await told_by(role))["is_imported"]


async def test_what_a_run_turns_out_to_need_is_imported_once_for_all_its_roles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needed_as_well.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    servers = ForkServers(["json"])
    servers.preload(["needed_as_well"])
    async with Supervisor(fork_servers=servers) as supervisor:
        for index in range(2):
            role = await supervisor.start(RoleSpec("server", index, "roles:knowing", b"needed_as_well"))
            assert (await told_by(role))["is_imported"]


async def test_a_fork_server_that_still_imports_that_is_not_asked_for_a_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "go")
    (tmp_path / "takes_long.py").write_text(f"open({str(tmp_path / 'go')!r}).read()")
    monkeypatch.syspath_prepend(str(tmp_path))
    # Whoever hangs is killed at once.
    monkeypatch.setattr(fork_server_keeper, "_ANSWER_TIMEOUT_S", 0.001)
    notices: list[str] = []
    servers = ForkServers(["json"])
    servers.preload(["takes_long"])
    async with (
        Supervisor(fork_servers=servers, notice=notices.append) as supervisor,
        anyio.create_task_group() as tasks,
    ):
        pid = servers.current.pid
        tasks.start_soon(supervisor.start, RoleSpec("server", 0, "roles:steady"))
        # It opens when the first modules are imported and this one is not.
        async with await anyio.open_file(tmp_path / "go", "w"):
            await anyio.sleep(0.1)
            assert servers.current.pid == pid
        monkeypatch.setattr(fork_server_keeper, "_ANSWER_TIMEOUT_S", DEADLINE_S)
    assert notices == []


async def test_a_module_that_is_given_a_text_imports_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imports_more.py").write_text("preload = __import__")
    (tmp_path / "said_by_text.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    async with Supervisor(preload=["imports_more:said_by_text"]) as supervisor:
        role = await supervisor.start(RoleSpec("server", 0, "roles:knowing", b"said_by_text"))
        assert (await told_by(role))["is_imported"]


async def test_if_it_cannot_be_imported_the_run_ends_with_the_reason() -> None:
    servers = ForkServers(["json"])
    servers.preload(["no_such_module"])
    with pytest.raises(RemoteError, match=r"cannot preload: .*no_such_module"):
        async with Supervisor(fork_servers=servers) as supervisor:
            await supervisor.start(RoleSpec("server", 0, "roles:steady"))


@pytest.mark.parametrize("is_called", ["before the stop", "after it"])
async def test_who_starts_a_role_of_a_supervisor_that_stops_is_told_so_before_everything_is_preloaded(
    is_called: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo = tmp_path / "nobody-writes"
    os.mkfifo(fifo)
    (tmp_path / "never_imported.py").write_text(f"open({str(fifo)!r})\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    role = RoleSpec("server", 0, "roles:steady")
    refused: list[ConnectionLost] = []
    async with Supervisor(preload=["never_imported"]) as supervisor:

        async def start(task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
            task_status.started()
            with pytest.raises(ConnectionLost, match=r"stopping|not running") as raised:
                await supervisor.start(role)
            refused.append(raised.value)

        with anyio.fail_after(DEADLINE_S):
            async with anyio.create_task_group() as tasks:
                if is_called == "before the stop":
                    await tasks.start(start)
                    await anyio.wait_all_tasks_blocked()
                    assert not refused
                await supervisor.stop(0.0)
                if is_called == "after it":
                    await start()
    assert len(refused) == 1


async def test_two_supervisors_do_not_disturb_each_other() -> None:
    async with Supervisor() as one:
        mine = await one.start(RoleSpec("server", 0, "roles:steady"))
        await mine.ready()
        async with Supervisor() as other:
            theirs = await other.start(RoleSpec("server", 0, "roles:parent"))
            await theirs.ready()
        assert str(await theirs.wait()) == "killed by SIGKILL"
        await one.stop(DEADLINE_S)
        assert (await mine.wait()).ok


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["client", "server"])
async def test_a_role_that_hangs_does_not_take_from_others_the_time_to_leave(frozen: str) -> None:
    async with Supervisor() as supervisor:
        roles = ("client", "trainer", "server", "monitor")
        handles = {role: await supervisor.start(RoleSpec(role, 0, "roles:steady")) for role in roles}
        for handle in handles.values():
            await handle.ready()
        os.kill(handles[frozen].pid, signal.SIGSTOP)
        await supervisor.stop(8.0, order=[["client"], ["trainer"], ["server"], ["monitor"]])
        ends = {role: str(await handle.wait()) for role, handle in handles.items()}
    assert ends == {role: "killed by SIGKILL" if role == frozen else "exit code 0" for role in roles}


def test_after_kill_9_of_the_supervisor_nothing_is_left(tmp_path: Path) -> None:
    program, pids, run_dir = start_program(tmp_path)
    with program:
        assert run_dir.is_dir()
        assert gone_within(pids, 0) == pids
        # A frozen role cannot watch its lifeline: the fork server has to end it.
        os.kill(pids[2], signal.SIGSTOP)
        program.kill()
    assert gone_within(pids, DEADLINE_S) == []
    assert not run_dir.exists()


def test_after_kill_9_of_supervisor_and_fork_server_nothing_is_left(tmp_path: Path) -> None:
    program, pids, run_dir = start_program(tmp_path)
    with program:
        os.kill(pids[0], signal.SIGSTOP)
        program.kill()
        os.kill(pids[0], signal.SIGKILL)
    # Their lifelines are cut, so the roles end by themselves, and end what they started.
    assert gone_within(pids, DEADLINE_S) == []
    with RunDir(tmp_path):
        assert not run_dir.exists()


def test_after_kill_9_while_modules_are_imported_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "never_done.py").write_text(
        "import sys, threading\nsys.stdout.write('importing\\n')\nsys.stdout.flush()\nthreading.Event().wait()\n"
    )
    code = (
        "import sys, signal\nfrom shoal.runtime.fork_servers import ForkServers\n"
        "from pathlib import Path\nservers = ForkServers(['never_done'], Path(sys.argv[1]))\n"
        "print(servers.current.pid, flush=True)\nsignal.pause()"
    )
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    program = subprocess.Popen([sys.executable, "-c", code, str(run_dir)], stdout=subprocess.PIPE, env=environment)
    with program:
        assert program.stdout is not None
        lines = {program.stdout.readline().strip(), program.stdout.readline().strip()}
        assert b"importing" in lines
        pid = int((lines - {b"importing"}).pop())
        program.kill()
    assert gone_within([pid], DEADLINE_S) == []
    assert not run_dir.exists()
