"""The coordinator's part in the outer round: a pure machine, events in, effects out.

    waiting --lead--> asking --choose--> idle --close--> joining --> staging --> preparing --commit--> idle
                        ^                                  |           |   ^        |
                        '------- a stage has nobody left --+-----------'   '--------' a member is lost: new epoch

`asking` takes a new ballot and hears every reachable replica; what stands is chosen once, by `round_choice`. `joining`
settles the steps in doubt from all joins. `staging` runs the stages' quorums, each with its own epochs. `preparing` has
the step logs journaled, then sends PrepareRecord; only when every member of every stage has answered RecordPrepared is
the record committed. A stage whose bytes are gone is restored (`round_restoration`) before the quorums are proposed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping

from shoal.errors import RemoteProtocolError
from shoal.ids import NO_BALLOT, Ballot, PeerId
from shoal.swarm.passed_orders import spread
from shoal.swarm.records import Tip, record_hash, used_samples
from shoal.swarm.round_choice import choose
from shoal.swarm.round_effects import (
    CoordinatorEffect,
    Deposed,
    Introduce,
    Overtaken,
    RecordCommitted,
    ReplicaIn,
    RoundReady,
    Send,
)
from shoal.swarm.round_joins import RoundJoins
from shoal.swarm.round_judgement import MIRRORED, Judgement
from shoal.swarm.round_mirrors import RoundMirrors
from shoal.swarm.round_orders import check_number
from shoal.swarm.round_preparation import RecordPreparation
from shoal.swarm.round_quorums import RoundQuorums, StageQuorum
from shoal.swarm.round_replicas import RoundReplicas
from shoal.swarm.round_restoration import Restoration
from shoal.swarm.round_settings import CloseRequest, RoundPhase, RoundSettings
from shoal.swarm.round_stages import RoundStages
from shoal.swarm.sample_ranges import Ranges
from shoal.wire.messages.base import Hop
from shoal.wire.messages.mirror import Mirrored, MirrorMessage
from shoal.wire.messages.round import (
    AskRound,
    Close,
    Join,
    MemberLost,
    Record,
    RecordPrepared,
    Resolve,
    RoundMessage,
    RoundState,
    SignedRecord,
    Staged,
    StaleBallot,
    Swapped,
)

Effects = list[CoordinatorEffect]

_MOST_DOUBLINGS = 4
"""Of the wait of a coordinator that others overtake while it takes over: it ends at 16 times `retry_s`."""


class RoundCoordinatorMachine:
    """The machine of one client.

    Args:
        generation: unique to this start of the client; otherwise bytes staged for another start could be mixed in.
        unseal: checks and decodes one; raises SignatureError or RemoteProtocolError.
        recorded: samples of the records that this client knows.
        ballot_number: of the last ballot of an earlier start. With one, this client gives way to a higher ballot of
            another client.
        tip: a committed record that is known already, though no replica may hold it; None: D_0.
    """

    def __init__(
        self,
        me: PeerId,
        generation: int,
        settings: RoundSettings,
        seal: Callable[[Record], SignedRecord],
        unseal: Callable[[SignedRecord], Record],
        recorded: Ranges = (),
        ballot_number: int = 0,
        tip: Tip | None = None,
    ) -> None:
        self.me, self.settings = me, settings
        self.phase = RoundPhase.WAITING
        self.ballot = Ballot(ballot_number, me, generation)
        self._has_led = ballot_number > 0
        self.tip = Tip(0, settings.genesis, None) if tip is None else tip
        self._unseal, self._recorded = unseal, recorded
        self.highest = NO_BALLOT if self._record is None else self._record.ballot
        self._restoration = Restoration(settings.lost_state_after_s)
        self._restoration.begin(self._record)
        self._mirrors = RoundMirrors(settings.num_stages, unseal)
        self.keep = self._mirrors.keep  # the driver says what this client keeps of stages whose servers have left
        self._replicas = RoundReplicas(settings.genesis, self._restoration, unseal)
        self._stages = RoundStages(settings.num_stages, self._replicas, self._restoration, self._mirrors, unseal)
        self._judgement = Judgement(self.ballot, settings.genesis, unseal)
        self._trains = self._ready = False  # the tip was announced as ready: a round is being trained on it
        self._unsaid: Tip | None = None  # the tip before, while it is not known that anybody has swapped to this one
        self._asked: CloseRequest | None = None  # until its record stands: as long as that may have to go, it counts
        self._joins, self._quorums = RoundJoins(), RoundQuorums()
        self._preparation = RecordPreparation(settings, seal, unseal)
        self._since_s = self._tick_at_s = 0.0
        self._num_contests = 0  # how often another client has taken a higher ballot since this one began to take over
        self._lead_at_s: float | None = None  # while this client waits after a contest: when it takes the next ballot

    @property
    def holders(self) -> Mapping[PeerId, int] | None:
        """The replicas that hold the tip and take part, with their stages; None while that is not known."""
        return None if self.phase in (RoundPhase.WAITING, RoundPhase.ASKING) else self._replicas.holders(self.tip)

    @property
    def _request(self) -> CloseRequest | None:
        """What was asked of the round after the tip; what was asked of another one says nothing about this one."""
        return self._asked if self._asked is not None and self._asked.round == self.tip.round + 1 else None

    @property
    def _record(self) -> Record | None:
        return None if self.tip.signed is None else self._unseal(self.tip.signed)

    @property
    def wake_at_s(self) -> float:
        """When to call `tick`; infinite if nothing waits for time."""
        if self.phase is RoundPhase.WAITING or (self.phase is RoundPhase.IDLE and not self._has_unanswered):
            return math.inf
        return self._tick_at_s if self._lead_at_s is None else self._lead_at_s

    @property
    def is_said(self) -> bool:
        """Whether the tip stands: some replica is known to have swapped to it."""
        return self._unsaid is None

    @property
    def _has_unanswered(self) -> bool:
        replicas = self._replicas
        return bool(replicas.silent or replicas.told or self._restoration.missing or self._mirrors.unanswered)

    # -- commands

    def lead(self, now_s: float) -> Effects:
        """Take a ballot above every one seen and ask all replicas what they hold."""
        self.highest = max(self.highest, self.ballot)
        self.ballot = self.ballot._replace(number=self.highest.number + 1)
        if self.phase is RoundPhase.WAITING:
            self._restoration.wait_anew(now_s)
        return self._ask(now_s)

    def replicas(self, known: Mapping[PeerId, Hop], now_s: float) -> Effects:
        """The replicas that the client knows; those that are new are asked what they hold."""
        effects: Effects = []
        for peer in self._replicas.forget(known):
            effects += self._lose(peer, now_s)
        for peer, hop in known.items():
            if self._replicas.name(peer, hop):
                effects.append(Introduce(hop))
                if self.phase is not RoundPhase.WAITING:
                    effects.append(Send(peer, AskRound(self.ballot)))
        return effects + self._advance(now_s)

    @property
    def unmirrored(self) -> frozenset[tuple[PeerId, int]]:
        """Mirrors that can be reached, each with every stage that it does not yet have of the record that stands."""
        return self._mirrors.lacking(self.tip)

    def mirrors(self, known: Mapping[PeerId, Hop], now_s: float) -> Effects:
        """The mirrors that are announced; those that are new are told which record stands, and say what they hold."""
        return self._mirrors.name(known) + self._advance(now_s)

    def close(self, request: CloseRequest, now_s: float) -> Effects:
        """End the round as soon as this client leads and everyone has the record before; until its record stands."""
        self._asked = request
        self._tick_at_s = now_s + self.settings.retry_s
        return self._advance(now_s)

    def journaled(self, digest: str) -> Effects:
        """The step logs of the record with this hash are safe: now its members may prepare it."""
        waits = self.phase is RoundPhase.PREPARING
        rings = [quorum.members for quorum in self._quorums.values()]
        return [*self._preparation.journaled(digest, self.ballot, rings)] if waits else []

    # -- events

    def lost(self, peer: PeerId, now_s: float) -> Effects:
        """The connection to a peer has ended."""
        if peer in self._mirrors.known:
            self._mirrors.lose(peer)
        if peer not in self._replicas.known:
            return []
        return self._lose(peer, now_s) + self._advance(now_s)

    def tick(self, now_s: float) -> Effects:
        """Repeat what has not been answered."""
        if self.phase is RoundPhase.WAITING:
            return []
        if self._lead_at_s is not None:
            return self.lead(now_s) if now_s >= self._lead_at_s else []
        self._tick_at_s = now_s + self.settings.retry_s
        # While a stage is missing everybody is asked again: a replica or mirror may have fetched its bytes since it
        # answered, or follow another client now. So is a mirror while replicas are waited for.
        is_missing = bool(self._restoration.missing)
        unheard = self._replicas.known if is_missing else self._replicas.silent
        effects: Effects = [Send(peer, AskRound(self.ballot)) for peer in unheard]
        for peer in sorted(self._replicas.told):
            effects += self._replicas.offer(peer, self.ballot, self.tip)
        effects += self._mirrors.repeat(is_missing or self.phase is RoundPhase.ASKING)
        self._replicas.repeat_offers()
        if self.phase is RoundPhase.JOINING:
            effects += self._send_close()
        elif self.phase is RoundPhase.STAGING and now_s - self._since_s > self.settings.stage_timeout_s:
            self._since_s = now_s
            for quorum in self._quorums.values():
                if not quorum.agreed:
                    quorum.is_told = True
                    effects += self._new_epoch(quorum, frozenset())
        elif self.phase is RoundPhase.PREPARING:
            effects += self._preparation.repeat(self.ballot, self._quorums.members, now_s)
        return effects + self._advance(now_s)

    def receive(self, peer: PeerId, message: RoundMessage | MirrorMessage, now_s: float) -> Effects:
        """Take a replica's or mirror's message; what is of another ballot, round or epoch has no effect.

        Raises:
            RemoteProtocolError: It cannot be.
            SignatureError: A record's signature does not verify.
        """
        if isinstance(message, StaleBallot):
            if peer not in self._mirrors.known and peer not in self._replicas.known:
                return []  # whom nobody has asked: that somebody else leads, replicas say
            check_number(peer, message.highest, max(self.highest, self.ballot))
        if isinstance(message, StaleBallot) and peer in self._mirrors.known:
            self.highest = max(self.highest, message.highest)
            self._mirrors.unanswered.add(peer)
            return []  # it follows another client, and is asked again: what replicas follow decides who leads
        if isinstance(message, StaleBallot):
            self._replicas.hear(peer)
            return self._stale(message.highest, now_s)
        if isinstance(message, Mirrored):
            return self._mirrored(peer, message, now_s)
        if self.phase is RoundPhase.WAITING or peer not in self._replicas.known:
            return []
        match message:
            case RoundState() if message.ballot == self.ballot:
                self._restoration.hear(message.basis.hashes, now_s)
                effects = self._state(peer, message, now_s)
            case Swapped():
                self._restoration.hear(message.hashes, now_s)
                effects = self._swapped(peer, message)
            case Join() if message.ballot == self.ballot and message.round == self.tip.round + 1:
                effects = []
                self._joined(peer, message)
                if self._waits_for_joins(now_s):
                    return []  # nothing follows from one alone, and each look at a thousand replicas takes milliseconds
            case Staged() if self._is_current(message):
                effects = self._staged(peer, message)
            case MemberLost() if self._is_current(message):
                effects = self._member_lost(peer, message, now_s)
            case RecordPrepared() if self._is_current(message):
                self._preparation.note(peer, message)
                self._replicas.prepared(peer, message.record_hash)
                effects = []
            case _:
                return []
        return effects + self._advance(now_s)

    # -- taking over

    def _ask(self, now_s: float) -> Effects:
        if self.phase is not RoundPhase.ASKING:
            self._since_s = now_s  # a contest keeps the time that was waited: the replicas can be heard all the while
        self.phase, self._lead_at_s = RoundPhase.ASKING, None
        self._tick_at_s = now_s + self.settings.retry_s
        for here in self._replicas.here.values():
            self._restoration.hear(here.basis.hashes, now_s)
        self._replicas.begin_asking()
        self._quorums.last.clear()
        self._ready = False
        if self._unsaid is not None:
            self.tip, self._unsaid = self._unsaid, None
            self._restoration.begin(self._record)
        asked: Effects = [Send(peer, AskRound(self.ballot)) for peer in self._replicas.known]
        return asked + self._mirrors.ask(self.ballot, now_s)

    def _stale(self, highest: Ballot, now_s: float) -> Effects:
        """A replica follows a higher ballot: take a higher one while taking over, and when a past self holds it; but
        whoever has led before has been replaced."""
        self.highest = max(self.highest, highest)
        if self.phase is RoundPhase.WAITING or highest <= self.ballot or self._lead_at_s is not None:
            return []
        if highest.peer == self.me:
            return self.lead(now_s)
        if self.phase is RoundPhase.ASKING and not self._has_led:
            return self._contend(now_s)
        self.phase = RoundPhase.WAITING
        return [Deposed(highest)]

    def _contend(self, now_s: float) -> Effects:
        """Another client has taken a higher ballot. Mostly that client is gone. But clients that take over at the same
        time would overtake each other for ever, so from the second time on each waits, longer each time."""
        self._num_contests += 1
        if self._num_contests == 1:
            return self.lead(now_s)
        longest_s = self.settings.retry_s * 2 ** min(self._num_contests, _MOST_DOUBLINGS)
        # The hash differs between coordinators and ballots, and a machine that is run again does the same again.
        share = hashlib.sha256(repr(self.ballot).encode()).digest()[0] / 255
        self._lead_at_s = now_s + (1.0 + share) / 2 * longest_s
        return []

    def _choose(self, now_s: float) -> Effects:
        states, settings = self._replicas.states, self.settings
        if not self._replicas.all_answered or self._lead_at_s is not None:
            return []
        absent = self._stages.without({state.stage for state in states.values()})
        if absent:
            return self._stages.miss(absent, now_s)
        waited, begun = now_s - self._since_s > settings.drop_after_s, bool(self._recorded or self.tip.round)
        known = {self.tip, *self._judgement.heard, *self._mirrors.tips}
        choice = choose(states, settings.num_stages, settings.genesis, self._unseal, waited, begun, known)
        if choice.is_contested or (choice.tip.signed is None and not self._has_heard_mirrors(now_s)):
            return []
        missing = {*choice.missing, *self._stages.doubted(choice.tip, now_s)}
        effects = self._stages.miss(missing, now_s)
        if not (self._trains or self._is_held(choice.tip) or self._has_heard_mirrors(now_s)):
            return effects
        lost = {} if choice.may_be_dropped else self._stages.lost(choice.tip, now_s)
        if lost.keys() | self._stages.parted(choice.tip) != missing:
            effects += self._replicas.hint(choice, self.ballot, {self.tip, *self._mirrors.tips})
            return effects + self._stages.hint(self.ballot, choice.tip)
        effects += self._judgement.chose(states.values(), choice, self._mirrors.tips)
        is_new = choice.tip.hash != self.tip.hash
        # Who has led meanwhile may have trained on the same record, with samples that are free here.
        is_void = self._num_contests > 0 or (is_new and not self._judgement.is_own(choice.tip, self.tip))
        self.phase, self._num_contests = RoundPhase.IDLE, 0
        if is_void:
            self._asked = None
            effects += [Overtaken(choice.tip)] if self._trains else []
            self._trains = False
        others: Iterable[PeerId] = ()
        if is_new:
            self._set_tip(choice.tip)
            if self._judgement.is_held(choice.tip):
                effects += self._say()
            others = states  # those that hold it already say again what they have sent in its round
        return effects + self._stages.go_on(lost, self.ballot, self.tip, others)

    def _is_held(self, tip: Tip) -> bool:
        """Whether a replica that has answered holds this record, or has prepared it."""
        named = (signed for state in self._replicas.states.values() for signed in (state.record, state.prepared))
        return tip.hash in {record_hash(signed) for signed in named if signed is not None}

    def _has_heard_mirrors(self, now_s: float) -> bool:
        """Whether no mirror may hold what is newer than all that is known: each has answered, or was waited for."""
        return not self._mirrors.is_silent or now_s - self._since_s >= self.settings.lost_state_after_s

    def _mirrored(self, peer: PeerId, message: Mirrored, now_s: float) -> Effects:
        if self.phase is RoundPhase.WAITING or peer not in self._mirrors.known or message.ballot != self.ballot:
            return []
        self._mirrors.answer(peer, message)
        for basis in self._mirrors.bases(peer):
            self._restoration.hear(basis.hashes, now_s)
        new = {tip for tip in self._mirrors.tips if self._judgement.is_new(tip, MIRRORED, self.tip)}
        self._judgement.heard |= new
        if new and self.phase is not RoundPhase.ASKING:
            return self.lead(now_s)  # choose once more, having heard everyone
        kept = self._stages.reconsider_kept(self.ballot, self.tip) if self._is_early else []
        return kept + self._advance(now_s)

    def _state(self, peer: PeerId, state: RoundState, now_s: float) -> Effects:
        self._judgement.check(state)
        is_news = self._judgement.note(state)
        if self._replicas.is_older(peer, state):
            return []
        was_in = self._replicas.takes_part(peer, self.tip)
        tip = self._replicas.answer(peer, state)
        if self.phase is RoundPhase.ASKING:
            if is_news:
                self._since_s = now_s  # the other replicas that hold this record have yet to be heard
            self._judgement.heard.add(tip)
            return []
        if state.refused:
            return self._refused(peer, state.refused, now_s)
        is_new = self._judgement.is_new(tip, state.stage, self.tip)
        if is_new:
            self._judgement.heard.add(tip)
        if is_new or self._judgement.is_unheard(state, self.tip, self.ballot):
            return self.lead(now_s)  # choose once more, having heard everyone
        effects = self._say() if tip.hash == self.tip.hash else []
        effects += self._quorums.again(peer, state.stage) if self.phase is RoundPhase.STAGING else []
        effects += self._reconsider(peer) + self._replicas.tell(self.ballot, self.tip)
        effects += self._replicas.compare_starts(self.tip)
        comes_in = self._ready and not was_in and self._replicas.takes_part(peer, self.tip)
        return [*effects, ReplicaIn(peer)] if comes_in else effects

    def _refused(self, peer: PeerId, reason: str, now_s: float) -> Effects:
        """A replica cannot do what it was told, and is out. But if its stage goes on from the very bytes that it has,
        it was told of other ones before: it is told anew."""
        effects = self._reconsider(peer)
        if self._is_early and self._restoration.goes_on_from(self._replicas.here[peer]):
            self._replicas.told.discard(peer)
            return effects + self._replicas.tell(self.ballot, self.tip)
        return effects + self._replicas.mark_out(peer, reason) + self._leave(peer, now_s)

    def _swapped(self, peer: PeerId, message: Swapped) -> Effects:
        if self.phase is RoundPhase.ASKING:
            return [Send(peer, AskRound(self.ballot))]  # it has another record now, or other bytes, than it has said
        if self.tip.signed is None or peer not in self._replicas.states:
            return []
        if message.record_hash not in (self.tip.hash, self._unseal(self.tip.signed).previous):
            if self._is_early:
                self._replicas.unhear(peer)  # of another chain, it may be: no quorum may have it until it has said
            return [Send(peer, AskRound(self.ballot))]
        kept_bytes = message.hashes == self._replicas.here[peer].basis.hashes
        was_out = self._replicas.swapped(peer, message)
        if message.record_hash != self.tip.hash:
            # It had been told of the tip while it swapped to the record before.
            return self._replicas.tell(self.ballot, self.tip)
        effects = self._say() + self._reconsider(peer)
        if not self._restoration.fits(self._replicas.here[peer]):
            if self._is_early and kept_bytes:
                # As it was told, before its stage went on from other bytes: it is told of these.
                return effects + self._replicas.tell(self.ballot, self.tip)
            return effects + self._replicas.mark_out(peer, "it swapped other bytes than its stage goes on from")
        effects += [ReplicaIn(peer)] if was_out or message.stage in self._restoration.bases else []
        return effects + (self._send_close() if self.phase is RoundPhase.JOINING else [])

    @property
    def _is_early(self) -> bool:
        """Whether the quorums of the round are not proposed yet."""
        return self.phase in (RoundPhase.IDLE, RoundPhase.JOINING)

    def _reconsider(self, peer: PeerId) -> Effects:
        return self._stages.reconsider(peer, self.ballot, self.tip) if self._is_early else []

    # -- the round

    def _advance(self, now_s: float) -> Effects:
        """Go as far as what is known allows."""
        effects: Effects = []
        if self.phase is RoundPhase.ASKING:
            effects += self._choose(now_s)
        if self._is_early:
            effects += self._replicas.compare_starts(self.tip)
            effects += self._stages.watch(self.tip, now_s)
            effects += self._stages.hint(self.ballot, self.tip)
            if self._stages.is_lost(self.tip, now_s):
                # Everybody is heard once more before anything is restored. Where the tip may have to go, its round may
                # be averaged again, and under this ballot its quorums would have the epochs that they had.
                ask = self._ask if self._unsaid is None else self.lead
                return effects + ask(now_s)
        if self.phase is RoundPhase.IDLE and not (self._ready or self._replicas.told or self._unsaid):
            self._ready = self._trains = True
            effects.append(RoundReady(self.tip, self._replicas.holders(self.tip), self._replicas.sent_bytes))
        if self.phase is RoundPhase.IDLE and self._ready and self._request is not None:
            self.phase, self._since_s = RoundPhase.JOINING, now_s
            self._joins.restart()
            effects += self._send_close()
        if self.phase is RoundPhase.JOINING and self._request is not None:
            effects += self._settle(self._request, now_s)
        if self.phase is RoundPhase.STAGING and self._quorums.agreed:
            effects += self._prepare()
        if (
            self.phase is RoundPhase.PREPARING
            and self._preparation.tip is not None
            and self._preparation.is_prepared_by(self._quorums.members)
        ):
            self.phase = RoundPhase.IDLE
            self._set_tip(self._preparation.tip)
            effects += self._replicas.tell(self.ballot, self.tip)
        return effects + self._tell_mirrors()

    def _tell_mirrors(self) -> Effects:
        """A record that some replica has swapped to stands; what is only prepared a mirror need not know."""
        stands = self.phase is not RoundPhase.ASKING and self._unsaid is None
        is_leading = self.phase is not RoundPhase.WAITING
        return self._mirrors.tell(self.ballot, self.tip if stands else None) if is_leading else []

    def _send_close(self) -> Effects:
        close = Close(self.ballot, self.tip.round + 1)
        return [Send(p, close) for p in self._replicas.holders(self.tip) if p not in self._joins.joins]

    def _joined(self, peer: PeerId, join: Join) -> None:
        is_member = self._replicas.takes_part(peer, self.tip) and join.stage == self._replicas.states[peer].stage
        if self.phase is not RoundPhase.JOINING or not is_member:
            return
        num_stages = self.settings.num_stages
        odd = next((entry for entry in join.log if len(entry.path) != num_stages), None)
        if odd is not None:
            raise RemoteProtocolError(
                f"{peer} joins with step {odd.key} over {len(odd.path)} stages, the run has {num_stages}"
            )
        self._joins.note(peer, join)
        if self._request is not None and join.stage not in self._joins.awaited.values():
            self._quorums.foresee(join.stage, self.settings, self._joins.joins, self._request.slots)

    def _waits_for_joins(self, now_s: float) -> bool:
        within_s = None if self._request is None else self._request.join_within_s
        return bool(self._joins.awaited) and (within_s is None or now_s - self._since_s < within_s)

    def _settle(self, request: CloseRequest, now_s: float) -> Effects:
        """Settle the steps in doubt, once all have joined; then propose the quorums, without who contradicts."""
        holders = self._replicas.holders(self.tip)
        joins = self._joins.keep(holders)
        if self._waits_for_joins(now_s) or self._stages.without({join.stage for join in joins.values()}):
            return []
        effects: Effects = []
        strange = {} if request.num_samples is None else self._joins.leave_out_strange(request.num_samples)
        for peer, item in strange.items():
            reason = f"it has joined with samples up to {item.stop}, and the data have {request.num_samples}"
            effects += self._replicas.mark_out(peer, reason)
        for peer, item in self._joins.leave_out_scattered(self._recorded).items():
            reason = (
                f"it has joined with samples {item.start}-{item.stop} of pass {item.pass_number}, far from all others"
            )
            effects += self._replicas.mark_out(peer, reason)
        orders = self._joins.settle()
        if orders:
            return effects + [Send(peer, Resolve(self.ballot, self.tip.round + 1, *fate)) for peer, fate in orders]
        for peer, key in self._joins.leave_out().items():
            effects += self._replicas.mark_out(peer, f"step {key} was settled in another way than here")
        return effects + self._propose_all(request, now_s)

    def _propose_all(self, request: CloseRequest, now_s: float) -> Effects:
        self.phase, self._since_s = RoundPhase.STAGING, now_s
        twice = self._quorums.begin(self.settings, self._joins.joins, request.slots)
        return [*twice, *(effect for quorum in self._quorums.values() for effect in self._propose(quorum))]

    def _propose(self, quorum: StageQuorum) -> Effects:
        # Who has said it, and not who it says that it is: a quorum with a peer that is twice in it is refused by all.
        hops = {peer: Hop(peer, state.hop.addresses) for peer, state in self._replicas.states.items()}
        sends = self._quorums.propose(quorum, self.ballot, self.tip.round + 1, hops)
        return [*(sends if quorum.is_told else spread(sends, self.ballot, self.settings.passing))]

    def _new_epoch(self, quorum: StageQuorum, without: frozenset[PeerId]) -> Effects:
        self.phase = RoundPhase.STAGING
        self._preparation.clear()
        quorum.next_epoch(without)
        return self._propose(quorum)

    def _lose(self, peer: PeerId, now_s: float) -> Effects:
        state = self._replicas.states.get(peer)
        if state is not None:
            self._restoration.hear(self._replicas.here[peer].basis.hashes, now_s)
        self._replicas.lose(peer)
        self._quorums.lose(peer)
        if state is not None:
            self._judgement.lost(state, self._replicas.states.values())
        return self._leave(peer, now_s)

    def _leave(self, peer: PeerId, now_s: float) -> Effects:
        """A replica is lost to the round being averaged: its stage goes on without it, from the kept inputs."""
        if self.phase not in (RoundPhase.STAGING, RoundPhase.PREPARING):
            return []
        for quorum in self._quorums.values():
            if quorum.members == (peer,):
                return self._ask(now_s)
            if peer in quorum.members:
                self._since_s = now_s
                return self._new_epoch(quorum, frozenset((peer,)))
        return []

    def _member_lost(self, peer: PeerId, message: MemberLost, now_s: float) -> Effects:
        quorum = self._quorums.get(message.stage)
        if quorum is None or message.epoch != quorum.epoch or not {peer, message.peer} <= set(quorum.members):
            return []
        if message.peer != peer:
            return self._leave(self._replicas.without(peer, message.peer, message.round), now_s)
        quorum.differed.add(peer)
        return self._replicas.mark_out(peer, "its own state is not the record's") + self._leave(peer, now_s)

    def _staged(self, peer: PeerId, message: Staged) -> Effects:
        quorum = self._quorums.get(message.stage)
        odd = quorum.note(peer, message.epoch, message.hashes) if quorum is not None else None
        if quorum is None or odd is None:
            return []
        reason = "its outer step differs from the other members'"
        effects = [effect for one in sorted(odd) for effect in self._replicas.mark_out(one, reason)]
        return effects + self._new_epoch(quorum, odd)

    def _is_current(self, message: Staged | MemberLost | RecordPrepared) -> bool:
        averaging = self.phase in (RoundPhase.STAGING, RoundPhase.PREPARING)
        return averaging and message.ballot == self.ballot and message.round == self.tip.round + 1

    def _prepare(self) -> Effects:
        self.phase = RoundPhase.PREPARING
        request = self._request or CloseRequest(self.tip.round + 1, {}, {})
        joins, restored = self._joins.joins, self._restoration.bases
        return [
            self._preparation.propose(self.tip, self.ballot, self._quorums, joins, self._recorded, restored, request)
        ]

    def _set_tip(self, tip: Tip) -> None:
        last = self._quorums.ended if tip is self._preparation.tip else None
        self.tip, self._unsaid = tip, self.tip if tip.signed is not None else None
        self._replicas.readmit()
        self._ready = False
        self._preparation.clear()
        self._joins, self._quorums = RoundJoins(), RoundQuorums(last)
        self._restoration.begin(self._record)

    def _say(self) -> Effects:
        """A replica has swapped to the tip, so it stands; until then a successor may have to drop what is only
        prepared."""
        signed = self.tip.signed
        if self._unsaid is None or signed is None:
            return []
        self._unsaid = self._asked = None
        record = self._unseal(signed)
        self._recorded = used_samples(record)  # of this chain, whoever coordinated it
        return [RecordCommitted(record, signed)]
