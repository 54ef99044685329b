"""One client's account of what goes wrong in its run: what was lost, and what that has cost, told once each.

What is simulated is `swarm.incidents` in `client.totals`, as `client.watch` and `client.ledger` drive it: a client that
is killed goes on from what it had put down when the round began and from the events that it has noted since. Whose
steps are in which record follows from which servers are members at its end, and `averaging.audit` counts what is lost.
How servers agree on a record is the matter of the world `round`.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import Any

import msgspec
from tests.simulation import liveness
from tests.simulation.kernel import Kernel
from tests.simulation.safety import Broken

from shoal.averaging.audit import audit_of, newly_lost
from shoal.averaging.journal import StepLine
from shoal.client.diary import DiaryEvent
from shoal.client.totals import RunTotals
from shoal.client.watch import Watch
from shoal.events.base import Event
from shoal.events.incidents import (
    Cause,
    IncidentClosed,
    IncidentOpened,
    LossExplained,
    StepsLost,
    TroubleOver,
    TroubleSeen,
)
from shoal.events.losses import DataServerBack, TrainerReady
from shoal.events.run import RoundBegun, StepReported
from shoal.events.stages import StageBeganAnew
from shoal.ids import Ballot, PeerId, StepKey
from shoal.runtime.launcher_messages import LostProcess
from shoal.swarm.incidents import Incidents, steps_lost_by
from shoal.transport.base import PeerLost
from shoal.wire.messages import Message
from shoal.wire.messages.base import SampleRange
from shoal.wire.messages.control import AskCounters
from shoal.wire.messages.round import Basis, Record, StageHashes, StageOutcome
from shoal.wire.messages.step import StepEntry

SILENT_S = 2.0
"""A silence of so long is a loss."""
RESTART_S = (1.2, 3.0)
"""From the end of a process to its next start: two ends of one within `watch.SAME_LOSS_S` are taken for one."""
ROUND_S, BETWEEN_S = 4.0, 0.5
NUM_ROUNDS = 8
FAULTS_END_S = NUM_ROUNDS * ROUND_S * 0.7
_STAGES, _SLOTS = 2, 2
_DIE_AT_A_RECORD = 0.05
_HASHES = StageHashes("p", "m", "b")
DATA = PeerId("data")


class Server:
    """A server through all of its starts."""

    def __init__(self, peer: PeerId, stage: int) -> None:
        self.peer, self.stage = peer, stage
        self.is_there = self.is_member = self.has_state = True
        self.left = self.is_known_lost = False
        self.is_troubled = self.is_forgotten = False
        self.log: list[StepEntry] = []


class World:
    """One seed: two stages with two or three servers each, two trainers, a data server and a client."""

    def __init__(self, seed: int, machine: type[Incidents] = Incidents) -> None:
        self.network = Kernel(seed)
        rng = self.network.rng
        self.machine = machine
        self.servers = [
            Server(PeerId(f"S{stage}{number}"), stage)
            for stage in range(_STAGES)
            for number in range(rng.randint(2, 3))
        ]
        self.generations = dict.fromkeys(range(_SLOTS), 1)
        self.trainers = dict.fromkeys(range(_SLOTS), True)
        self.paths: dict[int, tuple[PeerId, ...]] = {}
        self.attempts = Counter[int]()
        self.numbers = Counter[int]()
        self.data_is_there = True
        self.round = 0
        self.is_training = False
        self.records: list[Record] = []
        self.lines: dict[int, list[StepLine]] = {}
        self.missing_since: dict[int, bool] = defaultdict(bool)
        self.told: list[Event] = []
        self.happened: list[tuple[str, str]] = []
        self.anew_by_loss: set[tuple[int, int]] = set()
        self.unheard: list[StepReported] = []
        self.gone_in: dict[str, int] = {}
        self.ended: list[LostProcess] = []
        self.ends_rng = random.Random(f"ends of {seed}")
        self.totals = RunTotals(incidents=machine())
        self.client_is_there = True
        self.saved = b""
        self.diary: list[bytes] = []
        self.watch = self._watch()
        for slot in self.trainers:
            self.network.after(rng.random(), self.step, slot)
        for _ in range(rng.randint(2, 9)):
            self.network.at(rng.uniform(1.0, FAULTS_END_S), self.fault)
        self.begin_round()

    # -- the client

    def now_s(self) -> float:
        return self.network.now_s

    def note(self, event: Event) -> None:
        """What `Ledger.note` does."""
        if isinstance(event, DiaryEvent):
            self.diary.append(msgspec.msgpack.encode(event))
        if isinstance(event, (IncidentOpened, IncidentClosed)):
            self.tell(event)
        for following in self.totals.apply(event):
            self.note(following)

    def _watch(self) -> Watch:
        world, view = (
            self,
            SimpleNamespace(replica=self.named, by_stage=self.of_stage, host_of=lambda _: "box", name_of=str),
        )
        stand_in: Any = SimpleNamespace
        return Watch(
            membership=stand_in(view=view, lost=lambda _: None),
            trainers=stand_in(
                slot_of=lambda peer: int(peer[1:]) if peer[0] == "T" else None,
                present={slot: None for slot, is_there in self.trainers.items() if is_there},
            ),
            ledger=stand_in(totals=self.totals, earlier=self.diary, note=self.note, now_s=self.now_s),
            clock=stand_in(unix_s=self.now_s),
            homes=stand_in(slots_of=lambda peer: frozenset(slot for slot, path in world.paths.items() if peer in path)),
            reassignment=stand_in(is_moving=lambda _: False),
            endpoint=stand_in(post=self.asked),
            data_server=DATA,
            host="home",
        )

    def server(self, peer: PeerId) -> Server | None:
        return next((server for server in self.servers if server.peer == peer), None)

    def named(self, peer: PeerId) -> Server | None:
        """What the registry says of a peer."""
        server = self.server(peer)
        return None if server is None or server.is_forgotten else server

    def of_stage(self, stage: int) -> list[Server]:
        return [server for server in self.servers if server.stage == stage and server.is_there]

    def loses(self, peer: PeerId, silent_s: float = 0.0) -> None:
        """The client's connection with a peer has ended."""
        if self.client_is_there:
            self.watch.lost(PeerLost(peer, "", silent_s))

    def asked(self, peer: PeerId, message: Message) -> None:
        if isinstance(message, AskCounters):
            self.explain(peer)

    def explain(self, peer: PeerId) -> None:
        if self.totals.incidents.is_unexplained(peer):
            self.note(LossExplained(peer, self.network.rng.choice((Cause.ENDED, Cause.FROZEN, Cause.CUT))))

    # -- rounds

    def begin_round(self) -> None:
        if not self.client_is_there:
            self.network.after(0.2, self.begin_round)
            return
        self.round, self.is_training = self.round + 1, True
        self.bases: dict[int, Basis] = {}
        for stage in range(_STAGES):
            self.give_state(stage)
        for server in self.servers:
            server.log, server.is_member = [], server.is_there and server.has_state
        self.note(RoundBegun(self.round, 4, _SLOTS, _SLOTS, len(self.servers)))
        self.saved, self.diary = msgspec.msgpack.encode(self.totals), []
        self.watch.caught_up({server.peer: server.stage for server in self.servers if server.is_member})
        self.network.after(ROUND_S, self.end_round)

    def give_state(self, stage: int) -> None:
        """Newcomers take the state of their stage from others; where all that had it have died, it begins anew."""
        there, alive = self.of_stage(stage), [s for s in self.servers if s.stage == stage and not s.left]
        if there and not any(server.has_state for server in alive):
            basis = Basis(self.network.rng.randrange(max(1, self.round - 1)), _HASHES)
            if self.round > 1:
                self.bases[stage] = basis
                self.begins_anew(stage, basis)
        if any(server.has_state for server in there) or not any(server.has_state for server in alive):
            for server in there:
                server.has_state = True

    def begins_anew(self, stage: int, basis: Basis) -> None:
        """Nobody has the state of a stage any more; if a loss of it is known that is not over, that is why."""
        closed = self.closed
        known = [each for each in self.opened if each.number not in closed and each.cause != Cause.LEFT]
        if any((each.kind, each.stage) == ("server", stage) for each in known):
            self.anew_by_loss.add((stage, self.round))
        self.note(StageBeganAnew(stage, self.round, basis.round, "p"))

    def step(self, slot: int) -> None:
        """A trainer commits a step, if it can; what no client has heard is said again."""
        self.network.after(self.network.exponential(0.4), self.step, slot)
        usable = [[s for s in self.of_stage(stage) if s.is_member] for stage in range(_STAGES)]
        if not (self.is_training and self.trainers[slot] and self.data_is_there and all(usable)):
            return
        path = tuple(self.network.rng.choice(of_stage) for of_stage in usable)
        self.paths[slot], self.numbers[slot] = tuple(server.peer for server in path), self.numbers[slot] + 1
        key = StepKey(slot, self.generations[slot], self.numbers[slot], self.attempts.pop(slot, 0))
        for server in path:
            samples = (SampleRange(0, 10_000 * slot + key.number, 10_000 * slot + key.number + 1),)
            server.log.append(StepEntry(key, self.paths[slot], 0, samples, 1, 1, 1.0, 0.1, skipped=False))
        now_s = self.network.now_s
        self.unheard.append(StepReported(slot, key.number, key.attempt, 1, 1, 1.0, False, 0.1, now_s))
        self.hear()

    def hear(self) -> None:
        if self.client_is_there:
            for report in self.unheard:
                self.note(report)
            self.unheard.clear()

    def end_round(self) -> None:
        """The record: a stage that nobody is left of starts again, when somebody is there."""
        members = [[s for s in self.of_stage(stage) if s.is_member] for stage in range(_STAGES)]
        alone = [stage for stage, of_stage in enumerate(members) if not of_stage]
        # Whoever is silent is waited for until that is a loss.
        unheard = any(s.is_member and not s.is_there and not s.is_known_lost and not s.left for s in self.servers)
        if not self.client_is_there or unheard or any(not self.of_stage(stage) for stage in alone):
            self.network.after(0.2, self.end_round)
            return
        self.is_training = False
        outcomes: list[StageOutcome] = []
        for stage, of_stage in enumerate(members):
            basis = self.bases.get(stage)
            if basis is None and stage in alone and self.round > 1:
                basis = Basis(self.network.rng.randrange(self.round - 1), _HASHES)
                self.begins_anew(stage, basis)
                for server in self.of_stage(stage):
                    server.has_state = True
            peers = tuple(server.peer for server in of_stage or self.of_stage(stage))
            outcomes.append(StageOutcome(stage, 0, peers, (1,) * len(peers), _HASHES, 0, basis))
        record = Record("run", self.round, Ballot(1, PeerId("C"), 0), "", tuple(outcomes), (), (), {})
        lines = [StepLine(s.peer, s.stage, entry) for of_stage in members for s in of_stage for entry in s.log]
        if self.network.rng.random() < _DIE_AT_A_RECORD and self.network.now_s < FAULTS_END_S:
            for server in self.of_stage(self.network.rng.randrange(_STAGES)):
                self.dies(server)
        self.records.append(record)
        self.lines[self.round] = lines
        self.count_costs(record)
        if self.round < NUM_ROUNDS:
            self.network.after(BETWEEN_S, self.begin_round)

    def count_costs(self, record: Record) -> None:
        if self.totals.incidents.wants_costs:
            self.note(StepsLost(self.round, newly_lost(record, self.lines_of(record), self.records)))

    def lines_of(self, record: Record) -> dict[int, list[StepLine]]:
        first = min((o.restored.round + 1 for o in record.stages if o.restored), default=record.round)
        return {round: lines for round, lines in self.lines.items() if first <= round <= record.round}

    # -- faults

    def fault(self) -> None:
        kinds = (self.kill, self.kill, self.silence, self.silence, self.reset, self.leave, self.trouble)
        others = (self.kill_trainer, self.kill_data_server, self.kill_client)
        call = self.network.rng.choice((*kinds, *others))
        call()

    def one(self) -> Server | None:
        there = [server for server in self.servers if server.is_there and not server.left]
        return self.network.rng.choice(there) if there else None

    def kill(self) -> None:
        if (server := self.one()) is not None:
            self.dies(server)

    def dies(self, server: Server) -> None:
        """It is started again, with nothing, unless it was to leave."""
        self.takes_away(server)
        server.log, server.has_state = [], False
        if not server.left:
            self.network.after(self.network.rng.uniform(*RESTART_S), self.returns, server, False)

    def silence(self) -> None:
        """It is frozen or cut off for longer than a silence may last."""
        if (server := self.one()) is not None:
            server.is_there = False
            self.hit(server.peer)
            self.network.after(SILENT_S, self.noticed, server, SILENT_S)
            self.network.after(self.network.rng.uniform(SILENT_S + 0.1, 3 * SILENT_S), self.returns, server, True)

    def noticed(self, server: Server, silent_s: float = 0.0) -> None:
        """The client learns that it is lost, unless it knows it."""
        if self.client_is_there and not server.is_known_lost:
            server.is_known_lost, server.is_troubled = True, False
            if not server.left:  # who dies while it leaves has left
                self.happened.append(("server", server.peer))
            self.loses(server.peer, silent_s)

    def reset(self) -> None:
        """Its connection breaks, and stands again at once."""
        if (server := self.one()) is not None:
            self.takes_away(server)
            self.returns(server, True)

    def takes_away(self, server: Server) -> None:
        server.is_there = False
        self.hit(server.peer)
        self.noticed(server)

    def hit(self, peer: PeerId) -> None:
        for slot, path in self.paths.items():
            self.attempts[slot] += peer in path

    def returns(self, server: Server, is_same: bool) -> None:
        """It can be reached again; one that has kept its work of the round still takes part in it."""
        server.is_there, server.is_known_lost = True, False
        server.is_member = server.is_member and is_same
        if self.client_is_there:
            self.watch.found(server.peer)
            if server.is_member and self.is_training:
                self.watch.caught_up({server.peer: server.stage})

    def leave(self) -> None:
        server = self.one()
        if (
            server is None
            or len([s for s in self.of_stage(server.stage) if not s.left]) < 2
            or not self.client_is_there
        ):
            return
        server.left = True
        self.happened.append(("server", server.peer))
        for _ in range(2):
            self.watch.leaves(server.peer, server.stage)
        server.is_forgotten = self.ends_rng.random() < 0.5
        self.network.after(self.network.rng.uniform(0.1, 1.0), self.goes, server)

    def goes(self, server: Server) -> None:
        if not server.is_there:
            return
        server.is_there, server.log = False, []
        self.hit(server.peer)
        if self.client_is_there:
            self.gone_in[server.peer] = self.round
        self.loses(server.peer)
        # The registry may name it for a while.
        self.loses(server.peer)

    def trouble(self) -> None:
        server = self.one()
        if server is None or server.is_troubled or not self.client_is_there:
            return
        server.is_troubled, now_s = True, self.network.now_s
        self.happened.append(("server", server.peer))
        for _ in range(2):
            self.note(TroubleSeen("server", Cause.DISK, server.peer, server.peer, "box", "full", now_s, now_s))
        self.network.after(self.network.rng.uniform(0.5, 6.0), self.trouble_ends, server)

    def trouble_ends(self, server: Server) -> None:
        if self.client_is_there:
            server.is_troubled = False
            self.note(TroubleOver(Cause.DISK, server.peer, self.network.now_s))

    def kill_trainer(self) -> None:
        slot = self.network.rng.randrange(_SLOTS)
        if not self.trainers[slot]:
            return
        self.trainers[slot] = False
        self.happened.append(("trainer", str(slot)))
        self.ended.append(LostProcess("trainer", self.network.now_s, slot))
        if self.client_is_there:
            self.loses(PeerId(f"T{slot}"))
        self.network.after(self.network.rng.uniform(*RESTART_S), self.trainer_returns, slot)

    def trainer_returns(self, slot: int) -> None:
        self.trainers[slot], self.generations[slot] = True, self.generations[slot] + 1
        if self.client_is_there:
            self.note(TrainerReady(slot, self.generations[slot], self.network.now_s))

    def kill_data_server(self) -> None:
        if not self.data_is_there:
            return
        self.data_is_there = False
        self.happened.append(("data_server", ""))
        self.ended.append(LostProcess("data_server", self.network.now_s))
        self.loses(DATA)
        self.network.after(self.network.rng.uniform(*RESTART_S), self.data_server_returns)

    def data_server_returns(self) -> None:
        self.data_is_there = True
        if self.client_is_there and self.totals.incidents.is_away("data_server", ""):
            self.note(DataServerBack(self.round, self.network.now_s))

    def kill_client(self) -> None:
        if self.client_is_there and self.network.now_s < FAULTS_END_S:
            self.client_ends()

    def client_ends(self) -> None:
        self.client_is_there = False
        self.happened.append(("client", ""))
        self.ended.append(LostProcess("client", self.network.now_s))
        self.network.after(self.network.rng.uniform(*RESTART_S), self.start_client)

    def start_client(self) -> None:
        """The next start of the client: it knows what the last one has put down, and dials everybody.

        Or it ends at once, and has noted nothing.
        """
        if self.ends_rng.random() < 0.3 and self.network.now_s < FAULTS_END_S:
            self.client_ends()
            return
        totals = msgspec.msgpack.decode(self.saved, type=RunTotals)
        written = msgspec.msgpack.encode(totals.incidents)
        totals.incidents = msgspec.msgpack.decode(written, type=self.machine)
        self.totals, self.client_is_there = totals, True
        for line in self.diary:
            totals.apply(msgspec.msgpack.decode(line, type=DiaryEvent))
        self.watch = self._watch()
        self.watch.processes_ended(self.ended, tuple(self.paths))
        if self.records and self.records[-1].round == self.round:
            self.count_costs(self.records[-1])
        for server in self.servers:
            if server.is_there:
                self.watch.found(server.peer)
            elif not server.left:
                server.is_known_lost = totals.incidents.is_missing(server.peer)
                self.noticed(server)
        for slot in [slot for slot, is_there in self.trainers.items() if is_there]:
            self.note(TrainerReady(slot, self.generations[slot], self.network.now_s))
        if self.data_is_there:
            self.data_server_returns()
        else:
            self.loses(DATA)
        self.hear()

    # -- promises

    def tell(self, event: IncidentOpened | IncidentClosed) -> None:
        """Each incident is told once when it is noticed, and once when it is over."""
        same = [each for each in self.told if isinstance(each, type(event)) and each.number == event.number]
        if same:
            raise Broken(f"{event} is told again after {same[0]}")
        self.told.append(event)
        if isinstance(event, IncidentClosed) and event.number > len(self.opened):
            raise Broken(f"{event} was never noticed")

    @property
    def opened(self) -> list[IncidentOpened]:
        return [event for event in self.told if isinstance(event, IncidentOpened)]

    @property
    def closed(self) -> dict[int, IncidentClosed]:
        return {event.number: event for event in self.told if isinstance(event, IncidentClosed)}

    def run(self) -> None:
        """Run to the end.

        Raises:
            Broken: Something was told twice, or not at all, or has cost something else than the audit says.
        """
        self.network.run(6 * NUM_ROUNDS * ROUND_S, lambda: len(self.records) == NUM_ROUNDS)
        liveness.arrived({} if len(self.records) == NUM_ROUNDS else {"run": f"round {self.round}"}, "the last record")
        found, incidents = audit_of(self.lines, self.records, 10**6, NUM_ROUNDS), self.totals.incidents.all
        costs, otherwise = steps_lost_by(incidents, found.lost_steps)
        told_before = dict(self.closed)
        for event in self.totals.incidents.end(costs):
            self.note(event)
        happened = sorted(self.happened)
        if (told := sorted((event.kind, incidents[event.number - 1].key) for event in self.opened)) != happened:
            raise Broken(f"what is told is {told}, what has happened {happened}")
        if sorted(self.closed) != [event.number for event in self.opened]:
            raise Broken(f"of {len(self.opened)} incidents {sorted(self.closed)} are closed at the end of the run")
        for event in self.opened:
            gone_in = self.gone_in.get(incidents[event.number - 1].key, NUM_ROUNDS)
            if event.cause == Cause.LEFT and gone_in < NUM_ROUNDS - 3 and event.number not in told_before:
                raise Broken(f"{event.who} is gone since round {gone_in}, which is not told before the end of the run")
        for number, event in told_before.items():
            if event.steps_lost != costs[number - 1]:
                raise Broken(f"{event} was told, and the audit finds that it has cost {costs[number - 1]} steps")
            if event.back_after_s is None or (event.hit and event.recovered_after_s is None and event.kind != "client"):
                raise Broken(f"{event} was told before it was over")
        anew = [step for step in found.lost_steps if (step.stage, step.in_round) in self.anew_by_loss]
        if steps_lost_by(incidents, [step for step in anew if step.in_round != step.round])[1]:
            raise Broken("a stage has begun anew because of a loss that was known, and that is put down to nobody")
        if sum(costs) + otherwise != sum(found.steps_lost.values()):
            raise Broken(f"incidents have cost {costs} steps, others {otherwise}, together not {found.steps_lost}")
