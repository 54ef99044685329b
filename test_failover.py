#!/usr/bin/env python3
"""Kill the servers of a running swarm one after the other and see what the swarm makes of it.

    python test_failover.py              ends with PASS or FAIL and exit code 0 or 1, in less than three minutes
    python test_failover.py --keep-logs  leaves the run's logs where the last line says
    python test_failover.py --config-path configs/resnet18_split.yaml    another model, in at least two stages
    python test_failover.py --public-ip 192.0.2.7    peers meet at this address of the machine, as in a real swarm

The stages, with two servers each, train on this machine, in real processes. The head is the first stage, the tail the
last one:

1. a server of the tail stage is killed: training goes on, over the other one;
2. a server of the head stage is killed: training goes on with one server for each of the two;
3. the other server of the head stage freezes: training stops, and a message names the stage;
4. it wakes up, and servers are started in place of the killed ones: they get the state of their stage, and training
   goes on;
5. all servers of the head stage are killed, and no server has its parameters any more: training stops, and a message
   names the stage;
6. a server is started: whoever serves the stage from then on takes what the mirror holds, and training goes on. At most
   the last round of the stage is lost, and that is said.

Not a pytest module: pytest collects only `tests/`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal import load_config
from shoal.errors import ConfigError

ROOT = Path(__file__).resolve().parent
SANDBOX = ROOT / "configs" / "sandbox.yaml"
FLAGS = (
    "--no-wandb",
    "--data.holdout-fraction=0.02",
    "--diloco.inner-steps=10",
    "--diloco.outer-steps=100000",
    "--diloco.batch-size-per-step=4",
    "--diloco.averaging-timeout=60",
)
SMALL_MODEL = ("--model.hidden-size=48", "--data.seq-len=64")
"""Of the sandbox, so that its rounds take a second or two; a configuration of the user's own is taken as it is."""
START_S, STEP_S, RESTORE_S = 180.0, 90.0, 120.0
SILENCE_S = 3.0
"""Without a step for so long, training has stopped."""


class Failed(Exception):
    """Something did not happen that has to, or the other way round."""


