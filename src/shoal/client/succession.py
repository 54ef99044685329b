"""What a client does before anything else when the run was begun on another host.

    wait while another client of the run can be reached -> lead -> inherit the record that stands -> close its round
                             '-> it says that the run is over

That it is not announced any more is no reason to take a client's place: servers say over TLS that they have none.

Nothing but the replicas' records is needed: the newest one names all samples that are used. The round that the others
have left ends with the steps that it has; closing it is what tells which samples these have used.
"""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.to_thread

from shoal.averaging.coordinator import RoundCoordinator, RoundOutcome
from shoal.averaging.journal import set_aside, write_round
from shoal.client.data_link import DataLink
from shoal.client.diary import Diary
from shoal.client.ledger import Ledger
from shoal.clock import Clock
from shoal.control.membership import Membership
from shoal.control.run_end import RunEndListener
from shoal.control.run_question import ANSWER_WITHIN_S, ASK_AGAIN_S, peers_to_ask
from shoal.errors import ControlError
from shoal.events.losses import ClientReplaced
from shoal.events.run import ClientWaits, RunEnded
from shoal.ids import PeerId
from shoal.runtime.waking import Signal, pass_on
from shoal.swarm.client_order import ClientOrder
from shoal.swarm.records import GENERATIONS_APART, parameters_of, record_hash, used_samples
from shoal.swarm.trainer_slots import TrainerSlots
from shoal.transport.base import Endpoint, Received
from shoal.wire.messages.base import Hop
from shoal.wire.messages.control import AskRun, TellRun


