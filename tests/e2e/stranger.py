"""Attacks a swarm through its DHT, from two nodes and without the swarm's key.

One asks and says what would end a process, or fill its memory. The other one shows the proofs of a member, so that the
swarm speaks with it, and stores what it can make of what it hears.

It begins with the first line of its standard input, and ends with the last one.

Arguments: JSON object with `initial_peers`, `state_dir`, `pause_s` (between two rounds of all attacks), `shows` (the
namespace of the proofs). Says "joined" when it takes part, "enough" after two rounds against every topic, and at the
end, as JSON, how many records of each kind it has stored. Standard error says which topics are missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.dht_stranger import forgeries, stranger
from tests.e2e.launched import END_S, START_S, Launched

from shoal.clock import SystemClock
from shoal.ids import PeerId
from shoal_lab.event_log import time_of
from shoal_lab.observed import Swarm

TOPICS = {"run", "client", "mirror", "monitor", "stage"}
"""Without their numbers: whom a node of a larger DHT asks for which stage is the draw of their ids."""
ENOUGH = 2
ENOUGH_S = 300.0
"""In which it must have tried everything: a quiet swarm asks all nodes every two minutes."""
_BATCH = 32
_LOOK_S = 0.2


@dataclass
class Attack:
    """The attacker's process.

    Attributes:
        stored: how many records of each kind it has stored, once it has ended.
    """

    process: subprocess.Popen[str]
    stored: dict[str, int] = field(default_factory=dict[str, int])

    def begin(self) -> None:
        """Have it attack; until then it only takes part, and hears what others ask for."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def joined(self) -> None:
        """Wait until it is in the DHT. While there are at most five nodes, each is asked for all topics."""
        self._says("joined", START_S)

    def had_enough(self, within_s: float = ENOUGH_S) -> None:
        """Wait until it has tried everything against every topic."""
        self._says("enough", within_s)

    def _says(self, word: str, within_s: float) -> None:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], within_s)[0], f"{word} within {within_s} s"
        assert self.process.stdout.readline() == f"{word}\n"

    def end(self) -> None:
        """Have it end, and take its counts."""
        told, _ = self.process.communicate("", timeout=END_S)
        self.stored = json.loads(told.splitlines()[-1])


@contextlib.contextmanager
def attacking(initial_peers: Sequence[str], pause_s: float, shows: str) -> Iterator[Attack]:
    """Give an attacker that has joined the DHT; it is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="sh", dir="/tmp") as state_dir:
        aims = {"initial_peers": list(initial_peers), "state_dir": state_dir, "pause_s": pause_s, "shows": shows}
        process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(aims)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Its own computing is not the attack.
            preexec_fn=lambda: os.nice(10),
        )
        try:
            attack = Attack(process)
            attack.joined()
            yield attack
        finally:
            process.kill()
            process.communicate()


def processes_of(runs: Sequence[Launched]) -> dict[int, str]:
    """Return the processes of these commands that last, by their names."""
    found: dict[int, str] = {}
    for pid in [pid for run in runs for pid in run.processes()]:
        with contextlib.suppress(OSError):
            found[pid] = Path(f"/proc/{pid}/comm").read_text().strip()
    return found


def harm_done(swarm: Swarm, before: dict[int, str], begun_unix_s: float) -> list[str]:
    """Return what an attack has reached of what it must not: a role that ended, a run that was left or taken."""
    after = processes_of(swarm.hosts)
    harm = [f"process {pid} ({name}) has ended" for pid, name in before.items() if pid not in after]
    for host in swarm.hosts:
        for path in sorted(host.require_log_dir().glob("*.log")):
            events = [event for event in host.log(path.stem).read() if time_of(event) >= begun_unix_s]
            harm += [f"{path.stem}: {event}" for event in events if event["event"] in _BAD_EVENTS]
        if '"evil"' in host.output or "run evil" in host.output:
            harm.append(f"a forged run is on the screen:\n{host.output}")
    return harm


_BAD_EVENTS = {
    "run.over",
    "run.taken_over",
    "run.silent",
    "role.lost",
    "server.lost",
    "scout.lost",
    "role.exited",
    "role.restarted",
    "client.waits",
}


async def main() -> None:
    """Attack."""
    aims: dict[str, Any] = json.loads(sys.argv[1])
    clock, begun, over, stored, rounds = SystemClock(), anyio.Event(), anyio.Event(), Counter[str](), Counter[str]()
    is_told, missing = False, TOPICS
    state_dir, initial_peers = Path(aims["state_dir"]), aims["initial_peers"]
    peers = [PeerId(maddr.rpartition("/p2p/")[2]) for maddr in initial_peers]
    async with (
        stranger(state_dir, initial_peers) as unheard,
        stranger(state_dir, initial_peers, aims["shows"]) as outsider,
        anyio.create_task_group() as tasks,
    ):

        async def listen() -> None:
            await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
            begun.set()
            await anyio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
            over.set()

        tasks.start_soon(listen)
        sys.stdout.write("joined\n")
        sys.stdout.flush()
        await begun.wait()
        while not over.is_set():
            stored[";".join(await unheard.overwhelm(peers))] += 1
            held = await outsider.look()
            forged = list(forgeries(held, clock.unix_s(), outsider.identity))
            for start in range(0, len(forged), _BATCH):
                await outsider.tell(forged[start : start + _BATCH])
                stored.update(each.kind for each in forged[start : start + _BATCH])
                await anyio.lowlevel.checkpoint()
                if over.is_set():
                    break
            rounds.update({each.topic.partition(".")[0] for each in held})
            left = {topic for topic in TOPICS if rounds[topic] < ENOUGH}
            if left != missing:
                missing = left
                sys.stderr.write(f"not attacked {ENOUGH} times yet: {sorted(missing)}\n")
            if not is_told and not missing:
                is_told = True
                sys.stdout.write("enough\n")
                sys.stdout.flush()
            with anyio.move_on_after(aims["pause_s"] if held else _LOOK_S):
                await over.wait()
    sys.stdout.write(json.dumps(stored) + "\n")


if __name__ == "__main__":
    anyio.run(main, backend_options={"use_uvloop": True})
