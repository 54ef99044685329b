"""Whatever ssh does, and whatever a host says, it is one line for a person, and nobody waits for ever."""

from __future__ import annotations

import shlex
import sys
from contextlib import aclosing
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.cli.remote import ssh as ssh_module
from shoal.cli.remote.probe import probe
from shoal.cli.remote.ssh import Ssh
from shoal.clock import SystemClock
from shoal.errors import HostFailed

pytestmark = pytest.mark.anyio


def _ssh(directory: Path, script: str) -> Ssh:
    """Return an ssh whose command is this Python program; the last argument is what the host's shell is told."""
    path = directory / "ssh.py"
    path.write_text(script)
    return Ssh("box", (sys.executable, str(path)), directory, SystemClock())


_HOST = "import os, sys; os.execv('/bin/sh', ['sh', '-c', sys.argv[-1]])"


async def test_a_command_reads_what_it_is_given_and_says_what_it_says(tmp_path: Path) -> None:
    done = await _ssh(tmp_path, _HOST).run("cat; echo oh >&2; exit 3", b"given", within_s=60.0)
    assert (done.code, done.stdout, done.stderr) == (3, b"given", "oh\n")


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("import sys; sys.stderr.write('Permission denied (publickey).\\n'); sys.exit(255)", "ssh-copy-id box"),
        ("import sys; sys.exit(255)", "does not say why"),
        ("import sys; sys.stderr.write('odd \\x1b]0;title\\x07\\n'); sys.exit(255)", "ssh has failed: odd"),
    ],
)
async def test_an_ssh_that_ends_before_it_has_read_anything_says_why(tmp_path: Path, script: str, why: str) -> None:
    with pytest.raises(HostFailed) as raised:
        await _ssh(tmp_path, script).run("cat", b"x" * 4_000_000, within_s=60.0)
    assert why in str(raised.value)
    assert "\x1b" not in str(raised.value)


async def test_an_ssh_that_is_not_there_or_does_not_answer_is_a_line(tmp_path: Path) -> None:
    with pytest.raises(HostFailed, match="there is no ssh-of-nobody on this machine"):
        await Ssh("box", ("ssh-of-nobody",), tmp_path, SystemClock()).run("true", within_s=60.0)
    with pytest.raises(HostFailed, match="cannot be started on this machine"):
        await Ssh("box", (str(tmp_path),), tmp_path, SystemClock()).run("true", within_s=60.0)
    with pytest.raises(HostFailed, match="no answer within"):
        await _ssh(tmp_path, "import time; time.sleep(600)").run("true", within_s=0.2)
    await Ssh("box", ("ssh-of-nobody",), tmp_path, SystemClock()).close()


async def test_a_host_that_does_not_stop_speaking_is_a_line_and_its_ssh_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh_module, "_MOST_SAID_BYTES", 1 << 20)
    ssh = _ssh(tmp_path, _HOST)
    for command in ("yes", "yes >&2"):
        with pytest.raises(HostFailed, match="what it says does not end"):
            await ssh.run(command, within_s=600.0)
    for command in ("yes | tr -d '\\n'", "yes >&2"):
        async with aclosing(ssh.lines(command)) as lines:
            with pytest.raises(HostFailed, match="what it says does not end"):
                await anext(lines)


async def test_lines_come_while_a_command_speaks_and_its_errors_do_not_stop_it(tmp_path: Path) -> None:
    ssh = _ssh(tmp_path, _HOST)
    noise = shlex.quote(f"{sys.executable}")
    command = f"echo one; {noise} -c 'import sys; sys.stderr.write(\"e\" * 400000)'; echo two; exit 4"
    found: list[str] = []

    async def listen() -> None:
        async for line in ssh.lines(command):
            found.append(line)

    with pytest.raises(HostFailed):
        await listen()
    assert found == ["one", "two"]


async def test_a_host_that_greets_and_one_that_lies_are_read_all_the_same(tmp_path: Path) -> None:
    greeting = "import os, sys; os.execv('/bin/sh', ['sh', '-c', 'echo Welcome; ' + sys.argv[-1]])"
    facts = await probe(_ssh(tmp_path, greeting), sys.executable, SystemClock())
    assert facts.python_version == f"{sys.version_info.major}.{sys.version_info.minor}"
    lying = "print('unix_s=1\\npython=x\\npython_version=evil\\nfree_kb=\\u0663\\ngpus=many')"
    facts = await probe(_ssh(tmp_path, lying), "python3", SystemClock())
    assert (facts.python_version, facts.free_kb, facts.gpus) == ("", 0, 0)


def test_resume_of_up_is_a_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["up", "--resume"]) == 2
    assert "there is no hosts.yaml" in capsys.readouterr().err
