"""The one simulated network: processes, connections between them, and all that goes wrong with both.

It keeps the promises of `transport.base` and no more. There is one connection per pair, made on demand. Of one sender,
control messages come in order, bulk messages (those with tensors) come in order, and a control message may overtake
bulk ones but not the other way round. Each end hears of a connection's end exactly once, before anything of the next
one; what it sends until then is dropped. Some runs break even that (`repeats`, `in_order`): no machine relies on it.

What an unreachable peer costs follows production: a frame that is lost for good ends its connection; a silence of
`DEADLINE_S` ends it too, whoever is silent; a shorter one only delays what is on its way, as TCP sends it again.

To add a fault, write it here as a method that ends by itself, and give it a chance in `faults.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from tests.simulation.kernel import Kernel

DEADLINE_S = 2.0
"""Silence after which a connection is closed."""
NOTICE_S = 0.05
"""Within this the end of a connection is noticed where its socket is closed."""
_TICK_S = 1e-6


class Host(Protocol):
    """A process on the network."""

    def deliver(self, sender: str, message: object) -> None:
        """Take a message."""
        ...

    def lost(self, peer: str) -> None:
        """The connection with `peer` has ended, or none could be made."""
        ...


@dataclass(slots=True)
class Manners:
    """What the network of one run is like; drawn from its seed.

    Attributes:
        delay_s: Mean time that a message travels.
        slow_rate, slow_s: The share of messages that take longer, and how much; they hold up what follows.
        loss_rate: The share of messages that are lost for good.
        in_order: Whether the promised order is kept.
        repeat_rate: The share of messages that arrive a second time, later.
    """

    delay_s: float = 0.03
    slow_rate: float = 0.0
    slow_s: float = 0.0
    loss_rate: float = 0.0
    in_order: bool = True
    repeat_rate: float = 0.0

    @classmethod
    def drawn(cls, rng: random.Random) -> Manners:
        """Those of one run: some faults at a time, so that each is also seen alone."""
        manners = cls(delay_s=rng.choice((0.005, 0.025, 0.025, 0.06)))
        manners.slow_rate, manners.slow_s = rng.choice(((0.0, 0.0), (0.0, 0.0), (0.03, 0.3), (0.02, 1.0)))
        manners.loss_rate = rng.choice((0.0, 0.0, 0.0, 0.002, 0.01))
        manners.in_order = rng.random() < 0.7
        manners.repeat_rate = rng.choice((0.0, 0.0, 0.05))
        return manners


class _Lane:
    """One direction of a connection; `other` is the opposite one, and both are open or neither."""

    __slots__ = ("bulk_s", "control_s", "is_open", "last_words", "other", "receiver", "sender")

    def __init__(self, sender: str, receiver: str) -> None:
        self.sender, self.receiver = sender, receiver
        self.is_open = True
        self.last_words = -1  # the notice of the end before which what was sent still arrives
        self.control_s = self.bulk_s = 0.0  # when the newest message of each class arrives
        self.other = self


class Network(Kernel):
    """Processes, by peer id, and their connections.

    Attributes:
        hosts: The processes that run.
        boots: How often each was started.
        trace: What happened, if somebody wants to know: (time, sender, receiver, message).
        faults: When each thing that has gone wrong began, and when it was over.
    """

    def __init__(self, seed: int | str, is_bulk: Callable[[object], bool], manners: Manners | None = None) -> None:
        super().__init__(seed)
        self.hosts: dict[str, Host] = {}
        self.boots: dict[str, int] = {}
        self.trace: list[tuple[float, str, str, object]] | None = None
        self.manners = Manners.drawn(self.rng) if manners is None else manners
        self.faults: list[tuple[float, float]] = []
        self._is_bulk = is_bulk
        self._lanes: dict[tuple[str, str], _Lane] = {}
        self._losing: dict[tuple[str, str], int] = {}  # ends that have not heard yet; the number of their notice
        self._blocked_until_s: dict[tuple[str, str], float] = {}
        self._paused_until_s: dict[str, float] = {}
        self._slowness: dict[str, float] = {}
        self._wall_offset_s: dict[str, float] = {}
        self._blocks: list[tuple[tuple[str, str], float, float]] = []
        self._outages: list[tuple[Collection[str], float, float]] = []
        self._started_s: dict[str, float] = {}

    # -- processes

    def start(self, peer: str, host: Host) -> None:
        """A process starts, or takes over from what the process was."""
        self.boots[peer] = self.boots.get(peer, 0) + 1
        self.hosts[peer] = host
        self._started_s[peer] = self.now_s
        self._paused_until_s.pop(peer, None)
        self.note(peer, "START", self.boots[peer])

    def on_host(self, peer: str, delay_s: float, call: Callable[..., object], *arguments: object) -> None:
        """Call within the process that `peer` is now, once it is awake; never after its crash."""
        self.at(self.now_s + delay_s, self._run_on, peer, self.boots[peer], call, arguments)

    def _run_on(self, peer: str, boot: int, call: Callable[..., object], arguments: tuple[object, ...]) -> None:
        if self.boots[peer] != boot or peer not in self.hosts:
            return
        until_s = self._paused_until_s.get(peer, 0.0)
        if until_s > self.now_s:
            self.at(until_s + _TICK_S, self._run_on, peer, boot, call, arguments)
        else:
            call(*arguments)

    def awake(self, peer: str) -> bool:
        """Whether the process runs and is not frozen."""
        return peer in self.hosts and self._paused_until_s.get(peer, 0.0) <= self.now_s

    def slowness(self, peer: str) -> float:
        """How many times longer than others the peer takes now."""
        return self._slowness.get(peer, 1.0)

    def wall_s(self, peer: str) -> float:
        """The wall clock of the peer's host. Machines must not depend on it: it steps."""
        return 1.7e9 + self.now_s + self._wall_offset_s.get(peer, 0.0)

    # -- messages

    def send(self, sender: str, receiver: str, message: object) -> None:
        """Post a message; it is dropped if the sender has not heard yet that its connection has ended."""
        if self._losing and (sender, receiver) in self._losing:
            return
        lane = self._lanes.get((sender, receiver))
        if lane is None:
            if sender == receiver:
                self.on_host(sender, 1e-3, self._loop_back, sender, message)
                return
            lane = self._dial(sender, receiver)
            if lane is None:
                return
        manners, random_ = self.manners, self._random
        if manners.loss_rate and random_() < manners.loss_rate:
            self._fault(sender, "LOSES A FRAME TO", receiver)
            self._close(lane, self.rng.uniform(0.0, DEADLINE_S), self.rng.uniform(0.0, DEADLINE_S))
            return
        delay_s = self.exponential(manners.delay_s)
        if self._slowness:
            delay_s *= max(self._slowness.get(sender, 1.0), self._slowness.get(receiver, 1.0))
            delay_s = min(delay_s, DEADLINE_S)
        if manners.slow_rate and random_() < manners.slow_rate:
            delay_s += manners.slow_s
        at_s = self.now_s + delay_s
        if manners.in_order:
            if self._is_bulk(message):
                lane.bulk_s = at_s = max(at_s, lane.control_s + _TICK_S, lane.bulk_s + _TICK_S)
            else:
                lane.control_s = at_s = max(at_s, lane.control_s + _TICK_S)
        self.at(at_s, self._arrive, lane, message)
        if manners.repeat_rate and random_() < manners.repeat_rate:
            self.at(at_s + self.exponential(0.3), self._arrive, lane, message)

    def _arrive(self, lane: _Lane, message: object) -> None:
        sender, receiver = lane.sender, lane.receiver
        if not lane.is_open and self._losing.get((receiver, sender)) != lane.last_words:
            return
        if self._paused_until_s or self._blocked_until_s:
            until_s = self._paused_until_s.get(receiver, 0.0)
            until_s = max(until_s, self._blocked_until_s.get((sender, receiver), 0.0))
            if until_s > self.now_s:
                # Entries of one time stay in order, so what waits together arrives in order.
                self.at(until_s + _TICK_S, self._arrive, lane, message)
                return
        if lane.is_open and self._losing and (receiver, sender) in self._losing:
            # Of a new connection, before the end of the one before it was taken.
            self._tell(receiver, sender, self._losing[receiver, sender])
            if not lane.is_open or receiver not in self.hosts:
                return
        if self.trace is not None:
            self.trace.append((self.now_s, sender, receiver, message))
        self.hosts[receiver].deliver(sender, message)

    def _loop_back(self, peer: str, message: object) -> None:
        self.hosts[peer].deliver(peer, message)

    # -- connections

    def dial(self, one: str, other: str) -> bool:
        """Make a connection if there is none; returns whether there is one. If not, `lost` follows."""
        is_linked = (one, other) in self._lanes and (one, other) not in self._losing
        return is_linked or ((one, other) not in self._losing and self._dial(one, other) is not None)

    def is_linked(self, one: str, other: str) -> bool:
        """Whether there is a connection."""
        return (one, other) in self._lanes

    def blocked(self, one: str, other: str) -> bool:
        """Whether nothing gets through in one of the two directions."""
        blocked, now_s = self._blocked_until_s, self.now_s
        return max(blocked.get((one, other), 0.0), blocked.get((other, one), 0.0)) > now_s

    def reachable(self, first: str, second: str, since_s: float, until_s: float) -> bool:
        """Whether two processes could talk to each other for a whole interval."""
        pair = {first, second}
        is_there = all(self._started_s.get(peer, until_s) <= since_s and peer in self.hosts for peer in pair)
        return is_there and not any(
            begun_s < until_s and ended_s > since_s and pair.issuperset(who)
            for who, begun_s, ended_s in (*self._blocks, *self._outages)
        )

    def _dial(self, sender: str, receiver: str) -> _Lane | None:
        if receiver not in self.hosts or self.blocked(sender, receiver):
            slowly = receiver in self.hosts and self._random() < 0.3
            self._lose(sender, receiver, self.rng.uniform(0.001, 1.0 if slowly else NOTICE_S))
            return None
        lane, other = _Lane(sender, receiver), _Lane(receiver, sender)
        lane.other, other.other = other, lane
        self._lanes[sender, receiver], self._lanes[receiver, sender] = lane, other
        if self._paused_until_s.get(receiver, 0.0) > self.now_s + DEADLINE_S:
            self.after(DEADLINE_S, self._close, lane, 0.0, 0.0)
        return lane

    def _close(self, lane: _Lane, sender_notices_s: float, receiver_notices_s: float) -> None:
        if not lane.is_open:
            return
        other = lane.other
        lane.is_open = other.is_open = False
        del self._lanes[lane.sender, lane.receiver], self._lanes[other.sender, other.receiver]
        self._lose(lane.sender, lane.receiver, sender_notices_s)
        self._lose(lane.receiver, lane.sender, receiver_notices_s)

    def _lose(self, here: str, there: str, delay_s: float) -> None:
        if here not in self.hosts:
            return
        self.num_events += 1
        self._losing[here, there] = self.num_events
        self._outages.append(((here, there), self.now_s, self.now_s + delay_s))
        self.on_host(here, delay_s, self._tell, here, there, self.num_events)

    def _tell(self, here: str, there: str, number: int) -> None:
        if self._losing.get((here, there)) == number:
            del self._losing[here, there]
            self.note(here, "HAS LOST", there)
            self.hosts[here].lost(there)

    def _close_all(self, peer: str, notice_s: float) -> list[_Lane]:
        lanes = [lane for pair, lane in self._lanes.items() if pair[0] == peer]
        for lane in lanes:
            self._close(lane, self.rng.uniform(0.0, NOTICE_S), self.rng.uniform(0.0, notice_s))
        return lanes

    # -- faults

    def crash(self, peer: str, silently: bool = False) -> None:
        """A process is killed; `silently`: with its machine, so that no socket closes and only silence tells."""
        self._fault(peer, "CRASH", silently)
        del self.hosts[peer]
        self._outages.append(((peer,), self.now_s, self.now_s + DEADLINE_S))
        for pair in [pair for pair in self._losing if pair[0] == peer]:
            del self._losing[pair]
        for lane in self._close_all(peer, DEADLINE_S if silently else NOTICE_S):
            # What the dead one's system has taken over is sent, before the end of the connection.
            lane.last_words = self._losing.get((lane.receiver, peer), -1)

    def replace(self, peer: str, host: Host) -> None:
        """A process becomes another one without dying: its connections end."""
        for pair in [pair for pair in self._losing if pair[0] == peer]:
            del self._losing[pair]
        self._close_all(peer, NOTICE_S)
        for pair in [pair for pair in self._losing if pair[0] == peer]:
            del self._losing[pair]
        self.start(peer, host)

    def pause(self, peer: str, duration_s: float) -> None:
        """Freeze a process; whoever hears nothing for longer than the deadline closes the connection."""
        self._fault(peer, "PAUSE", duration_s, duration_s)
        self._paused_until_s[peer] = max(self._paused_until_s.get(peer, 0.0), self.now_s + duration_s)
        self._outages.append(((peer,), self.now_s, self._paused_until_s[peer]))
        if duration_s > DEADLINE_S:
            self.after(DEADLINE_S, self._silent, peer, self.boots[peer])

    def _silent(self, peer: str, boot: int) -> None:
        if self.boots[peer] == boot and self._paused_until_s.get(peer, 0.0) > self.now_s:
            self._close_all(peer, NOTICE_S)

    def cut(self, one: str, other: str, duration_s: float) -> None:
        """A connection breaks; for a while no other one can be made. Sometimes one end hears of it late (half-open)."""
        self._fault(one, "CUT", (other, duration_s), duration_s)
        self._block(one, other, duration_s)
        self._block(other, one, duration_s)
        lane = self._lanes.get((one, other))
        if lane is not None:
            notices_s = [self.rng.uniform(0.0, NOTICE_S), self.rng.uniform(0.0, NOTICE_S)]
            if self._random() < 0.3:
                notices_s[self.rng.randrange(2)] = self.rng.uniform(0.0, DEADLINE_S)
            self._close(lane, *notices_s)

    def mute(self, one: str, other: str, duration_s: float) -> None:
        """For a while nothing gets from `one` to `other`; what is short is only late, what is long ends connections."""
        self._fault(one, "MUTE", (other, duration_s), duration_s)
        self._block(one, other, duration_s)
        if duration_s > DEADLINE_S:
            self.after(DEADLINE_S, self._unheard, one, other)

    def _unheard(self, one: str, other: str) -> None:
        lane = self._lanes.get((one, other))
        if lane is not None and self._blocked_until_s.get((one, other), 0.0) > self.now_s:
            is_deaf_too = self._blocked_until_s.get((other, one), 0.0) > self.now_s
            self._close(lane, DEADLINE_S if is_deaf_too else NOTICE_S, 0.0)

    def part(self, side: Collection[str], duration_s: float, one_way: bool) -> None:
        """Nothing gets from one side to all others; nor back, unless it is one-way."""
        for one in side:
            for other in self.hosts:
                if other not in side:
                    self.mute(one, other, duration_s)
                    if not one_way:
                        self.mute(other, one, duration_s)

    def meet(self, longest_s: float) -> None:
        """Whatever is cut off or parted finds together again, one link after the other."""
        for pair, until_s in self._blocked_until_s.items():
            self._blocked_until_s[pair] = min(until_s, self.now_s + self.rng.uniform(0.0, longest_s))
        self._blocks = [
            (pair, begun_s, min(ended_s, self._blocked_until_s[pair])) for pair, begun_s, ended_s in self._blocks
        ]

    def slow(self, peer: str, factor: float, duration_s: float) -> None:
        """A process and its links take `factor` times as long for a while."""
        self._fault(peer, "SLOW", (factor, duration_s), duration_s)
        self._slowness[peer] = factor
        self._outages.append(((peer,), self.now_s, self.now_s + duration_s + DEADLINE_S))
        self.after(duration_s, self._slowness.pop, peer, None)

    def step_wall_clock(self, peer: str, seconds: float) -> None:
        """Somebody sets the clock of the peer's host."""
        self.note(peer, "CLOCK", seconds)
        self._wall_offset_s[peer] = self._wall_offset_s.get(peer, 0.0) + seconds

    def heal(self) -> None:
        """From now on nothing goes wrong by itself."""
        self.manners.loss_rate = 0.0

    def _block(self, one: str, other: str, duration_s: float) -> None:
        until_s = max(self._blocked_until_s.get((one, other), 0.0), self.now_s + duration_s)
        self._blocked_until_s[one, other] = until_s
        self._blocks.append(((one, other), self.now_s, until_s))

    def _fault(self, who: str, what: str, how: object, duration_s: float = 0.0) -> None:
        self.faults.append((self.now_s, self.now_s + duration_s))
        self.note(who, what, how)

    def num_faults(self, since_s: float) -> int:
        """How much has gone wrong since a time, or went wrong then and was not over."""
        return sum(ended_s >= since_s for _, ended_s in self.faults)

    def note(self, who: str, what: str, how: object) -> None:
        """Write something into the trace."""
        if self.trace is not None:
            self.trace.append((self.now_s, who, what, how))
