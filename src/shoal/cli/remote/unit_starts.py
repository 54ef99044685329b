"""How a unit is run on a host: as a session of its own, which no terminal's end reaches, or as a service of the user's
systemd."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Final

from shoal.cli.remote.unit_messages import Unit
from shoal.errors import ConfigError
from shoal.runtime.durable_files import put_whole
from shoal.runtime.linux_calls import LinuxCall, has

OUTPUT: Final = "output.log"
"""In the folder of a unit: what it says."""
_SERVICES_DIR: Final = Path("~/.config/systemd/user")
_MOST_BYTES = 16 * 1024 * 1024
"""Of output; what was said before is kept once, in `output.log.1`."""
_BETWEEN_LOOKS_S = 60.0
_MOST_STARTS, _STARTS_WITHIN_S = 10, 1800
"""A service that fails more often is left to whoever looks after the host."""
_SHELL: Final = "/bin/sh"
_INTERRUPTS: Final = (signal.SIGINT, signal.SIGTERM)
"""What ends a unit; whoever starts one may ignore them, as what a shell runs in the background does."""
# The shell outlives an interrupt, which its whole session gets, to note how what it runs has ended. Each write to the
# output goes to its end, so it may be cut at any time: a second shell does that, which goes with the first one. It
# ends what `$!` names, which the shell sets with the start: a variable of ours might be unset when it is told to go.
_SESSION: Final = """
cd "$0" && trap : INT TERM && {
  (
    trap 'kill $!; exit' TERM
    while kill -0 $$; do
      sleep PAUSE &
      wait $!
      if [ "$(wc -c < output.log)" -gt LIMIT ]; then cp output.log output.log.1 && : > output.log; fi
    done
  ) > /dev/null 2>&1 &
  cutter=$!
  "$@"
  echo $? > exit_code
  kill $cutter
}
"""
# They outlive this process: nobody here waits for one, and none may be forgotten before this process ends.
_started: list[subprocess.Popen[bytes]] = []


def service_text(unit: Unit, folder: Path, this_time: Sequence[str] = ()) -> str:
    """Return the service of a unit, for the user's systemd (systemd.service(5), systemd.exec(5))."""
    again = "Restart=on-failure\nRestartSec=5\n" if unit.is_lasting else ""
    limit = f"StartLimitIntervalSec={_STARTS_WITHIN_S}\nStartLimitBurst={_MOST_STARTS}\n" if unit.is_lasting else ""
    wanted = "\n[Install]\nWantedBy=default.target\n" if unit.is_lasting else ""
    command = " ".join(map(_quoted, (*unit.argv, *this_time)))
    return (
        f"[Unit]\nDescription=shoal {unit.name}\n{limit}\n[Service]\nExecStart={command}\n"
        f"WorkingDirectory={folder}\nStandardOutput=append:{folder / OUTPUT}\nStandardError=inherit\n"
        # Its processes end by the first one, and one that the kernel kills for want of memory is started again.
        f"KillSignal=SIGINT\nKillMode=mixed\nTimeoutStopSec=60\nOOMPolicy=continue\n{again}{wanted}"
    )


def _quoted(argument: str) -> str:
    escaped = argument.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def start_session(argv: Sequence[str], folder: Path) -> int:
    """Run a command in a unit's folder, in a session of its own; return the number of its first process."""
    output = folder / OUTPUT
    session = _SESSION.replace("LIMIT", str(_MOST_BYTES)).replace("PAUSE", str(_BETWEEN_LOOKS_S))
    command = ["sh", "-c", session, str(folder), *argv]
    if not has(LinuxCall.SPAWN_SESSION):
        return _start_by_fork(command, output)
    return os.posix_spawn(
        _SHELL,
        command,
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(output), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigdef=_INTERRUPTS,
    )


def _start_by_fork(command: Sequence[str], output: Path) -> int:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        with _heeded(*_INTERRUPTS):
            process = subprocess.Popen(
                command,
                executable=_SHELL,
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                start_new_session=True,
            )
    finally:
        os.close(descriptor)
    _started.append(process)
    return process.pid


@contextmanager
def _heeded(*numbers: signal.Signals) -> Generator[None]:
    """Inside, signals that are ignored are taken, and passed over: for a program that is started they are as usual."""
    ignored = [number for number in numbers if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, _pass_over)
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)


def _pass_over(number: int, frame: FrameType | None) -> None:
    """Take a signal, and do nothing."""


def start_service(unit: Unit, folder: Path, this_time: Sequence[str]) -> None:
    """Have the user's systemd run a unit, from now on if it is a lasting one.

    Args:
        this_time: more arguments, at this start alone.

    Raises:
        ConfigError: systemd does not take it.
    """
    services = _SERVICES_DIR.expanduser()
    services.mkdir(parents=True, exist_ok=True)
    put_whole(services / service_name(unit.name), service_text(unit, folder, this_time).encode(), lasting=False)
    systemctl("daemon-reload")
    if unit.is_lasting:
        systemctl("enable", service_name(unit.name))
    with suppress(ConfigError):
        # What it has failed before does not count any more; one that systemd has forgotten has nothing that would.
        systemctl("reset-failed", service_name(unit.name))
    systemctl("restart", service_name(unit.name))


def systemctl(*arguments: str) -> str:
    """Tell the user's systemd something, and return what it says.

    Raises:
        ConfigError: it refuses.
    """
    done = subprocess.run(["systemctl", "--user", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"systemctl --user {' '.join(arguments)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def service_name(name: str) -> str:
    """Return the name of a unit's service."""
    return f"shoal-{name}.service"
