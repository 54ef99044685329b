"""A program in place of podman: takes what podman's own pages say, and runs what is in a container directly.

Whoever uses it copies it under the name podman, or docker, beside `image.json`: the environment that the image has. The
folder of that file gets the state of containers, and `calls.jsonl` with all that was asked. No image is ever fetched:
one that was pulled has the files of this machine. With `"apart": true` in image.json a container has processes' numbers
and a runtime directory of its own, which needs root.

    podman run --detach --> a process that outlives it, starts the command, notes its end, starts it again if it has to
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parent
NAME = Path(sys.argv[0]).name
# podman-run(1), podman-logs(1), ... of version 5, and for --gpus the page of docker run.
SWITCHES = {"run": {"detach", "rm", "interactive", "no-healthcheck"}, "pull": {"quiet"}, "logs": {"follow"}}
VALUES = {
    "run": {
        *("name", "label", "network", "user", "userns", "cap-drop", "security-opt", "env", "volume", "workdir"),
        *("entrypoint", "restart", "stop-signal", "stop-timeout", "log-driver", "log-opt"),
        *(("device",) if NAME == "podman" else ("device", "gpus")),
    },
    "logs": {"tail"},
    "stop": {"time"},
    "inspect": {"format"},
    "info": {"format"},
}
SHORT = {"-t": "--time"}


def fail(why: str) -> NoReturn:
    """End as podman does where the fault is with the call."""
    print(f"Error: {why}", file=sys.stderr)
    sys.exit(125)


def parsed(verb: str, words: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return flags with their values, and what follows them."""
    flags: dict[str, list[str]] = {}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        name = SHORT.get(word, word)[2:]
        if name in SWITCHES.get(verb, ()):
            flags.setdefault(name, []).append("true")
        elif name in VALUES.get(verb, ()):
            flags.setdefault(name, []).append(rest.pop(0))
        else:
            fail(f"unknown flag: {word}")
    return flags, rest


def image() -> dict[str, Any]:
    """Return what is known of the image."""
    return json.loads((HERE / "image.json").read_text())


def folder(name: str) -> Path:
    """Return where the state of a container is."""
    return HERE / "containers" / name


def state(name: str) -> dict[str, Any]:
    """Return how a container is."""
    path = folder(name) / "state.json"
    if not path.exists():
        fail(f'no such container "{name}"')
    return json.loads(path.read_text())


def note(name: str, **changes: Any) -> None:
    """Change how a container is; whoever has started it alone does."""
    path = folder(name) / "state.json"
    found = (json.loads(path.read_text()) if path.exists() else {}) | changes
    path.with_suffix(".new").write_text(json.dumps(found))
    path.with_suffix(".new").rename(path)


def is_there(name: str) -> bool:
    """Whether the image was pulled."""
    path = HERE / "pulled"
    return path.exists() and name in path.read_text().split()


def command_of(flags: dict[str, list[str]], words: list[str]) -> tuple[list[str], dict[str, str], str]:
    """Return what runs in a container, its environment, and where it begins."""
    [what, *arguments] = words
    if not is_there(what):
        fail(f"{what}: it would be pulled, and nobody has said so")
    if "keep-id" in flags.get("userns", ()) and os.getuid() == 0:
        fail("keep-id is only supported in rootless mode")
    sources = [volume.split(":")[0] for volume in flags.get("volume", ())]
    for source in sources:
        if not Path(source).is_dir():
            fail(f"statfs {source}: no such file or directory")
    workdir = flags.get("workdir", ["/"])[0]
    if workdir != "/" and not any(workdir.startswith(f"{source}/") for source in sources):
        fail(f'workdir "{workdir}" does not exist on container')
    environment = image()["environment"] | dict(each.split("=", 1) for each in flags.get("env", ()))
    return [flags["entrypoint"][0], *arguments], environment, workdir


def separated(argv: list[str]) -> list[str]:
    """Return what runs a command with processes and a runtime directory of its own."""
    if not image().get("apart"):
        return argv
    own = '[ ! -d /tmp/shoal-0 ] || mount -t tmpfs -o mode=0700 none /tmp/shoal-0; exec "$@"'
    return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", own, "sh", *argv]


