"""The wall clock of one host is set by an hour while it takes part, or was wrong before: what is believed then."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest
from anyio.abc import Process
from anyio.streams.text import TextReceiveStream

from shoal.clock import SystemClock
from shoal.control.dht import DhtNode
from shoal.control.records import Rejection, StageRecord, seal
from shoal.control.registry import Registry
from shoal.identity import Identity, namespace

KEY, CLOCK = b"c" * 32, SystemClock()
NAME = namespace(KEY, "clocks")
HOUR_S = 3600.0


@dataclass
class Stepping:
    """The other process."""

    process: Process
    output: str = ""

    async def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        await self.process.stdin.send(f"{line}\n".encode())

    async def until(self, holds: Callable[[str], bool]) -> None:
        assert self.process.stdout is not None
        text = TextReceiveStream(self.process.stdout)
        while not holds(self.output):
            self.output += await text.receive()


@dataclass
class Scene:
    """A registry of this process, and a peer with a clock of its own."""

    registry: Registry
    node: DhtNode
    other: Stepping

    def announce(self, load: float) -> None:
        self.registry.advertise(StageRecord(("unix:/steady",), 2.0, stage=0, load=load))

    async def sees(self, load: float) -> None:
        await self.registry.membership.wait_for(
            lambda view: any(
                replica.hop.addresses == ("unix:/stepping",) and replica.load == load for replica in view.replicas
            )
        )


@asynccontextmanager
async def beside(directory: Path, offset_s: float) -> AsyncIterator[Scene]:
    """Give a registry here and a peer whose clock is off by so much when it starts."""
    identity = Identity.generate()
    async with await DhtNode.create(identity, namespace=NAME, state_dir=directory, clock=CLOCK) as node:
        registry = Registry(node, identity, NAME, 1, CLOCK)
        script = Path(__file__).with_name("stepping_peer.py")
        theirs = directory / "o"
        theirs.mkdir()
        arguments = [KEY.hex(), str(theirs), str(offset_s), *await node.visible_maddrs()]
        async with (
            anyio.create_task_group() as tasks,
            await anyio.open_process([sys.executable, str(script), *arguments], stderr=None) as process,
        ):
            tasks.start_soon(registry.run)
            scene = Scene(registry, node, Stepping(process))
            await scene.other.until(lambda output: "joined" in output)
            try:
                yield scene
            finally:
                tasks.cancel_scope.cancel()
                assert process.stdin is not None
                with anyio.CancelScope(shield=True), anyio.move_on_after(10):
                    await process.stdin.aclose()
                    await process.wait()


@pytest.fixture
async def short() -> AsyncIterator[Path]:
    # pytest's own names are too long for p2pd's sockets.
    with tempfile.TemporaryDirectory(prefix="shoal") as name:
        yield Path(name)


@pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S])
async def test_a_clock_that_is_set_by_an_hour_while_its_peer_takes_part_changes_nothing(
    short: Path, step_s: float
) -> None:
    async with beside(short, 0.0) as scene:
        scene.announce(1.0)
        await scene.sees(0.0)
        await scene.other.until(lambda output: "sees 1.0" in output)
        await scene.other.tell(f"step {step_s}")
        await scene.other.until(lambda output: "stepped" in output)
        # What either announces from now on is believed by the other, and nobody has expired.
        for load in (2.0, 3.0):
            await scene.other.tell(f"load {load}")
            await scene.sees(load)
            scene.announce(load)
            await scene.other.until(lambda output, load=load: f"sees {load}" in output)
        assert "differs" not in scene.other.output
        assert scene.registry.clock_difference_s is None


async def test_a_record_of_before_the_step_cannot_be_replayed_to_the_peer_whose_clock_went_back(short: Path) -> None:
    gone = Identity.generate()
    expired_unix_s = CLOCK.unix_s() - HOUR_S + 20.0
    replayed = seal(
        gone,
        NAME,
        "stage.0",
        StageRecord(("unix:/gone",), 1.0, stage=0, load=77.0),
        sequence=5,
        expires_unix_s=expired_unix_s,
    )
    async with beside(short, 0.0) as scene:
        await scene.other.tell(f"step {-HOUR_S}")
        await scene.other.until(lambda output: "stepped" in output)
        checker = scene.node.checker
        assert checker.accept("stage.0", gone.peer_id, replayed) is None
        assert checker.rejected[Rejection.EXPIRED] == 1
        raw = scene.node._node
        assert raw is not None
        await raw.store(f"{NAME}/stage.0", replayed, expired_unix_s, subkey=str(gone.peer_id))
        for load in (1.0, 2.0, 3.0):
            scene.announce(load)
            await scene.other.until(lambda output, load=load: f"sees {load}" in output)
        assert "77.0" not in scene.other.output


@pytest.mark.parametrize("offset_s", [HOUR_S, -HOUR_S])
async def test_a_peer_that_starts_with_a_wrong_clock_is_believed_by_nobody_and_says_why(
    short: Path, offset_s: float
) -> None:
    async with beside(short, offset_s) as scene:
        scene.announce(1.0)
        await scene.registry.membership.wait_for(lambda view: view.num_replicas(1) == (1,))
        # From then on it has read the registry a few times more.
        said = scene.other.output.count("differs")
        await scene.other.until(lambda output: output.count("differs") > said + 3)
        said_s = float(scene.other.output.partition("differs ")[2].split()[0])
        assert said_s == pytest.approx(-offset_s, abs=60)
        assert "sees" not in scene.other.output
        assert scene.registry.membership.view.num_replicas(1) == (1,)
        # What is stored here by who is ahead is refused and named; of who is behind nothing comes that is not expired.
        named = [(ahead_s, name) for ahead_s, name in scene.node.clock_differences.values()]
        assert named == [(pytest.approx(offset_s, abs=60), "server 0@unnamed")] * (offset_s > 0)


async def test_a_peer_that_has_not_counted_for_an_hour_takes_part_again_once_its_wall_clock_is_set(short: Path) -> None:
    """As a virtual machine that was paused: it is behind until then, whatever it reads."""
    async with beside(short, -HOUR_S) as scene:
        scene.announce(1.0)
        await scene.other.until(lambda output: "differs" in output)
        await scene.other.tell(f"step {HOUR_S}")  # set to something that nobody else says
        await scene.other.until(lambda output: "stepped" in output)
        said = scene.other.output.count("differs")
        await scene.other.until(lambda output: output.count("differs") > said + 3)
        assert "sees" not in scene.other.output
        await scene.other.tell("step 0")
        await scene.other.until(lambda output: "sees 1.0" in output)
        await scene.other.tell("load 5")
        await scene.sees(5.0)
