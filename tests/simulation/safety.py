"""What must never happen: checks that the worlds share, made at the event that could break them.

A process changes only when something happens to it, so what it holds is checked right then, against what was true
before in the whole run: that is after every event, without looking at everything after each.

To add a rule: a method here, a call where its event happens, and a mutant that only this rule notices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from shoal.ids import StepKey
from shoal.wire.messages.base import SampleRange
from shoal.wire.messages.step import StepEntry


class Broken(AssertionError):
    """Something that must never happen has happened, or the run does not go on."""


class Seen(NamedTuple):
    """What the forward of a microbatch went through at one replica: `generation` counts the states that it has had."""

    peer: str
    generation: int
    version: int


class StepSafety:
    """A step is a transaction: applied whole, over one version of the weights, by every live stage of its path."""

    def __init__(self) -> None:
        self.generations_at: dict[StepKey, dict[str, int]] = {}
        # The last step of each trainer, by slot and generation, that it knows to be committed.
        self._done: dict[tuple[int, ...], StepKey] = {}

    def opened(self, key: StepKey, generations: Mapping[str, int]) -> None:
        """An attempt begins over these replicas, each in this generation."""
        self.generations_at[key] = dict(generations)

    def done(self, key: StepKey) -> None:
        """A trainer goes on, since some replica has committed this step."""
        self._done[key[:2]] = key

    def begins(self, peer: str, generation: int, key: StepKey, unapplied: Iterable[StepKey]) -> None:
        """A replica computes the first forward of a step.

        Args:
            unapplied: What is open there and not in doubt.

        Raises:
            Broken: Among that is the step before, which its trainer knows to be committed.
        """
        before = self._done.get(key[:2])
        if before in unapplied and before != key and self.generations_at.get(before, {}).get(peer) == generation:
            raise Broken(f"{peer} begins {key} before it has applied {before}")

    def applies(
        self,
        peer: str,
        generation: int,
        key: StepKey,
        gradients: Mapping[int, tuple[object, ...]],
        path: Sequence[str],
        sizes: Sequence[int],
        cap: int | None,
        applied: Iterable[StepKey],
    ) -> None:
        """A replica commits the sum of `gradients`: of each microbatch its samples and, after them, what it has seen.

        Raises:
            Broken: The gradients are not those of the whole step, over this path, of this generation, and of one
                version.
        """
        parts: list[tuple[object, int, int]] = [gradients[number][0] for number in sorted(gradients)]  # type: ignore[misc]
        trained = [sample for _, start, stop in parts for sample in range(start, stop)]
        if trained != list(range(sum(sizes))):
            raise Broken(f"{key} committed with the samples {trained}")
        if cap is not None and any(stop - start > cap for _, start, stop in parts):
            raise Broken(f"{peer} takes {cap} samples, not {parts}")
        chains = {gradient[1:] for gradient in gradients.values()}
        if len(chains) != 1:
            raise Broken(f"{key} mixes versions or paths: {chains}")
        chain: tuple[Seen, ...] = chains.pop()  # type: ignore[assignment]
        if tuple(seen.peer for seen in chain) != tuple(path):
            raise Broken(f"{key} holds a gradient of another path")
        if len(set(chain)) != len(set(path)):
            raise Broken(f"{key} has seen two versions of one replica")
        if (peer, generation) not in [(seen.peer, seen.generation) for seen in chain]:
            raise Broken(f"{key} is of an earlier round")
        if key in applied:
            raise Broken(f"{key} applied twice")

    def weighs(
        self,
        key: StepKey,
        gradients: Mapping[int, tuple[object, ...]],
        weights: Sequence[int],
        targets: Sequence[int],
    ) -> None:
        """A step is committed whose microbatches were weighted like this; see `applies`.

        Args:
            targets: Of each sample of the step.

        Raises:
            Broken: A microbatch does not weigh what it has targets.
        """
        parts: list[tuple[object, int, int]] = [gradients[number][0] for number in sorted(gradients)]  # type: ignore[misc]
        due = [sum(targets[start:stop]) for _, start, stop in parts]
        if list(weights) != due:
            raise Broken(f"the microbatches of {key} weigh {list(weights)}, their targets are {due}")

    def buffers(self, peer: str, buffers: Sequence[object], log: Sequence[StepEntry]) -> None:
        """The live buffers are those of the steps that were applied, in their order, and of nothing else."""
        if [entry.key for entry in log] != list(buffers):
            raise Broken(f"the buffers of {peer} are of {list(buffers)}, its log is {[e.key for e in log]}")

    def recorded(self, logs: Mapping[str, tuple[int, Sequence[StepEntry]]]) -> None:
        """A round ends with these logs, by replica, with its generation: each step is in those of all its live
        replicas."""
        keys = {peer: {entry.key for entry in log} for peer, (_, log) in logs.items()}
        attempts: dict[tuple[int, int, int], StepKey] = {}
        for peer, held in keys.items():
            for key in held:
                if attempts.setdefault(key.step, key) != key:
                    raise Broken(f"{key} and {attempts[key.step]} are both applied")
                for other, generation in self.generations_at[key].items():
                    if other in logs and logs[other][0] == generation and key not in keys[other]:
                        raise Broken(f"{key} is applied at {peer} and not at {other}")


class SampleSafety:
    """No sample is in two records, nor twice in one."""

    def __init__(self) -> None:
        self.recorded: set[tuple[int, int]] = set()

    def record(self, samples: Iterable[SampleRange]) -> None:
        """A record has these.

        Raises:
            Broken: Some are in a record already.
        """
        for item in samples:
            for number in range(item.start, item.stop):
                if (item.pass_number, number) in self.recorded:
                    raise Broken(f"sample {number} of pass {item.pass_number} is recorded twice")
                self.recorded.add((item.pass_number, number))


class Split(Exception):
    """Two sides that cannot hear each other have gone on apart, each with a coordinator and replicas of every stage.

    That is what DESIGN.md says of a split. How chains that have parted become one again is checked by a world that
    catches this and compares them when they meet; the others end here.
    """


class Process(NamedTuple):
    """A replica from one start to the next: what it held is gone with it."""

    peer: str
    boot: int = 1


class ChainSafety:
    """One record per round, whoever commits it, and every replica is on that chain.

    Only where no replica is a member of both may there be two records: then the swarm was split. A replica that was
    started again is another one, if its coordinator now can reach nobody who has taken the first record. Or where the
    one was prepared, but by nobody taken, when its coordinator was lost: a successor may drop it then
    (docs/protocol.md, "The outer round"). Its `CommitRecord` may still lie with a member that is frozen: that is on a
    chain of its own when it wakes, be it just before the successor commits, which then has not heard of it. Or where a
    split has taken members from a coordinator that had prepared a record: it goes on with another one under its ballot,
    without them, and they have the first one committed. Nobody has taken both then; but a member of the second that it
    has not reached any more, which has only the first one prepared, may be among them.

    Args:
        is_heard: Whether the coordinator of a ballot could reach a process just now, for long enough.

    Attributes:
        committed: By round, the hash of its record.
    """

    def __init__(self, is_heard: Callable[[object, Process], bool] = lambda _ballot, _process: True) -> None:
        self.committed: dict[int, str] = {}
        self._is_heard = is_heard
        self._known: dict[int, tuple[str, frozenset[Process], Any]] = {}
        self._takers: defaultdict[str, set[Process]] = defaultdict(set)

    def go_back(self, round: int) -> None:
        """The run goes on from the record of a round: those that were committed later are set aside."""
        self.committed = {number: digest for number, digest in self.committed.items() if number <= round}
        self._known = {number: known for number, known in self._known.items() if number <= round}

    def commits(self, round: int, digest: str, members: Iterable[Process], ballot: Any = None) -> bool:
        """A coordinator commits a record; returns whether it is the first to.

        Raises:
            Broken: There is another one of this round.
            Split: There is, and no replica is a member of both.
        """
        self._compare(round, digest, members, ballot)
        is_first = round not in self.committed
        self.committed[round] = digest
        return is_first

    def swaps(self, who: Process, round: int, digest: str, members: Iterable[Process], ballot: Any = None) -> None:
        """A replica makes this record its tip: it can only be one that is committed, or about to be.

        Raises:
            Broken: Others hold, or somebody has committed, another one.
            Split: The same, and no replica is a member of both, or this one is no member of the other.
        """
        if round in self._known and who not in self._known[round][1]:
            self._compare(round, digest, {who}, ballot)
        self._takers[digest].add(who)
        self._compare(round, digest, members, ballot)

    def _compare(self, round: int, digest: str, members: Iterable[Process], ballot: Any) -> None:
        here = frozenset(members)
        other, there, its_ballot = self._known.setdefault(round, (digest, here, ballot))
        if other == digest:
            return
        takers = self._takers[other]
        is_heard_of = any(self._is_heard(ballot, taker) for taker in takers)
        is_newer = ballot is not None and its_ballot is not None and ballot > its_ballot
        no_member_took_it = takers.isdisjoint(here)
        is_superseded = ballot is not None and ballot == its_ballot and (no_member_took_it or not is_heard_of)
        is_dropped = is_newer and bool(takers) and not is_heard_of and no_member_took_it
        nobody_took_both = takers.isdisjoint(self._takers[digest])
        has_kept_apart = nobody_took_both and (is_superseded or is_dropped)
        started_again = {member.peer for member in here} & {member.peer for member in there - here}
        if has_kept_apart or (here.isdisjoint(there) and not (started_again and is_heard_of)):
            raise Split(f"two records of round {round}")
        both = sorted({member.peer for member in here} & {member.peer for member in there})
        raise Broken(f"two records of round {round}; {both} are members of both")