class Succession:
    """Waits for this client's turn. A `transport.dispatch.Handler` of the run's end, and of what servers answer.

    Attributes:
        has_turn: whether this client has the run, or had it in an earlier start.
    """

    def __init__(
        self,
        *,
        run_id: str,
        endpoint: Endpoint,
        membership: Membership,
        clock: Clock,
        coordinator: RoundCoordinator,
        ledger: Ledger,
        diary: Diary,
        succeeds: bool,
    ) -> None:
        """Know of no client yet.

        Args:
            membership: lists the clients; its owner removes a client whose connection ends.
            coordinator: while it leads, no other client ends the run.
            diary: what an earlier start of this client has left, and this one does.
            succeeds: clients of other hosts have begun the run.
        """
        self._run_id = run_id
        self._endpoint = endpoint
        self._membership = membership
        self._clock = clock
        self._coordinator = coordinator
        self._ledger = ledger
        self._succeeds = succeeds
        self._diary = diary
        self.has_turn = not succeeds or diary.saved.plan is not None or diary.saved.is_finished
        self._order = ClientOrder(endpoint.peer_id)
        self._changed = Signal()
        self._over: tuple[str, bool] | None = None
        self._announcer: PeerId | None = None
        # Of servers: which client each has said that it is connected with; who has not answered yet, and since when.
        self._told: dict[PeerId, PeerId | None] = {}
        self._asked: set[PeerId] = set()
        self._asked_at_s = float("-inf")
        self._end = RunEndListener(
            run_id, lambda: membership.view, self._run_over, lambda: endpoint.peer_id if coordinator.leads else None
        )

    @property
    def ends_run(self) -> bool:
        """Whether this client's end is that of the run, which is so with the one that has begun it or leads it."""
        return not self._succeeds or self._coordinator.leads or self._diary.saved.is_finished

    def receive(self, event: Received) -> bool:
        """Take the word of the client that trains that the run is over, and what servers say of their client."""
        if not isinstance(event.message, TellRun):
            return self._end.receive(event)
        self._told[event.peer] = event.message.client
        self._asked.discard(event.peer)
        self._changed.notify()
        return True

    def peer_up(self, peer: PeerId) -> None:
        """A connection stands."""
        self._order.up(peer)
        self._changed.notify()

    def peer_lost(self, peer: PeerId) -> None:
        """A connection has ended, or could not be made."""
        self._told.pop(peer, None)
        self._asked.discard(peer)
        self._order.lost(peer, self._clock.now_s())
        self._changed.notify()

    async def turn(self) -> bool:
        """Wait, however long, until no client before this one can be reached; returns False if the run ends before.

        That nobody is known proves nothing: what others announce arrives in parts. Either hosts of servers announce the
        run since no client does, and the servers that were asked have none; or the client that announced it was dialled
        and is gone.

        Raises:
            ControlError: the run has failed.
        """
        told: set[PeerId] = set()
        await self._membership.wait_for(lambda view: view.run is not None and view.run.run_id == self._run_id)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pass_on, self._membership.changed, self._changed)
            while self._over is None:
                changed, now_s = self._changed.coming, self._clock.now_s()
                self._look(now_s)
                if self._order.is_turn(now_s) and self._has_no_client(now_s):
                    tasks.cancel_scope.cancel()
                    self._replace(now_s)
                    self.has_turn = True
                    return True
                # Who is asked which run it is also says when it is over.
                for hop in (*self._order.tick(now_s), *self._servers_to_ask(now_s)):
                    self._endpoint.introduce(hop)
                    self._endpoint.post(hop.peer, AskRun())
                for peer in set(self._order.reachable) - told:
                    told.add(peer)
                    name = self._membership.view.name_of(peer)
                    self._ledger.note(ClientWaits(peer, name, self._run_id))
                wake_at_s = self._order.wake_at_s
                if self._is_kept:
                    again_s = ANSWER_WITHIN_S if self._asked else ASK_AGAIN_S
                    wake_at_s = min(wake_at_s, self._asked_at_s + again_s)
                with anyio.move_on_after(wake_at_s - now_s):
                    await changed.wait()
            tasks.cancel_scope.cancel()
        reason, ended_well = self._over or ("", True)
        if not ended_well:
            raise ControlError(reason)
        self._ledger.note(RunEnded(reason))
        return False

    def _replace(self, now_s: float) -> None:
        """Note in whose place this client goes on, unless it was its own before."""
        lost, view = self._announcer, self._membership.view
        known = {None if view.run is None else view.run.client, *self._told.values()}
        if self._endpoint.peer_id in known:
            return
        name = "the client" if lost is None else view.name_of(lost, "client")
        gone_s = 0.0 if lost is None else self._order.gone_s(lost, now_s)
        host = "" if lost is None else view.host_of(lost)
        self._ledger.note(ClientReplaced(lost or PeerId(""), name, gone_s, now_s, host))

    def _has_no_client(self, now_s: float) -> bool:
        run = self._membership.view.run
        if run is not None and run.run_id == self._run_id and run.client == self._endpoint.peer_id:
            return True  # with its own word in the registry, an earlier start of this client has had its turn
        if self._is_kept and self._told:
            # One that has lost its own link to the client answers as well, and may be the first to do so.
            if self._asked and now_s < self._asked_at_s + ANSWER_WITHIN_S:
                return False
            return all(client in (None, self._endpoint.peer_id) for client in self._told.values())
        return self._announcer is not None and self._order.is_gone(self._announcer, now_s)

    @property
    def _is_kept(self) -> bool:
        """Whether hosts of servers announce the run, because no client does."""
        run = self._membership.view.run
        return run is not None and run.run_id == self._run_id and run.kept

    def _servers_to_ask(self, now_s: float) -> list[Hop]:
        """The servers, now and then, while the registry knows no client."""
        again_s = ANSWER_WITHIN_S if self._asked else ASK_AGAIN_S
        if not self._is_kept or now_s < self._asked_at_s + again_s:
            return []
        self._asked_at_s = now_s
        hops = [hop for hop in peers_to_ask(self._membership.view) if hop.peer != self._endpoint.peer_id]
        self._asked = {hop.peer for hop in hops}
        return hops

    def _look(self, now_s: float) -> None:
        """Take note of what is announced now: a lost client's word is gone with it."""
        view, run = self._membership.view, self._membership.view.run
        self._order.announced(view.clients, now_s)
        if run is not None and run.run_id == self._run_id and not run.kept and run.client != self._endpoint.peer_id:
            self._announcer = run.client

    def _run_over(self, reason: str, ended_well: bool) -> None:
        self._over = (reason, ended_well)
        self._changed.notify()


async def inherit(outcome: RoundOutcome, log_dir: Path, trainers: TrainerSlots, data: DataLink) -> dict[int, str]:
    """Go on from the record that stands, which clients of other hosts have committed.

    Args:
        log_dir: of this client. The record is written into it, and records of another chain are set aside. The step
            logs stay on the hosts that gathered them.
        trainers: of this client; reports of earlier trainers no longer count.
        data: its data server hands out all samples but those that the record names as used.

    Returns:
        The hash of each stage's parameters.

    Raises:
        StorageError: the record cannot be written.
    """
    record, digest = outcome.record, record_hash(outcome.signed)
    await anyio.to_thread.run_sync(set_aside, log_dir, record, digest)
    await anyio.to_thread.run_sync(write_round, log_dir, record, outcome.signed)
    trainers.begin_above(record.generations, GENERATIONS_APART)
    data.know(record.round, used_samples(record), digest)
    return parameters_of(record)
