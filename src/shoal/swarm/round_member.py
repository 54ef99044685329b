"""One replica's part in the outer round: a pure machine, events in, effects out.

    in round  --Close-->  closing  --steps_closed-->  joined  --Propose-->  ring  --ring_done-->  staged
        ^                                                                                            |
        '------------------------------ swapped <--Decide-- held <--Hold-----------------------------'

Rules, each of which a simulation breaks if it is left out:
- The highest ballot seen is followed, lower ones are refused; answering one is a promise.
- From its join to the swap the replica commits nothing.
- What was staged is known by its hashes; only bytes whose hashes are the record's are swapped, else the replica is out.
- Held is answered only by who has the record's bytes staged; they are then kept until a record replaces the old state.
- A replica that cannot swap to a decided record fetches its bytes, always those of the newest; then it swaps as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shoal.errors import RemoteProtocolError
from shoal.ids import NO_BALLOT, Ballot, PeerId, StepKey
from shoal.swarm.records import Tip, outcome_of, record_hash
from shoal.swarm.round_effects import (
    CloseSteps,
    Fetch,
    Introduce,
    MemberEffect,
    Pin,
    ReplicaOut,
    ResolveStep,
    RunRing,
    Send,
    Swap,
)
from shoal.swarm.view import NOTHING_HELD
from shoal.wire.messages.base import Hop
from shoal.wire.messages.round import (
    AskRound,
    Close,
    Decide,
    Held,
    Hold,
    Join,
    MemberLost,
    Propose,
    Record,
    Resolve,
    RoundMessage,
    RoundState,
    SignedRecord,
    Staged,
    StageHashes,
    StaleBallot,
    Swapped,
)
from shoal.wire.messages.step import StepEntry

Effects = list[MemberEffect]
Order = AskRound | Close | Resolve | Propose | Hold | Decide
"""What only a coordinator sends."""


@dataclass(frozen=True, slots=True)
class StepsClosed:
    """What the replica has committed in the round, in apply order, and what it cannot decide alone."""

    num_samples: int
    in_doubt: tuple[StepKey, ...]
    log: tuple[StepEntry, ...]


class RoundMemberMachine:
    """The machine of one replica.

    Args:
        hop: This replica, as others dial it.
        stage: Its stage.
        tip: The record whose state it holds.
        unseal: Checks and decodes a record; raises IdentityError or RemoteProtocolError.
        is_behind: It has the state of D_0, and has reason to believe that the run is further: what it holds is not to
            stand because others do not answer.
    """

    def __init__(
        self, hop: Hop, stage: int, tip: Tip, unseal: Callable[[SignedRecord], Record], is_behind: bool = False
    ) -> None:
        self.hop = hop
        self.stage = stage
        self.tip = tip
        self._unseal = unseal
        self.is_behind = is_behind
        self.promised: Ballot = NO_BALLOT
        self._sent_bytes: dict[str, int] = {}
        self._reset()

    def _reset(self) -> None:
        self.closing = False
        self.joined: StepsClosed | None = None
        self.in_doubt: set[StepKey] = set()
        self.aborted: tuple[StepKey, ...] = ()
        self.view: Propose | None = None
        self.staged: dict[tuple[Ballot, int], StageHashes] = {}
        self.pinned: StageHashes | None = None
        self.pending: SignedRecord | None = None
        self.swapping: SignedRecord | None = None
        self.fetching: SignedRecord | None = None

    @property
    def round(self) -> int:
        """The round whose steps the replica may train."""
        return self.tip.round + 1

    # -- messages

    def receive(self, peer: PeerId, message: RoundMessage) -> Effects:
        """Take a coordinator's message; other messages of the protocol are not for members and have no effect.

        Raises:
            RemoteProtocolError: The sender acts under another peer's ballot, or the message contradicts itself.
            SignatureError: A record's signature does not verify.
        """
        if not isinstance(message, Order):
            return []
        if message.ballot.peer != peer:
            raise RemoteProtocolError(f"{peer} used the ballot of {message.ballot.peer}")
        if message.ballot < self.promised:
            return [Send(peer, StaleBallot(self.promised))]
        self.promised = message.ballot
        match message:
            case AskRound():
                return [self._state()]
            case Close():
                return self._close(message)
            case Resolve():
                return self._resolve(message)
            case Propose():
                return self._propose(message)
            case Hold():
                return self._hold(message)
            case Decide():
                return self._decide(message)

    def lost(self, peer: PeerId) -> Effects:
        """The connection to a peer has ended: the coordinator learns of it if the peer is needed for the ring."""
        view = self.view
        if view is None or (view.ballot, view.epoch) in self.staged or peer not in {hop.peer for hop in view.members}:
            return []
        return [Send(self._coordinator, MemberLost(view.ballot, view.round, view.epoch, self.stage, peer))]

    # -- the driver's reports

    def steps_closed(self, closed: StepsClosed) -> Effects:
        """Nothing is open any more but what is in doubt."""
        if not self.closing:
            return []
        self.joined = closed
        self.in_doubt = set(closed.in_doubt)
        return [self._join()]

    def ring_done(self, view: Propose, hashes: StageHashes) -> Effects:
        """The ring of `view` has ended and the outer step is staged."""
        if view.round != self.round:
            return []
        # Only the newest bytes and those of a held record are kept (see `Pin`).
        self.staged = {tag: kept for tag, kept in self.staged.items() if kept == self.pinned}
        self.staged[view.ballot, view.epoch] = hashes
        return [self._report(view, hashes)] if view == self.view else []

    def state_broken(self, reason: str) -> Effects:
        """The replica's own bytes are not what the record says: it leaves the ring."""
        view, swapping = self.view, self.swapping
        if swapping is not None:
            self.swapping = None
            self.staged.clear()
            return self._fetch(swapping, self._unseal(swapping), reason)
        out = ReplicaOut(self.hop.peer, reason)
        if view is None:
            return [out, self._state(reason)]
        lost = MemberLost(view.ballot, view.round, view.epoch, self.stage, self.hop.peer)
        return [out, Send(self._coordinator, lost)]

    def fetched(self, digest: str, hashes: StageHashes) -> Effects:
        """The bytes of the record with this hash have been fetched and are staged."""
        signed = self.fetching
        if signed is None or record_hash(signed) != digest:
            return []
        self.fetching = None
        self.swapping = signed
        return [Swap(self._unseal(signed), hashes)]

    def swapped(self, hashes: StageHashes, sent_bytes: Mapping[str, int]) -> Effects:
        """The state is now that of the record that was being swapped.

        Args:
            hashes: Of the replica's new bytes.
            sent_bytes: What the replica has sent since the swap before, by traffic.
        """
        signed = self.swapping
        if signed is None:
            return []
        self.tip = Tip(self._unseal(signed).round, record_hash(signed), signed)
        self.is_behind = False
        self._sent_bytes = dict(sent_bytes)
        self._reset()
        return [self._swapped_report(hashes)]

    # -- single orders; the ballot has been checked

    def _close(self, message: Close) -> Effects:
        if message.round < self.round or self.swapping is not None:
            return []  # it is late, or for the round after the swap; then it is repeated
        if message.round > self.round:
            return [self._state(f"round {message.round} is closed, this replica is in round {self.round}")]
        self.is_behind = False
        self.fetching = None  # what it holds is what stands
        if self.joined is not None:
            return [self._join()]
        if self.closing:
            return []
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

    def _propose(self, message: Propose) -> Effects:
        peers = [hop.peer for hop in message.members]
        if (
            message.stage != self.stage
            or peers.count(self.hop.peer) != 1
            or len(set(peers)) != len(peers)
            or len(message.weights) != len(peers)
            or min(message.weights) < 0
        ):
            raise RemoteProtocolError(f"view {message.epoch} of stage {message.stage} is none for {self.hop.peer}")
        if message.round < self.round or self.swapping is not None:
            return []
        if message.round > self.round or self.joined is None:
            return [self._state(f"a view of round {message.round} is proposed, which this replica has not joined")]
        if self.view is not None and (message.ballot, message.epoch) <= (self.view.ballot, self.view.epoch):
            hashes = self.staged.get((message.ballot, message.epoch))
            return [self._report(message, hashes)] if hashes is not None else []
        self.view = message
        return [*(Introduce(hop) for hop in message.members if hop.peer != self.hop.peer), RunRing(message)]

    def _hold(self, message: Hold) -> Effects:
        record = self._unseal(message.record)
        if record.round < self.round or self.swapping is not None or self._is_superseded(record):
            return []
        hashes = self._staged_for(record)
        if record.round != self.round or record.previous != self.tip.hash or hashes is None:
            return [self._state(f"the bytes of record {record.round} are not staged here")]
        self.pending = message.record
        self.pinned = hashes
        reply = Held(message.ballot, record.round, record_hash(message.record))
        return [Pin(hashes), Send(message.ballot.peer, reply)]

    def _decide(self, message: Decide) -> Effects:
        record = self._unseal(message.record)
        digest = record_hash(message.record)
        if digest == self.tip.hash:
            self.fetching = None
            outcome = outcome_of(record, self.stage)
            return [self._swapped_report(outcome.hashes)] if outcome is not None else []
        if record.round < self.round or self.swapping is not None:
            return []
        hashes = self._staged_for(record) if record.round == self.round and record.previous == self.tip.hash else None
        if hashes is not None:
            self.swapping, self.fetching = message.record, None
            return [Swap(record, hashes)]
        reason = f"it holds record {self.tip.round} and has not staged the bytes of record {record.round}"
        if record.round == self.round and record.previous != self.tip.hash:
            reason = f"record {record.round} does not follow the record {self.tip.round} that it holds"
        if self.fetching is not None and record_hash(self.fetching) == digest:
            return [self._state(reason)]
        return self._fetch(message.record, record, reason)

    # -- parts

    def _fetch(self, signed: SignedRecord, record: Record, reason: str) -> Effects:
        """Leave the round and get the bytes of a decided record."""
        outcome = outcome_of(record, self.stage)
        effects: Effects = [ReplicaOut(self.hop.peer, reason)]
        if outcome is not None:
            self.fetching = signed
            effects.append(Fetch(record, record_hash(signed), outcome.hashes))
        return [*effects, self._state(reason)]

    def _is_superseded(self, record: Record) -> bool:
        """Whether a later view than the record's has been proposed since."""
        outcome, view = outcome_of(record, self.stage), self.view
        return outcome is not None and view is not None and (record.ballot, outcome.epoch) < (view.ballot, view.epoch)

    def _staged_for(self, record: Record) -> StageHashes | None:
        """The hashes of the staged bytes that are the record's, if there are any."""
        outcome = outcome_of(record, self.stage)
        return outcome.hashes if outcome is not None and outcome.hashes in self.staged.values() else None

    @property
    def _coordinator(self) -> PeerId:
        return self.promised.peer

    def _state(self, refused: str = "") -> Send:
        tip = self.tip
        held_round = NOTHING_HELD if self.is_behind else tip.round
        state = RoundState(self.promised, self.stage, held_round, tip.signed, self.pending, self.hop, refused)
        return Send(self._coordinator, state)

    def _join(self) -> Send:
        joined = self.joined
        if joined is None:
            return self._state()
        message = Join(
            ballot=self.promised,
            round=self.round,
            stage=self.stage,
            num_samples=joined.num_samples,
            in_doubt=joined.in_doubt,
            log=joined.log,
            aborted=self.aborted,
        )
        return Send(self._coordinator, message)

    def _report(self, view: Propose, hashes: StageHashes) -> Send:
        return Send(self._coordinator, Staged(view.ballot, view.round, view.epoch, self.stage, hashes))

    def _swapped_report(self, hashes: StageHashes) -> Send:
        message = Swapped(self.tip.round, self.stage, self.tip.hash, hashes, self._sent_bytes)
        return Send(self._coordinator, message)
