"""The supervisor with real processes: start, messages, restart, and every way in which a run can end."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import anyio
import pytest

from shoal.clock import Deadline, SystemClock
from shoal.errors import ConnectionLost, RemoteError
from shoal.runtime.process_info import descendants
from shoal.runtime.role_handle import RoleEvent, RoleHandle
from shoal.runtime.role_spec import RestartPolicy, RoleSpec
from shoal.runtime.run_dir import RunDir
from shoal.runtime.supervisor import Supervisor

pytestmark = pytest.mark.anyio

_HERE = Path(__file__).parent
_DEADLINE_S = 20.0
_EAGER = RestartPolicy(max_restarts=2, window_s=60.0, first_delay_s=0.01, max_delay_s=0.02)


@pytest.fixture(autouse=True)
def roles_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(_HERE))


def _gone_within(pids: Iterable[int], timeout_s: float) -> list[int]:
    """Wait for the end of processes that need not be ours; return those that are left."""
    deadline = Deadline.after(SystemClock(), timeout_s)
    left: list[int] = []
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if not poll.poll(deadline.remaining_s() * 1000):
                left.append(pid)
        finally:
            os.close(pidfd)
    return left


def _shown(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text().rstrip("\0\n")


async def _next(handle: RoleHandle, name: str) -> RoleEvent:
    with anyio.fail_after(_DEADLINE_S):
        async for event in handle.events:
            if event.name == name:
                return event
    raise AssertionError(f"{handle.spec} ended without an event {name!r}")


async def _rest(handle: RoleHandle) -> list[str]:
    with anyio.fail_after(_DEADLINE_S):
        return [event.name async for event in handle.events]


async def test_three_roles_get_ready_and_leave_gracefully_in_the_order_asked_for(tmp_path: Path) -> None:
    async with Supervisor(preload=["json"]) as supervisor:
        handles = [
            await supervisor.start(RoleSpec(role, 0, "roles:steady", role.encode(), environment={"GREETING": "hi"}))
            for role in ("server", "trainer", "monitor")
        ]
        for handle in handles:
            # The main thread, and the one that watches the lifeline.
            assert await handle.ready() == {"payload": handle.spec.role, "threads": 2, "greeting": "hi"}
        left: list[str] = []

        async def note(handle: RoleHandle) -> None:
            await handle.wait()
            left.append(handle.spec.role)

        async with anyio.create_task_group() as tasks:
            for handle in handles:
                tasks.start_soon(note, handle)
            await supervisor.stop(_DEADLINE_S, order=[["trainer"], ["server"]])
        assert left == ["trainer", "server", "monitor"]
        for handle in handles:
            assert (await handle.wait()).ok
            assert await _rest(handle) == ["ready", "left", "exited"]
        pid = supervisor.fork_server_pid
    assert _gone_within([pid], 0) == []


async def test_ps_shows_what_a_process_is() -> None:
    async with Supervisor() as supervisor:
        handle = await supervisor.start(RoleSpec("data_server", 3, "roles:steady"))
        await handle.ready()
        assert _shown(handle.pid, "comm") == "shoal:data_se:3"
        assert _shown(handle.pid, "cmdline") == "shoal:data_server:3"
        assert _shown(supervisor.fork_server_pid, "cmdline") == "shoal:fork_server"


async def test_messages_go_to_a_role_and_requests_get_their_reply() -> None:
    async with Supervisor() as supervisor:
        echo = await supervisor.start(RoleSpec("echo", 0, "roles:echo"))
        echo.send(peers=["a", "b"])
        assert (await _next(echo, "echo")).fields == {"peers": ["a", "b"]}
        asking = await supervisor.start(RoleSpec("client", 0, "roles:asking"))
        request = await _next(asking, "request")
        assert request.fields == {"request": "start_role", "id": 0, "role": "trainer", "index": 7}
        asking.reply(request, pid=42)
        assert (await _next(asking, "answered")).fields == {"pid": 42}
        assert (await asking.wait()).ok


async def test_output_of_a_role_goes_to_its_file(tmp_path: Path) -> None:
    path = tmp_path / "noisy_0.log"
    async with Supervisor() as supervisor:
        handle = await supervisor.start(RoleSpec("noisy", 0, "roles:noisy", output_path=path))
        assert (await handle.wait()).ok
    assert sorted(path.read_text().splitlines()) == ["to standard error", "to standard output"]


@pytest.mark.parametrize(
    ("payload", "code", "kind"),
    [(b"user", 2, "ConfigError"), (b"group", 2, "ConfigError"), (b"bug", 1, "ZeroDivisionError")],
)
async def test_a_failing_role_says_why_and_exits_with_the_right_code(
    payload: bytes, code: int, kind: str, tmp_path: Path
) -> None:
    async with Supervisor() as supervisor:
        spec = RoleSpec("failing", 0, "roles:failing", payload=payload, output_path=tmp_path / "log")
        handle = await supervisor.start(spec)
        error = await _next(handle, "error")
        assert error.fields["kind"] == kind
        assert (await handle.wait()).code == code
        with pytest.raises(RemoteError, match=r"failing:0 ended before it was ready: .*(cuda:9|a bug)"):
            await handle.ready()
    assert ("Traceback" in (tmp_path / "log").read_text()) == (payload == b"bug")


async def test_a_killed_role_is_reported_restarted_and_given_up_at_last() -> None:
    async with Supervisor() as supervisor:
        handle = await supervisor.start(RoleSpec("server", 0, "roles:steady", restart=_EAGER))
        pids: set[int] = set()
        for _ in range(3):
            await _next(handle, "ready")
            pids.add(handle.pid)
            os.kill(handle.pid, signal.SIGKILL)
            assert (await _next(handle, "exited")).fields == {"code": -signal.SIGKILL}
        assert await _rest(handle) == ["given_up"]
        assert len(pids) == 3
        assert handle.restarts == 2
        assert str(await handle.wait()) == "killed by SIGKILL"


async def test_stop_does_not_wait_for_the_pause_before_a_restart() -> None:
    policy = RestartPolicy(max_restarts=1, first_delay_s=1000.0, max_delay_s=1000.0)
    async with Supervisor() as supervisor:
        handle = await supervisor.start(RoleSpec("server", 0, "roles:steady", restart=policy))
        await handle.ready()
        os.kill(handle.pid, signal.SIGKILL)
        await _next(handle, "restarting")
        with anyio.fail_after(_DEADLINE_S):
            await supervisor.stop(1000.0)
        assert not handle.running


async def test_processes_that_a_killed_role_leaves_are_killed_at_once() -> None:
    async with Supervisor() as supervisor:
        handle = await supervisor.start(RoleSpec("server", 0, "roles:parent"))
        other = await supervisor.start(RoleSpec("server", 1, "roles:parent"))
        children = (await handle.ready())["children"]
        others = (await other.ready())["children"]
        os.kill(handle.pid, signal.SIGKILL)
        await handle.wait()
        assert _gone_within(children, 2.0) == []
        assert _gone_within(others, 0) == others
        await supervisor.stop(_DEADLINE_S)
        assert (await other.wait()).ok


async def test_a_role_that_does_not_leave_in_time_is_killed() -> None:
    async with Supervisor() as supervisor:
        handle = await supervisor.start(RoleSpec("stubborn", 0, "roles:stubborn"))
        handle.reply(await _next(handle, "request"))
        await supervisor.stop(0.1)
        assert str(await handle.wait()) == "killed by SIGKILL"


async def test_a_role_that_is_stopped_before_it_serves_leaves_gracefully_too() -> None:
    async with Supervisor() as supervisor:
        handles = [await supervisor.start(RoleSpec("server", index, "roles:steady")) for index in range(3)]
        await supervisor.stop(_DEADLINE_S)
        for handle in handles:
            assert (await handle.wait()).ok


async def test_leaving_the_context_without_stop_kills_everything() -> None:
    async with Supervisor() as supervisor:
        handle = await supervisor.start(RoleSpec("server", 0, "roles:parent"))
        pids = [supervisor.fork_server_pid, handle.pid, *(await handle.ready())["children"]]
    assert _gone_within(pids, 0) == []
    assert str(await handle.wait()) == "killed by SIGKILL"


async def test_an_error_in_the_body_comes_out_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        async with Supervisor():
            raise ZeroDivisionError


async def _lose_a_fork_server(pids: list[int]) -> None:
    async with Supervisor() as supervisor:
        handle = await supervisor.start(RoleSpec("server", 0, "roles:parent"))
        steady = await supervisor.start(RoleSpec("server", 1, "roles:steady"))
        pids += [handle.pid, steady.pid, *(await handle.ready())["children"]]
        os.kill(supervisor.fork_server_pid, signal.SIGKILL)
        await anyio.sleep_forever()


async def test_a_killed_fork_server_ends_the_run_with_an_error_and_leaves_nothing() -> None:
    pids: list[int] = []
    with pytest.raises(ConnectionLost, match=r"fork server \(pid \d+\) has ended"):
        await _lose_a_fork_server(pids)
    assert len(pids) == 4
    assert _gone_within(pids, 0) == []
    assert [stat for stat in descendants(os.getpid()) if stat.pid in pids] == []


async def _lose_a_frozen_fork_server(pids: list[int]) -> None:
    async with Supervisor() as supervisor:
        handle = await supervisor.start(RoleSpec("server", 0, "roles:parent"))
        pids += (await handle.ready())["children"]
        os.kill(supervisor.fork_server_pid, signal.SIGSTOP)
        os.kill(handle.pid, signal.SIGKILL)
        assert _gone_within([handle.pid], 2.0) == []
        os.kill(supervisor.fork_server_pid, signal.SIGKILL)
        await anyio.sleep_forever()


async def test_orphans_that_left_the_session_are_found_when_role_and_fork_server_are_dead() -> None:
    pids: list[int] = []
    with pytest.raises(ConnectionLost):
        await _lose_a_frozen_fork_server(pids)
    assert len(pids) == 2
    assert _gone_within(pids, 0) == []


@pytest.mark.parametrize("module", ["no_such_module", "starts_a_thread"])
async def test_a_module_that_cannot_be_preloaded_is_an_error_that_names_it(module: str, tmp_path: Path) -> None:
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.raises(RemoteError, match=module):
            async with Supervisor(preload=[module]) as supervisor:
                await supervisor.start(RoleSpec("server", 0, "roles:steady"))
    finally:
        sys.path.remove(str(tmp_path))


async def test_two_supervisors_do_not_disturb_each_other() -> None:
    async with Supervisor() as one:
        mine = await one.start(RoleSpec("server", 0, "roles:steady"))
        await mine.ready()
        with pytest.raises(ConnectionLost):
            await _lose_a_fork_server([])
        await one.stop(_DEADLINE_S)
        assert (await mine.wait()).ok


def _start_program(parent: Path) -> tuple[subprocess.Popen[bytes], list[int], Path]:
    """Start a launcher with its roles in a process of its own."""
    program = subprocess.Popen(
        [sys.executable, str(_HERE / "supervised_program.py"), str(parent)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert program.stdout is not None
    started = json.loads(program.stdout.readline())
    return program, started["pids"], Path(started["run_dir"])


def test_after_kill_9_of_the_supervisor_nothing_is_left(tmp_path: Path) -> None:
    program, pids, run_dir = _start_program(tmp_path)
    with program:
        assert run_dir.is_dir()
        assert _gone_within(pids, 0) == pids
        # A frozen role cannot watch its lifeline: the fork server has to end it.
        os.kill(pids[2], signal.SIGSTOP)
        program.kill()
    assert _gone_within(pids, 2.0) == []
    assert not run_dir.exists()


def test_after_kill_9_of_supervisor_and_fork_server_nothing_is_left(tmp_path: Path) -> None:
    program, pids, run_dir = _start_program(tmp_path)
    with program:
        os.kill(pids[0], signal.SIGSTOP)
        program.kill()
        os.kill(pids[0], signal.SIGKILL)
    # Their lifelines are cut, so the roles end by themselves, and end what they started.
    assert _gone_within(pids, 2.0) == []
    with RunDir(tmp_path):
        assert not run_dir.exists()


def test_after_kill_9_while_modules_are_imported_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "never_done.py").write_text(
        "import sys, threading\nsys.stdout.write('importing\\n')\nsys.stdout.flush()\nthreading.Event().wait()\n"
    )
    code = (
        "import sys, signal\nfrom shoal.runtime.fork_server_process import ForkServerProcess\n"
        "from pathlib import Path\nserver = ForkServerProcess(['never_done'], Path(sys.argv[1]))\n"
        "print(server.pid, flush=True)\nsignal.pause()"
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
    assert _gone_within([pid], 2.0) == []
    assert not run_dir.exists()