def first_process(found: dict[str, Any]) -> int:
    """Return the process of a container that has the number 1 there."""
    pid = found["pid"]
    if not found["apart"]:
        return pid
    while not (children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        time.sleep(0.01)
    return int(children[0])


def run(words: list[str]) -> int:
    """Run a container: until it ends, or with --detach behind this program."""
    flags, rest = parsed("run", words)
    argv, environment, workdir = command_of(flags, rest)
    if "detach" not in flags:
        stdin = None if "interactive" in flags else subprocess.DEVNULL
        return subprocess.run(separated(argv), env=environment, cwd=workdir, stdin=stdin, check=False).returncode
    [name] = flags["name"]
    if (folder(name) / "state.json").exists():
        fail(f'the container name "{name}" is already in use')
    folder(name).mkdir(parents=True, exist_ok=True)
    for each in ("log", "stopped"):
        (folder(name) / each).unlink(missing_ok=True)
    labels = dict(each.split("=", 1) for each in flags.get("label", ()))
    policy, _, most = flags.get("restart", ["no"])[0].partition(":")
    retries = int(most) if policy == "on-failure" else 0
    note(name, labels=labels, image=rest[0], status="created", code=0, pid=0, restarts=0, started="")
    note(
        name,
        apart=image().get("apart", False),
        signal=flags.get("stop-signal", ["SIGTERM"])[0],
        environment=environment,
        workdir=workdir,
    )
    begun, begins = os.pipe()
    if os.fork():
        os.close(begins)
        os.read(begun, 1)
        print(name)
        return 0
    os.setsid()
    # Whoever has called may ignore it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    quiet = os.open(os.devnull, os.O_RDWR)
    for each in range(3):
        os.dup2(quiet, each)
    with (folder(name) / "log").open("ab") as log:
        while True:
            process = subprocess.Popen(
                separated(argv), env=environment, cwd=workdir, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            started = time.strftime("%Y-%m-%dT%H:%M:%S.123456789Z", time.gmtime())
            note(name, status="running", pid=process.pid, started=started)
            if begins:
                os.close(begins)
                begins = 0
            code = process.wait()
            code = 128 - code if code < 0 else code
            restarts = state(name)["restarts"]
            if not code or (folder(name) / "stopped").exists() or restarts >= retries:
                note(name, status="exited", code=code, pid=0)
                os._exit(0)
            note(name, restarts=restarts + 1)


def stop(words: list[str]) -> int:
    """End containers, by their signal and then by SIGKILL."""
    flags, names = parsed("stop", words)
    for name in names:
        tries, found = 0, state(name)
        (folder(name) / "stopped").touch()
        while found["status"] == "running":
            number = {0: signal.Signals[found["signal"]], 10 * int(flags["time"][0]): signal.SIGKILL}.get(tries)
            if number is not None:
                with contextlib.suppress(OSError):  # it has just ended
                    os.kill(first_process(found), number)
            time.sleep(0.1)
            tries, found = tries + 1, state(name)
        print(name)
    return 0


def inspect(words: list[str]) -> int:
    """Say how a container is."""
    flags, [name] = parsed("inspect", words)
    found = state(name)
    if "format" in flags:
        assert flags["format"] == ["{{.State.Running}}"]
        print("true" if found["status"] == "running" else "false")
        return 0
    how = {"Status": found["status"], "Running": found["status"] == "running", "Pid": found["pid"]}
    how |= {"ExitCode": found["code"], "StartedAt": found["started"], "OOMKilled": False}
    config = {"Labels": found["labels"], "Image": found["image"], "StopSignal": found["signal"]}
    print(json.dumps([{"Id": "0" * 64, "State": how, "Config": config, "RestartCount": found["restarts"]}], indent=4))
    return 0


def logs(words: list[str]) -> int:
    """Print the newest lines."""
    flags, [name] = parsed("logs", words)
    state(name)
    with (folder(name) / "log").open() as log:
        print("".join(deque(log, maxlen=int(flags["tail"][0]))), end="", flush=True)
        while "follow" in flags:
            print(log.read(), end="", flush=True)
            time.sleep(0.1)
    return 0


def execute(words: list[str]) -> NoReturn:
    """Run a command in a container that runs."""
    [name, *argv] = words
    found = state(name)
    if found["status"] != "running":
        fail("can only create exec sessions on running containers: container state improper")
    argv = ["sh", "-c", 'cd "$0" && exec "$@"', found["workdir"], *argv]
    if found["apart"]:
        argv = ["nsenter", "--mount", "--pid", "--target", str(first_process(found)), *argv]
    os.execvpe(argv[0], argv, found["environment"])


def put(directory: Path, name: str, image: dict[str, Any]) -> None:
    """Let a folder of programs have this one under a name, with what is known of the image."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_text(f"#!{sys.executable} -IS\n{Path(__file__).read_text()}")
    (directory / name).chmod(0o755)
    (directory / "image.json").write_text(json.dumps(image))


def calls(directory: Path) -> list[list[str]]:
    """Return all that was asked of the one in a folder."""
    path = directory / "calls.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> int:
    """Do what is asked."""
    words = sys.argv[1:]
    with (HERE / "calls.jsonl").open("a") as calls:
        calls.write(json.dumps([NAME, *words]) + "\n")
    match words:
        case ["info", *rest]:
            parsed("info", rest)
            if (HERE / "broken").exists():
                fail((HERE / "broken").read_text())
        case ["image", "inspect", name]:
            return 0 if is_there(name) else 125
        case ["pull", *rest]:
            [name] = parsed("pull", rest)[1]
            if name not in image()["names"]:
                fail(f"initializing source docker://{name}: reading manifest: manifest unknown")
            with (HERE / "pulled").open("a") as pulled:
                pulled.write(f"{name}\n")
        case ["container", "inspect", *rest]:
            return inspect(rest)
        case ["rm", name]:
            if state(name)["status"] == "running":
                fail(f"cannot remove container {name} as it is running")
            (folder(name) / "state.json").unlink()
        case ["run", *rest]:
            return run(rest)
        case ["stop", *rest]:
            return stop(rest)
        case ["logs", *rest]:
            return logs(rest)
        case ["exec", *rest]:
            execute(rest)
        case _:
            fail(f"unrecognized command `{NAME} {' '.join(words)}`")
    return 0


if __name__ == "__main__":
    sys.exit(main())
