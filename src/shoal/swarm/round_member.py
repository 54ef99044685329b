"""One replica's part in the outer round: a pure machine, events in, effects out.

    in round  --Close-->  closing  --steps_closed-->  joined  --Propose-->  ring  --ring_done-->  staged
        ^                                                                                            |
        '----------------------- swapped <--CommitRecord-- prepared <--PrepareRecord-----------------'

Rules, each of which a simulation breaks if it is left out:
- The highest ballot seen is followed, lower ones are refused; answering one is a promise.
- From its join to the swap the replica commits nothing.
- What was staged is known by its hashes; only bytes whose hashes are the record's are swapped, else the replica is out.
- RecordPrepared is answered only by who has the record's bytes staged; they are then kept until a record replaces the
  old state.
- A replica that cannot swap to a committed record fetches its bytes, always those of the newest; then it swaps as
  usual.
- What is told by its name, or as what differs from something else, counts only for who has just that; else the replica
  says what it holds.
- What others of its ring pass on counts only if the coordinator has named it, and nothing else since.
- It leaves its own chain only for the record that names its tip, and keeps its state until the other one is there. One
  that neither follows its tip nor names it was chosen without it: then it says what it holds.
- A server is sent to another stage once: until it is there, further orders only hear where it goes. What it has
  promised goes with it: a promise is the peer's, not the stage's.
- Where nobody has them, the coordinator says which older bytes stand for them. A replica follows that only if it has
  exactly these; it keeps saying which they are, and gives them to nobody as the record's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shoal.ids import NO_BALLOT, Ballot, PeerId, StepKey
from shoal.swarm.passed_orders import Arrived, PassedOrder, PassedOrders, pass_on
from shoal.swarm.record_chains import is_before
from shoal.swarm.records import Tip, names, outcome_of, record_hash, uncounted
from shoal.swarm.round_effects import (
    CloseSteps,
    Fetch,
    Introduce,
    MemberEffect,
    Pin,
    Relocate,
    ReplicaOut,
    ResolveStep,
    RunRing,
    Send,
    Swap,
)
from shoal.swarm.round_orders import (
    NO_BYTES,
    Order,
    StepsClosed,
    check_ballot,
    check_quorum,
    fits,
    move_refusal,
    whole_quorum,
    whole_record,
    why_fetched,
)
from shoal.swarm.view import NO_BASE
from shoal.wire.messages.base import Hop
from shoal.wire.messages.round import (
    AskRound,
    Basis,
    Close,
    CommitRecord,
    MemberLost,
    Move,
    Moving,
    OrderNamed,
    OrderPassed,
    PrepareRecord,
    Propose,
    Record,
    RecordPrepared,
    Resolve,
    Restore,
    RoundMessage,
    RoundState,
    SignedRecord,
    Staged,
    StageHashes,
    StaleBallot,
    Swapped,
)

Effects = list[MemberEffect]


@dataclass(eq=False, repr=False)
class RoundMemberMachine:
    """The machine of one replica.

    Attributes:
        tip: the record whose state this replica holds.
        unseal: checks and decodes a record; raises IdentityError or RemoteProtocolError.
        is_behind: it holds the state of D_0 but has reason to believe that the run is further; its D_0 does not stand
            merely because other replicas do not answer.
    """

    hop: Hop
    stage: int
    tip: Tip
    hashes: StageHashes
    unseal: Callable[[SignedRecord], Record]
    is_behind: bool = False

    def __post_init__(self) -> None:
        self.basis = Basis(self.tip.round, self.hashes)
        self.promised: Ballot = NO_BALLOT
        self.destination: int | None = None
        self._greets = False
        self._sent_bytes: dict[str, int] = {}
        self._last: Propose | None = None  # the quorum that it was in last, also in an earlier round
        self._reset()

    def _reset(self) -> None:
        self.closing = False
        self.closed_under: Ballot = NO_BALLOT
        self.joined: StepsClosed | None = None
        self.in_doubt: set[StepKey] = set()
        self.aborted: tuple[StepKey, ...] = ()
        self.quorum: Propose | None = None
        self._orders = PassedOrders()
        self.staged: dict[tuple[Ballot, int], StageHashes] = {}
        self.pinned: StageHashes | None = None
        self.prepared: SignedRecord | None = None
        self.swapping: SignedRecord | None = None
        self.fetching: SignedRecord | None = None

    @property
    def round(self) -> int:
        """The round whose steps the replica may train."""
        return self.tip.round + 1

    @property
    def is_restored(self) -> bool:
        """Whether the bytes are not those of the record: nobody held these."""
        return self.tip.signed is not None and not names(self.unseal(self.tip.signed), self.stage, self.basis.hashes)

    # -- messages

    def receive(self, peer: PeerId, message: RoundMessage) -> Effects:
        """Take a coordinator's message; other messages of the protocol are not for members and have no effect.

        Raises:
            RemoteProtocolError: The sender acts under another peer's ballot, or the message contradicts itself.
            SignatureError: A record's signature does not verify.
        """
        if isinstance(message, OrderPassed):
            return self._arrived(self._orders.passed(peer, message))
        if not isinstance(message, Order):
            return []
        check_ballot(peer, message.ballot, self.promised)
        if message.ballot < self.promised:
            return [Send(peer, StaleBallot(self.promised))]
        if message.ballot > self.promised or isinstance(message, PassedOrder):
            self._orders.forget()
        self.promised = message.ballot
        return self._do(message)

    def _do(self, message: Order) -> Effects:
        match message:
            case AskRound():
                return [*self._moving(), self._state()]
            case Close():
                return self._close(message)
            case Resolve():
                return self._resolve(message)
            case Propose():
                return self._propose(message)
            case PrepareRecord():
                return self._prepare(message)
            case CommitRecord():
                return self._commit(message)
            case Move():
                return self._move(message)
            case Restore():
                return self._restore(message)
            case OrderNamed():
                return self._arrived(self._orders.named(message))

    def _arrived(self, arrived: Arrived | None) -> Effects:
        """Do an order that the coordinator has named, as if it were from itself, and give it to the others."""
        if arrived is None:
            return []
        effects = self._do(arrived.order)
        return [*effects, *pass_on(arrived, self.quorum, self.hop.peer)]

    def lost(self, peer: PeerId) -> Effects:
        """The connection to a peer has ended: the coordinator learns of it if the peer is needed for the ring."""
        if self._greets and peer == self._coordinator:
            self._greets = False
            return [Send(peer, Moving(self.promised, self.stage, "")), self._state()]
        quorum = self.quorum
        if (
            quorum is None
            or (quorum.ballot, quorum.epoch) in self.staged
            or peer not in {hop.peer for hop in quorum.members}
        ):
            return []
        return [Send(self._coordinator, MemberLost(quorum.ballot, quorum.round, quorum.epoch, self.stage, peer))]

    # -- the driver's reports

    def steps_closed(self, closed: StepsClosed) -> Effects:
        """Nothing is open any more but what is in doubt."""
        if not self.closing:
            return []
        self.joined = closed
        self.in_doubt = set(closed.in_doubt)
        # A new coordinator may have chosen another record than the one on which these steps were trained: it closes the
        # round of those that hold its record, and is answered then.
        return [self._join()] if self.closed_under == self.promised else []

    def ring_done(self, quorum: Propose, hashes: StageHashes) -> Effects:
        """The ring of `quorum` has ended and the outer step is staged."""
        if quorum.round != self.round:
            return []
        # Only the newest bytes and those of a prepared record are kept (see `Pin`).
        self.staged = {tag: kept for tag, kept in self.staged.items() if kept == self.pinned}
        self.staged[quorum.ballot, quorum.epoch] = hashes
        return [self._report(quorum, hashes)] if quorum == self.quorum else []

    def state_broken(self, reason: str) -> Effects:
        """The replica's own bytes are not what the record says: it leaves the ring."""
        quorum, swapping = self.quorum, self.swapping
        if swapping is not None:
            self.swapping = None
            self.staged.clear()
            return self._fetch(swapping, self.unseal(swapping), reason)
        self.basis = NO_BYTES
        out = ReplicaOut(self.hop.peer, reason)
        if quorum is None:
            return [out, self._state(reason)]
        lost = MemberLost(quorum.ballot, quorum.round, quorum.epoch, self.stage, self.hop.peer)
        return [out, Send(self._coordinator, lost)]

    def fetched(self, digest: str, hashes: StageHashes) -> Effects:
        """The bytes of the record with this hash have been fetched and are staged."""
        signed = self.fetching
        if signed is None or record_hash(signed) != digest:
            return []
        return self._swap(signed, self.unseal(signed), hashes)

    def swapped(self, hashes: StageHashes, sent_bytes: Mapping[str, int]) -> Effects:
        """The replica now holds the state of the record that it was swapping to.

        Args:
            sent_bytes: what the replica has sent since the swap before, by kind of traffic.
        """
        signed = self.swapping
        if signed is None:
            return []
        record = self.unseal(signed)
        self.tip = Tip(record.round, record_hash(signed), signed)
        if names(record, self.stage, hashes):
            self.basis = Basis(record.round, hashes)
        self.is_behind = False
        self._sent_bytes = dict(sent_bytes)
        self._reset()
        return [self._swapped_report(hashes)]

    def stay(self, reason: str) -> Effects:
        """The server cannot go where it was sent; everything goes on as before."""
        stage, self.destination = self.destination, None
        return [] if stage is None else [Send(self._coordinator, Moving(self.promised, stage, reason))]

    def succeed(self, promised: Ballot, has_begun: bool) -> None:
        """Take over from the machine of another stage, or of an earlier time in this one; no round has begun here.

        The replica's connections end. It greets the coordinator on the next one: a coordinator dials no lost peer.

        Args:
            promised: the highest ballot that it answered there.
            has_begun: it saw there that the run is further than D_0.
        """
        self.promised = max(self.promised, promised)
        self.is_behind = self.is_behind or (has_begun and self.tip.round == 0)
        self.destination = None
        self._greets = True
        self._reset()

    # -- single orders; the ballot has been checked

    def _close(self, message: Close) -> Effects:
        if message.round < self.round or self.swapping is not None:
            return []  # it is late, or for the round after the swap; then it is repeated
        if message.round > self.round:
            return [self._state(f"round {message.round} is closed, this replica is in round {self.round}")]
        self.is_behind = False
        self.closed_under = message.ballot
        self.fetching = None  # what it holds is what stands
        if self.joined is not None or self.closing:
            return [self._join()] if self.joined is not None else []
        self.closing = True
        return [CloseSteps(message.round)]

    def _resolve(self, message: Resolve) -> Effects:
        # Answered by a new join once the step is settled here; one that was settled before is not in doubt any more.
        if message.round != self.round or message.key not in self.in_doubt:
            return []
        self.in_doubt.discard(message.key)
        if not message.commit:
            self.aborted = (*self.aborted, message.key)
        self.joined = None
        return [ResolveStep(message)]

    def _propose(self, told: Propose) -> Effects:
        message = whole_quorum(told, self._last)
        if message is None:
            return [] if told.round < self.round or self.swapping is not None else [self._state()]
        check_quorum(message, self.stage, self.hop.peer)
        if message.round < self.round or self.swapping is not None:
            return []
        if message.round > self.round or self.joined is None:
            return [self._state(f"a quorum of round {message.round} is proposed, which this replica has not joined")]
        if self.quorum is not None and (message.ballot, message.epoch) <= (self.quorum.ballot, self.quorum.epoch):
            hashes = self.staged.get((message.ballot, message.epoch))
            return [self._report(message, hashes)] if hashes is not None else []
        self.quorum = self._last = message
        return [*(Introduce(hop) for hop in message.members if hop.peer != self.hop.peer), RunRing(message)]

    def _prepare(self, message: PrepareRecord) -> Effects:
        signed = whole_record(message, self.tip)
        if signed is None:
            is_late = message.base is not None and message.base.round + 1 < self.round
            return [] if is_late or self.swapping is not None else [self._state("the record before is not held here")]
        record = self.unseal(signed)
        if record.round < self.round or self.swapping is not None or self._is_superseded(record):
            return []
        hashes = self._staged_for(record)
        if record.round != self.round or record.previous != self.tip.hash or hashes is None:
            return [self._state(f"the bytes of record {record.round} are not staged here")]
        self.prepared, self.pinned = signed, hashes
        reply = RecordPrepared(message.ballot, record.round, record_hash(signed))
        return [Pin(hashes), Send(message.ballot.peer, reply)]

    def _commit(self, message: CommitRecord) -> Effects:
        signed = message.record if message.known is None else self._known(message.known.record_hash)
        if signed is None:
            return [self._state()]
        record, digest = self.unseal(signed), record_hash(signed)
        if digest == self.tip.hash:
            if self.fetching is not None and record_hash(self.fetching) != digest:
                self.fetching = None
            return [self._swapped_report(self.basis.hashes)]
        if self.swapping is not None:
            return []
        if not fits(signed, record, message.instead_of, self.tip, self.unseal):
            return [self._state()]
        hashes = self._staged_for(record) if record.round == self.round and record.previous == self.tip.hash else None
        if hashes is None and names(record, self.stage, self.basis.hashes):
            hashes = self.basis.hashes  # nothing was trained since: what is held are the record's bytes
        if hashes is not None:
            return self._swap(signed, record, hashes)
        reason = why_fetched(message.instead_of, record, self.tip)
        if self.fetching is not None and record_hash(self.fetching) == digest:
            return [self._state(reason)]
        return self._fetch(signed, record, reason)

    def _known(self, digest: str) -> SignedRecord | None:
        """The record of this hash, if it is one that the replica has: it has checked all of them."""
        had = (self.prepared, self.swapping, self.fetching, self.tip.signed)
        return next((signed for signed in had if signed is not None and record_hash(signed) == digest), None)

    def _restore(self, message: Restore) -> Effects:
        record, digest = self.unseal(message.record), record_hash(message.record)
        is_held = digest == self.tip.hash
        if message.stage != self.stage or self.swapping is not None:
            return []
        if not fits(message.record, record, message.instead_of, self.tip, self.unseal):
            return [self._state()]
        has_better = is_held and not self.is_restored
        if has_better or message.basis.hashes == self.basis.hashes:
            self.fetching = self.fetching if has_better else None
            if is_held:
                return [self._swapped_report(self.basis.hashes)]
            return self._swap(message.record, record, self.basis.hashes)
        reason = f"it holds the bytes of record {self.basis.round}, its stage goes on from other ones"
        is_fetching = self.fetching is not None and record_hash(self.fetching) == digest
        if is_fetching or not names(record, self.stage, message.basis.hashes):
            return [self._state(reason)]
        return self._fetch(message.record, record, reason)

    def _swap(self, signed: SignedRecord, record: Record, hashes: StageHashes) -> Effects:
        self.swapping, self.fetching = signed, None
        tip = Tip(record.round, record_hash(signed), signed)
        leaves_chain = tip.hash != self.tip.hash and not is_before(self.tip, tip, self.unseal)
        return [Swap(record, hashes, leaves_chain, self._has_part_in(record, hashes))]

    def _has_part_in(self, record: Record, hashes: StageHashes) -> bool:
        """Whether this replica, and no other life of its peer, has averaged these bytes, and counts for the record: all
        steps that it has trained since it held another replica's parameters are in records then."""
        outcome = outcome_of(record, self.stage)
        is_own = self.joined is not None and hashes in self.staged.values() and record.previous == self.tip.hash
        if not is_own or outcome is None or self.hop.peer not in outcome.members or outcome.hashes != hashes:
            return False
        return self.hop.peer not in uncounted(outcome.members, outcome.scales)

    def _move(self, message: Move) -> Effects:
        if self.destination is not None:
            return self._moving()
        if message.round < self.round and message.stage != self.stage:
            return []  # late: it was ordered for what has passed
        if (refusal := move_refusal(message, self.stage, self.round)) is not None:
            return [Send(self._coordinator, Moving(self.promised, message.stage, refusal))]
        self.destination = message.stage
        return [*self._moving(), Relocate(message.stage, message.urgent)]

    # -- parts

    def _moving(self) -> Effects:
        stage = self.destination
        return [] if stage is None else [Send(self._coordinator, Moving(self.promised, stage, ""))]

    def _fetch(self, signed: SignedRecord, record: Record, reason: str) -> Effects:
        """Leave the round and get the bytes of a committed record."""
        outcome = outcome_of(record, self.stage)
        effects: Effects = [ReplicaOut(self.hop.peer, reason)]
        if outcome is not None:
            self.fetching = signed
            anew = outcome.restored is not None
            follows_base = self.tip.signed is not None and record.previous == self.tip.hash and not self.is_restored
            effects.append(Fetch(record, record_hash(signed), outcome.hashes, follows_base and not anew, anew))
        return [*effects, self._state(reason)]

    def _is_superseded(self, record: Record) -> bool:
        """Whether a later quorum than the record's has been proposed since."""
        outcome, quorum = outcome_of(record, self.stage), self.quorum
        return (
            outcome is not None
            and quorum is not None
            and (record.ballot, outcome.epoch) < (quorum.ballot, quorum.epoch)
        )

    def _staged_for(self, record: Record) -> StageHashes | None:
        """The hashes of the staged bytes that are the record's, if there are any."""
        outcome = outcome_of(record, self.stage)
        return outcome.hashes if outcome is not None and outcome.hashes in self.staged.values() else None

    @property
    def _coordinator(self) -> PeerId:
        return self.promised.peer

    def _state(self, refused: str = "") -> Send:
        base_round = NO_BASE if self.is_behind else self.tip.round
        said = (base_round, self.tip.signed, self.prepared, self.hop, refused, self.basis)
        return Send(self._coordinator, RoundState(self.promised, self.stage, *said))

    def _join(self) -> Send:
        joined = self.joined
        message = None if joined is None else joined.join(self.promised, self.round, self.stage, self.aborted)
        return self._state() if message is None else Send(self._coordinator, message)

    def _report(self, quorum: Propose, hashes: StageHashes) -> Send:
        return Send(self._coordinator, Staged(quorum.ballot, quorum.round, quorum.epoch, self.stage, hashes))

    def _swapped_report(self, hashes: StageHashes) -> Send:
        message = Swapped(self.tip.round, self.stage, self.tip.hash, hashes, self._sent_bytes)
        return Send(self._coordinator, message)
