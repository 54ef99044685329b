"""A newcomer and the holders of its stage under seeded faults: some die, lie, freeze, are slow, or swap."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from math import inf

from tests.simulation.kernel import Kernel
from tests.simulation.safety import Broken

from shoal.ids import PeerId
from shoal.swarm.content_transfer import (
    AskDonor,
    ContentTransfer,
    Distrust,
    Late,
    Nobody,
    Request,
    Store,
    TransferDone,
    TransferEffect,
    TransferSettings,
    Verify,
)

SETTINGS = TransferSettings(window=3, retry_s=0.5, slow_s=2.0, timeout_s=40.0)
END_S = 200.0


def sha(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def content(round: int, chunk: int) -> bytes:
    return f"{round}/{chunk}".encode()


class Donor:
    """A holder. `lies` are the chunks that it sends wrong; with `consistent` it offers them wrong, too."""

    def __init__(self, world: World, peer: PeerId, sure: bool) -> None:
        rng = world.rng
        self.world, self.peer, self.round = world, peer, world.round
        self.alive = True
        self.boot = 0
        self.delay_s = rng.choice((0.01, 0.05, 0.3))
        self.is_here = random.Random(f"{peer} of {world.seed}").random() < 0.3
        self.lies = set[int]()
        self.consistent = rng.random() < 0.5
        self.free_at_s = 0.0
        self.frozen_until_s = 0.0
        if not sure and rng.random() < 0.4:
            self.lies = {c for c in range(world.num_chunks) if rng.random() < rng.choice((0.1, 1.0))}

    def data(self, chunk: int, offered: bool) -> bytes:
        wrong = chunk in self.lies and (self.consistent or not offered)
        return content(self.round, chunk) + (b"!" if wrong else b"")

    def ask(self, round: int) -> None:
        if round != self.round:
            self.world.later(self, lambda: self.world.machine.refused(self.peer, self.world.now_s), round)
            return
        digests = b"".join(sha(self.data(chunk, True)) for chunk in range(self.world.num_chunks))
        self.world.later(self, lambda: self._offered(digests), round)

    def _offered(self, digests: bytes) -> list[TransferEffect]:
        return self.world.machine.offered(self.peer, digests, self.world.now_s, is_here=self.is_here)

    def read(self, round: int, chunk: int) -> None:
        if round != self.round:
            self.world.later(self, lambda: self.world.machine.refused(self.peer, self.world.now_s), round)
            return
        data = self.data(chunk, False)
        self.world.later(self, lambda: self.world.received(self.peer, chunk, data), round)


class World:
    """One seeded transfer."""

    def __init__(self, seed: int, machine_class: type[ContentTransfer] = ContentTransfer) -> None:
        self.network, self.seed = Kernel(seed), seed
        self.rng = rng = self.network.rng
        self.machine_class = machine_class
        self.round = 7
        self.num_chunks = rng.choice((0, 1, 2, 13, 40))
        self.donors = {
            peer: Donor(self, peer, number == 0)
            for number in range(rng.randint(1, 4))
            for peer in [PeerId(f"D{number}")]
        }
        self.liars = {peer for peer, donor in self.donors.items() if donor.lies}
        self.distrusted: set[PeerId] = set()
        self.num_nobody = self.num_late = self.num_requests = 0
        self.stored: dict[int, bytes] = {}
        self.done = False
        self._arrived: tuple[int, bytes] = (0, b"")
        self._outstanding: dict[PeerId, int] = {}
        for _ in range(rng.randint(0, 5)):
            self.at(rng.uniform(0.0, 20.0), self._fault)
        self._begin()
        self._tick()

    # -- time and messages

    @property
    def now_s(self) -> float:
        return self.network.now_s

    def at(self, at_s: float, call: Callable[[], object]) -> None:
        self.network.at(at_s, call)

    def later(self, donor: Donor, call: Callable[[], list[TransferEffect]], round: int) -> None:
        """An answer of a donor: in order, at its speed, unless the donor dies or the newcomer has another aim."""
        boot = donor.boot
        donor.free_at_s = max(self.now_s, donor.free_at_s, donor.frozen_until_s) + donor.delay_s * self.rng.random()

        def arrive() -> None:
            if donor.alive and donor.boot == boot and round == self.round:
                self._do(call())

        self.at(donor.free_at_s, arrive)

    def received(self, peer: PeerId, chunk: int, data: bytes) -> list[TransferEffect]:
        self._outstanding[peer] -= 1
        self._arrived = (chunk, data)
        return self.machine.received(peer, chunk, sha(data), self.now_s)

    def _tick(self) -> None:
        if self.done:
            return
        self._do(self.machine.peers(self.donors, self.now_s))
        self._do(self.machine.tick(self.now_s))
        if self.machine.wake_at_s < inf:
            self.at(max(self.machine.wake_at_s, self.now_s + 1e-3), self._tick)

    # -- the newcomer's driver

    def _begin(self) -> None:
        self.machine = self.machine_class(self.num_chunks, SETTINGS)
        self.stored = {}
        self._outstanding = dict.fromkeys(self.donors, 0)

    def _do(self, effects: list[TransferEffect]) -> None:
        for effect in effects:
            match effect:
                case AskDonor(peer):
                    self._post(peer, lambda donor: donor.ask(self.round))
                case Request(peer, chunk):
                    self.num_requests += 1
                    self._outstanding[peer] += 1
                    if self._outstanding[peer] > SETTINGS.window:
                        raise Broken(f"{peer} is asked for {self._outstanding[peer]} chunks at a time")
                    self._post(peer, lambda donor, chunk=chunk: donor.read(self.round, chunk))
                case Store(chunk):
                    if self._arrived[0] != chunk:
                        raise Broken(f"chunk {chunk} was not received")
                    self.stored[chunk] = self._arrived[1]
                case Verify():
                    if self.stored.keys() != set(range(self.num_chunks)):
                        raise Broken("verified before it was complete")
                    is_right = self._is_right()
                    self.at(self.now_s + 0.01, lambda m=self.machine, r=is_right: self._verified(m, r))
                case Distrust(peer, _):
                    if peer not in self.liars:
                        raise Broken(f"{peer} is honest")
                    self.distrusted.add(peer)
                case Nobody():
                    self.num_nobody += 1
                case Late():
                    self.num_late += 1
                case TransferDone():
                    if not self._is_right():
                        raise Broken("other bytes than the record's are loaded")
                    self.done = True

    def _is_right(self) -> bool:
        """Whether what is stored are the record's bytes."""
        return all(self.stored[chunk] == content(self.round, chunk) for chunk in range(self.num_chunks))

    def _verified(self, machine: ContentTransfer, is_right: bool) -> None:
        if machine is self.machine:
            self._do(machine.verified(is_right, self.now_s))

    def _post(self, peer: PeerId, call: Callable[[Donor], None]) -> None:
        donor = self.donors[peer]
        if donor.alive:
            call(donor)
        else:
            self.at(self.now_s + 0.01, lambda: self._lost(peer))

    def _lost(self, peer: PeerId) -> None:
        self._outstanding[peer] = 0
        self._do(self.machine.lost(peer, self.now_s))

    # -- faults

    def _fault(self) -> None:
        rng = self.rng
        kind, donor = rng.random(), rng.choice(list(self.donors.values()))
        if kind < 0.4:
            self._die(donor)
        elif kind < 0.7:
            donor.frozen_until_s = self.now_s + rng.uniform(1.0, 6.0)
        else:
            self._next_round()

    def _die(self, donor: Donor) -> None:
        """A donor dies; the first one comes back with its state, as one does that was only cut off."""
        if not donor.alive:
            return
        donor.alive = False
        donor.boot += 1
        self.at(self.now_s + 0.02, lambda: self._lost(donor.peer))
        if donor.peer == "D0":
            self.at(self.now_s + self.rng.uniform(0.5, 8.0), lambda: self._return(donor))

    def _return(self, donor: Donor) -> None:
        donor.alive, donor.round = True, self.round

    def _next_round(self) -> None:
        """A record is committed: the newcomer aims at it at once, the holders swap one by one."""
        if self.done:
            return
        self.round += 1
        for donor in self.donors.values():
            self.at(self.now_s + self.rng.uniform(0.0, 1.0), lambda d=donor: self._return(d) if d.alive else None)
        self._begin()
        self._do(self.machine.peers(self.donors, self.now_s))

    def run(self) -> None:
        """Run to the end.

        Raises:
            Broken: Something that must never happen has happened, or the state did not come.
        """
        self.network.run(END_S, lambda: self.done)
        if not self.done:
            raise Broken(f"nothing loaded after {self.now_s:.0f} s")