class Process:
    """One script of the swarm, with its log folder and the process of its server, if it has one."""

    def __init__(self, directory: Path, name: str, command: list[str]) -> None:
        self.name = name
        self.log_root = directory / name
        self.output_path = directory / f"{name}.txt"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "XDG_RUNTIME_DIR": str(directory)}
        with self.output_path.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *command, f"--log-dir={self.log_root}"],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """What it has printed."""
        return self.output_path.read_text(errors="replace")

    def events(self, log: str, event: str) -> list[Mapping[str, Any]]:
        """Return the lines of one of its logs that carry an event."""
        found: list[Mapping[str, Any]] = []
        for path in self.log_root.glob(f"*-*/{log}.log"):
            if not path.parent.is_symlink():
                lines = path.read_text().rpartition("\n")[0].splitlines()
                found += [line for line in map(json.loads, lines) if line["event"] == event]
        return found

    def pids(self) -> list[int]:
        """Return the process itself and all below it."""
        parents: dict[int, int] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = path.read_text().rpartition(")")[2].split()
                parents[int(path.parent.name)] = int(fields[1])
        found = [self.process.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it and to all below it, as if its whole machine were meant."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> None:
        """Kill it and wait for it."""
        self.signal(signal.SIGKILL)
        self.process.wait()


class Swarm:
    """The run: a client with its host, and servers that come and go."""

    def __init__(self, directory: Path, config_path: Path | None, public_ip: str | None) -> None:
        """Start the client.

        Args:
            directory: of all logs.
            config_path: what is trained; None: a small model of the sandbox's kind.
            public_ip: the address of this machine at which all peers are to be reached; None: its own choice.

        Raises:
            ConfigError: this cannot be trained in at least two stages.
        """
        self.directory = directory
        self.servers: list[Process] = []
        flags = [*FLAGS, *(SMALL_MODEL if config_path is None else ())]
        config = load_config(config_path or SANDBOX, flags)
        if config.num_stages < 2:
            raise ConfigError(f"{config_path}: a head and a tail need model_pipeline.stages = 2 or more")
        self.num_stages = config.num_stages
        self.prefix = config.experiment_prefix
        self.own_flags = [f"--swarm-key-file={directory / 'swarm.key'}"]
        if public_ip is not None:
            self.own_flags.append(f"--public-ip={public_ip}")
        flags += [f"--config-path={config_path or SANDBOX}", f"--num-servers={2 * self.num_stages}"]
        self.client = Process(directory, "client", ["start_trainer_client.py", *flags, *self.own_flags])

    def _peers(self) -> Path | None:
        found = [path for path in self.client.log_root.glob("*-*/initial_peers.txt") if path.stat().st_size]
        return found[0] if found else None

    def start_server(self) -> Process:
        """Start a server, which takes the stage that needs one most."""
        name = f"server{len(self.servers)}"
        command = ["start_servers.py", "--num-servers=1", "--device=cpu", f"--experiment-prefix={self.prefix}"]
        command += self.own_flags
        peers = self.until(START_S, "the run's addresses", self._peers)
        command += [f"--initial-peers=@{peers}"]
        server = Process(self.directory, name, command)
        self.servers.append(server)
        return server

    def stage_of(self, server: Process) -> int:
        """Return the stage that a server has taken, once it has."""
        ready = self.until(START_S, f"{server.name} to serve", lambda: server.events("server_0", "server.ready"))
        return int(ready[-1]["stage"])

    def num_records(self) -> int:
        """Return how many rounds have a record."""
        return len(list(self.client.log_root.glob("*-*/rounds/round_*.json"))) - 1

    def goes_on(self, within_s: float = STEP_S) -> None:
        """Wait for two more records than there are: at least one whole round trained from now on."""
        before = self.num_records()
        self.until(within_s, "two more rounds", lambda: self.num_records() >= before + 2)

    def until(self, within_s: float, what: str, holds: Callable[[], Any]) -> Any:
        """Return the first true value of `holds`."""
        deadline_s = time.monotonic() + within_s
        while not (value := holds()):
            if self.client.process.poll() is not None:
                raise Failed(f"the run has ended: {self.client.output[-2000:]}")
            if time.monotonic() > deadline_s:
                raise Failed(f"waited {within_s:.0f} s for {what}")
            time.sleep(0.05)
        return value

    def end(self) -> None:
        """Leave no process."""
        for process in (self.client, *self.servers):
            process.signal(signal.SIGCONT)
            process.end()


def check(holds: bool, what: str) -> None:
    """Fail, and say what was expected, unless it holds."""
    if not holds:
        raise Failed(what)


def say(text: str) -> None:
    """Print a line at once."""
    print(f"{time.monotonic() - _BEGUN_S:6.1f} s  {text}", flush=True)


_BEGUN_S = time.monotonic()


def staged_shutdown(swarm: Swarm) -> None:
    """Do what the module's docstring says.

    Raises:
        Failed: at the first thing that is not as it should be.
    """
    # One after the other, so that each sees where the others serve, however slow this machine is.
    head, tail = 0, swarm.num_stages - 1
    stages = [swarm.stage_of(swarm.start_server()) for _ in range(2 * swarm.num_stages)]
    two_each = sorted([*range(swarm.num_stages)] * 2)
    check(sorted(stages) == two_each, f"two servers for each stage, not {stages}")
    heads, tails = ([s for s, stage in zip(swarm.servers, stages, strict=True) if stage == k] for k in (head, tail))
    swarm.goes_on()
    say(f"{len(stages)} servers serve stages {stages}; {swarm.num_records()} rounds are recorded")

    tails[0].end()
    swarm.goes_on()
    say(f"a tail is killed: training goes on, {swarm.num_records()} rounds")

    heads[0].end()
    swarm.goes_on()
    say(f"a head is killed: training goes on over one head and one tail, {swarm.num_records()} rounds")

    # The last one that has the stage's state: it hangs, as a machine whose power is saved or whose cable is out.
    heads[1].signal(signal.SIGSTOP)
    stopped = swarm.until(STEP_S, "a message", lambda: swarm.client.events("client_0", "training.stopped"))
    check(stopped[-1]["stages"] == [0], f"a message that names stage 0, not {stopped[-1]['stages']}")
    before = swarm.num_records()
    time.sleep(SILENCE_S)
    check(swarm.num_records() == before, "no round without the head stage")
    check(swarm.client.process.poll() is None, "a run that waits for servers")
    say(f"the other head is gone: training has stopped at round {before}, stage 0 is named")

    heads[1].signal(signal.SIGCONT)
    back = [swarm.start_server()]
    joined = [swarm.stage_of(back[0])]
    back.append(swarm.start_server())
    joined.append(swarm.stage_of(back[1]))
    swarm.goes_on()
    check(sorted(joined) == [head, tail], f"one new server for the head and one for the tail, not {joined}")
    for server in back:
        swarm.until(STEP_S, f"{server.name} to get its state", lambda s=server: s.events("server_0", "round.swapped"))
    swarm.goes_on()
    say(f"servers are back and have the state of their stages: training goes on, {swarm.num_records()} rounds")

    hashes: dict[tuple[int, int], set[str]] = {}
    for server, stage in zip((tails[1], heads[1], *back), (tail, head, *joined), strict=True):
        for event in server.events("server_0", "round.swapped"):
            hashes.setdefault((stage, event["round"]), set()).add(event["parameters"])
    different = [where for where, found in hashes.items() if len(found) > 1]
    check(not different, f"the same parameters on all servers of a stage, not different ones at {different}")
    say(f"all servers of a stage held the same parameters after each round ({len(hashes)} compared)")
    lose_the_stage(swarm, [heads[1], *(server for server, stage in zip(back, joined, strict=True) if stage == 0)])


def lose_the_stage(swarm: Swarm, heads: list[Process]) -> None:
    """Kill the last servers of the head stage for good, and start another server.

    Raises:
        Failed: at the first thing that is not as it should be.
    """
    num_before = len(swarm.client.events("client_0", "training.stopped"))
    for head in heads:
        head.end()
    stopped = swarm.until(STEP_S, "a message", lambda: swarm.client.events("client_0", "training.stopped")[num_before:])
    check(stopped[-1]["stages"] == [0], f"a message that names stage 0, not {stopped[-1]['stages']}")
    recorded = swarm.num_records()
    say(f"all heads are killed: training has stopped at round {recorded}, stage 0 is named")

    # It is the new one or one of the tail, whichever is there first.
    swarm.start_server()
    swarm.goes_on(RESTORE_S)
    lost = [each["in_round"] - 1 - each["base_round"] for each in swarm.client.events("client_0", "stage.began_anew")]
    check(sum(lost) <= 1, f"at most a round of stage 0 that is lost, not {sum(lost)}")
    say(f"the head is served again with what the mirror holds: {sum(lost)} rounds are lost, and training goes on")


@contextlib.contextmanager
def folder(*, keep: bool) -> Iterator[Path]:
    """Make a folder for logs, and remove it at the end unless it is wanted."""
    directory = Path(tempfile.mkdtemp(prefix="failover-"))
    try:
        yield directory
    finally:
        if not keep:
            shutil.rmtree(directory, ignore_errors=True)


def _from_here(text: str) -> Path:
    """Return a path that means the same in the scripts' folder."""
    return Path(text).resolve()


def main() -> int:
    """Run the whole sequence and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep-logs", action="store_true", help="leave the logs of all processes")
    parser.add_argument("--config-path", type=_from_here, help="what is trained, in two stages or more (else: sandbox)")
    parser.add_argument("--public-ip", help="the address of this machine at which its peers are to be reached")
    arguments = parser.parse_args()
    with folder(keep=arguments.keep_logs) as directory:
        where = f" (logs in {directory})" if arguments.keep_logs else ""
        swarm: Swarm | None = None
        try:
            swarm = Swarm(directory, arguments.config_path, arguments.public_ip)
            staged_shutdown(swarm)
        except ConfigError as error:
            print(f"test_failover: error: {error}", file=sys.stderr)
            return 2
        except Failed as error:
            if swarm is not None:
                print(swarm.client.output[-2000:])
            print(f"FAIL: {error}{where}")
            return 1
        finally:
            if swarm is not None:
                swarm.end()
        print(f"PASS: the swarm went on after each loss, and said which one had cost it what{where}")
        return 0


if __name__ == "__main__":
    sys.exit(main())
