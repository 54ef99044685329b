"""What a client hears and does while others come before it, and when it goes on with a run that they have begun.

    connections, answers, the run's end -> `swarm.client_turn` -> its turn -> inherit the record that stands

Nothing but the replicas' records is needed: the newest one names all samples that are used. The round that the others
have left ends with the steps that it has; closing it is what tells which samples these have used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from shoal.averaging.coordinator import RoundCoordinator, RoundOutcome
from shoal.averaging.journal import set_aside, write_round
from shoal.client.data_link import DataLink
from shoal.client.diary import Diary
from shoal.client.ledger import Ledger
from shoal.clock import Clock
from shoal.control.membership import Membership
from shoal.control.run_end import RunEndListener
from shoal.data.feed import Feed
from shoal.events.incidents import RecordUnread
from shoal.events.run import DataSized, RecordRestored
from shoal.ids import PeerId
from shoal.runtime.patient_thread import run_in_thread
from shoal.runtime.waking import Signal
from shoal.swarm.client_turn import ClientTurn
from shoal.swarm.records import GENERATIONS_APART, parameters_of, record_hash, used_samples
from shoal.swarm.run_client import RunClient
from shoal.swarm.trainer_slots import TrainerSlots
from shoal.transport.base import Endpoint, Received
from shoal.wire.messages.base import Hop
from shoal.wire.messages.control import AskRun, TellRun


@dataclass(eq=False, repr=False)
class Succession:
    """Tells the machine that waits for this client's turn what it hears. A `transport.dispatch.Handler`.

    Attributes:
        turn: of `run`; it may have it already.
        membership: lists the clients; its owner removes a client whose connection ends.
        coordinator: while it leads, no other client ends the run.
        diary: what an earlier start of this client has left, and this one does.
        succeeds: clients of other hosts have begun the run.
    """

    run: RunClient
    turn: ClientTurn
    _: KW_ONLY
    run_id: str
    endpoint: Endpoint
    membership: Membership
    clock: Clock
    coordinator: RoundCoordinator
    diary: Diary
    succeeds: bool

    def __post_init__(self) -> None:
        self.changed = Signal()
        self._end = RunEndListener(
            self.run_id,
            lambda: self.membership.view,
            self._run_over,
            lambda: self.endpoint.peer_id if self.coordinator.leads else None,
        )

    @property
    def has_turn(self) -> bool:
        """Whether this client has the run, or had it in an earlier start."""
        return self.run.has_turn

    @property
    def ends_run(self) -> bool:
        """Whether this client's end is that of the run, which is so with the one that has begun it or leads it."""
        has_it = not self.succeeds or self.coordinator.leads or self.diary.saved.is_finished
        return has_it and not self.run.is_replaced

    def ask(self, hop: Hop) -> None:
        """Dial a peer, and ask which run it is; whoever is asked also says when it is over."""
        self.endpoint.introduce(hop)
        self.endpoint.post(hop.peer, AskRun())

    def receive(self, event: Received) -> bool:
        """Take the word of the client that trains that the run is over, and what servers say of their client."""
        if not isinstance(event.message, TellRun):
            return self._end.receive(event)
        self.turn.told(event.peer, event.message.client)
        self.changed.notify()
        return True

    def peer_up(self, peer: PeerId) -> None:
        """A connection stands."""
        self.turn.up(peer)
        self.changed.notify()

    def peer_lost(self, peer: PeerId) -> None:
        """A connection has ended, or could not be made."""
        self.turn.lost(peer, self.clock.now_s())
        self.changed.notify()

    def _run_over(self, reason: str, ended_well: bool) -> None:
        self.run.ended(reason, well=ended_well)
        self.changed.notify()


class SideWork(Protocol):
    """Of a client, with work of its own."""

    async def run(self) -> None:
        """Do it until cancelled."""
        ...


@dataclass(eq=False, repr=False)
class TurnTaken:
    """What begins when the run is this client's.

    Attributes:
        feed: asks the data server how much there is.
    """

    parts: Sequence[SideWork]
    feed: Feed
    ledger: Ledger
    event: anyio.Event = field(default_factory=anyio.Event, init=False)

    async def begin(self, tasks: TaskGroup) -> None:
        """Have the parts work, and know how much there is to train on."""
        self.event.set()
        for part in self.parts:
            tasks.start_soon(part.run)
        if not self.ledger.totals.num_train:
            sizes = await self.feed.hello()
            self.ledger.note(DataSized(sizes.num_train, sizes.num_holdout))


async def inherit(
    outcome: RoundOutcome, log_dir: Path, trainers: TrainerSlots, data: DataLink, ledger: Ledger
) -> dict[int, str]:
    """Go on from the record that stands, which clients of other hosts have committed.

    Args:
        log_dir: of this client. The record is written into it, and records of another chain are set aside. The step
            logs stay on the hosts that gathered them.
        trainers: of this client; reports of earlier trainers no longer count.
        data: its data server hands out all samples but those that the record names as used.
        ledger: is told of files that are damaged.

    Returns:
        The hash of each stage's parameters.

    Raises:
        StorageError: the record cannot be written.
    """
    record, digest = outcome.record, record_hash(outcome.signed)
    for round, problem in (await run_in_thread(set_aside, log_dir, record, digest)).items():
        is_next = round == record.round
        ledger.note(RecordRestored(round) if is_next else RecordUnread(round, f"{problem}: it is set aside"))
    await run_in_thread(write_round, log_dir, record, outcome.signed)
    trainers.begin_above(record.generations, GENERATIONS_APART)
    data.know(record.round, used_samples(record), digest, record.marks)
    return parameters_of(record)
