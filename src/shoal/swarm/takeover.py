"""What a trainer that is gone has left: whom to ask, how long, and what the answers prove. Pure state, no I/O.

    Fence to every live replica, repeated -> Fenced from each, none in doubt -> Settled -> LeaseTable.release_trainer
                                              '-- still in doubt after a second, or silent for five: Settled as it is

A replica that is cut off may have committed what nobody else knows of, and joins the round when it is back. So its
silence proves nothing; a witness proves that an attempt is committed nowhere. A witness is a replica of the attempt's
path that has lived since the attempt was opened, is in its round, and has neither committed it nor is in doubt about
it. It has never prepared the attempt, so no Commit was sent; or it has, and the attempt was aborted everywhere. From
its answer on the witness refuses the trainer, so what it has said stays true.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shoal.errors import RemoteProtocolError
from shoal.ids import PeerId, StepKey
from shoal.swarm.step_operations import SendStepMessage
from shoal.wire.messages.base import StepRange
from shoal.wire.messages.step import Fence, Fenced

_REPEAT_S = 0.1
_DOUBT_S = 1.0
"""How long replicas may take to settle a step among themselves; what is in doubt then is left to the record."""
_SILENCE_S = 5.0
"""A frozen replica has lost its connection by then."""

MAX_COMMITTED = 1 << 17
"""Of the attempts of one slot in a round, which a replica says it has committed."""

Path = tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Settled:
    """What is known of the earlier trainers of a slot: those below the fenced generation.

    Attributes:
        round: in which the replicas were asked for them.
        committed: attempts that some replica has applied.
        in_doubt: other attempts, whose fate the record will tell.
        witnesses: replicas whose silence about an attempt denies it, each with the oldest attempt that it has lived
            since.
        complete: every replica that may have taken part has answered, not only those that can be reached.
    """

    round: int
    committed: frozenset[StepKey]
    in_doubt: frozenset[StepKey]
    witnesses: Mapping[PeerId, StepKey]
    complete: bool

    @property
    def kept(self) -> frozenset[StepKey]:
        """Attempts that count as trained until the record says otherwise."""
        return self.committed | self.in_doubt

    def denies(self, key: StepKey, path: Path) -> bool:
        """Whether an attempt over this path is surely committed nowhere, and never will be."""
        return key not in self.kept and any(self._is_witness(peer, key) for peer in path)

    def _is_witness(self, peer: PeerId, key: StepKey) -> bool:
        since = self.witnesses.get(peer)
        return since is not None and since[:2] == key[:2] and since <= key


class TakeoverMachine:
    """Settles the steps of one slot's trainers below a generation.

    Attributes:
        wake_at_s: when to look again if no event comes before (monotonic).
    """

    def __init__(
        self, slot: int, lowest: int, round: int, now_s: float, *, left_to_record: Collection[StepKey] = ()
    ) -> None:
        """Ask no replica yet.

        Args:
            lowest: the lowest generation of that trainer that may still act.
            left_to_record: attempts whose doubt an earlier takeover in this round has waited for in vain.
        """
        self._slot, self._lowest, self._round = slot, lowest, round
        self._begun_s = self.wake_at_s = now_s
        self._left_to_record = frozenset(left_to_record)
        self._answers: dict[PeerId, Fenced] = {}
        self._committed: dict[PeerId, set[StepKey]] = {}  # by who has said so

    def receive(self, peer: PeerId, answer: Fenced) -> None:
        """Take an answer; one to an earlier fence says nothing about the trainers since.

        Raises:
            RemoteProtocolError: It names more attempts than a trainer can have made in a round.
        """
        if answer.generations.get(self._slot, 0) < self._lowest:
            return
        committed = self._committed.setdefault(peer, set())
        committed |= {key for key in answer.committed if key.trainer == self._slot}
        if len(committed) > MAX_COMMITTED or len(answer.in_doubt) > MAX_COMMITTED:
            del self._committed[peer]
            raise RemoteProtocolError(f"{peer} names more than {MAX_COMMITTED} attempts of slot {self._slot}")
        self._answers[peer] = answer

    def asks(self, live: Collection[PeerId], now_s: float) -> list[SendStepMessage]:
        """Whom to ask now, out of those that can be reached: all of them again, since doubt may have ended."""
        if now_s < self.wake_at_s:
            return []
        self.wake_at_s = now_s + _REPEAT_S
        return [SendStepMessage(peer, Fence({self._slot: self._lowest})) for peer in live]

    def is_over(self, live: Collection[PeerId], now_s: float) -> bool:
        """Whether nothing more is waited for. A replica that cannot be reached is not, though it may have committed.

        While none can be reached nobody trains either, and the first one that is back says more than nobody does.
        """
        waited_s = now_s - self._begun_s
        if waited_s > _SILENCE_S:
            return True
        have_answered = bool(self._answers) and self._answers.keys() >= set(live)
        return have_answered and (self._in_doubt() <= self._left_to_record or waited_s > _DOUBT_S)

    def settled(self, everyone: Collection[PeerId] | None, steady: Collection[PeerId]) -> Settled:
        """What the answers prove.

        Args:
            everyone: the replicas over which the trainer may have trained, including lost ones; None: not known.
            steady: replicas that were in the round when it began, over connections that have not ended since.
        """
        witnesses: dict[PeerId, StepKey] = {}
        for peer, answer in self._answers.items():
            if answer.round != self._round:
                continue
            if answer.steady and peer in steady:
                witnesses[peer] = StepKey(self._slot, self._lowest - 1, 0, 0)
            elif self._slot in answer.since:
                witnesses[peer] = answer.since[self._slot]
        committed = frozenset[StepKey]().union(*self._committed.values())
        return Settled(
            round=self._round,
            committed=committed,
            in_doubt=self._in_doubt() - committed,
            witnesses=witnesses,
            complete=everyone is not None and self._answers.keys() >= set(everyone),
        )

    def _in_doubt(self) -> frozenset[StepKey]:
        doubts = (key for answer in self._answers.values() for key in answer.in_doubt)
        return frozenset(key for key in doubts if key.trainer == self._slot)


def next_number(settled: Settled, steps: StepRange, last_reported: int, next_step: int, *, is_known: bool) -> int:
    """Return the number of the step at which the next trainer goes on: after all that may count.

    Args:
        steps: of the slot in the round.
        last_reported: number of the last step that a trainer of the slot has reported.
        next_step: number of the first one in the round without a lease that waits for the record.
        is_known: all leases of the slot's trainers are known.
    """
    numbers = [steps.first - 1, last_reported, next_step - 1, *(key.number for key in settled.kept)]
    if not is_known and not settled.complete:
        # Neither all leases nor all replicas can be asked: there may be any number of steps that one that is away has.
        numbers.append(steps.stop - 1)
    return max(numbers) + 1
