"""The order in which a run is computed again: each step in the one moment at which its whole path held its versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from shoal.errors import Contradiction, RecordRejected
from shoal.ids import Ballot, PeerId, StepKey
from shoal.pipeline.replica_log import Applied, Began, Line, Loaded, Place, Resumed
from shoal.replay.generations import Generation, Inherited, generation_of, members_of
from shoal.replay.order import Apply, Average, Begin, Compute, End, Inherit, Keep, Load, ReplayOrder, Resume
from shoal.wire.messages.base import SampleRange
from shoal.wire.messages.round import Record, StageHashes, StageOutcome

PLACE = Place("cpu", 1, {}, {})
HASHES = StageHashes("p", "m", "b")


def key(step: str) -> StepKey:
    """`a0` is step 0 of trainer a."""
    return StepKey("abc".index(step[0]), 1, int(step[1:]), 0)


def generation(number: int, name: str, script: str, path: str = "PQ", earlier: Sequence[Generation] = ()) -> Generation:
    """A generation of P or R (stage 0), Q or T (stage 1): L0 loads record 0, +a0 begins a step, RT+a0 over that path,
    a0 commits it, S1 goes on from the snapshot after one commit of the last of the `earlier` generations, SP from what
    P of those was before its first step, I1 from slot 1 of a fork's first checkpoint."""
    lines: list[Line | Inherited] = []
    for word in script.split():
        if word[0] == "L":
            lines.append(Loaded(int(word[1:]), HASHES))
        elif word[0] == "S" and word[1:].isdecimal():
            lines.append(Resumed(len(earlier), int(word[1:])))
        elif word[0] == "S":
            lines.append(Resumed(1, 0, PeerId(word[1:])))
        elif word[0] == "I":
            lines.append(Inherited(int(word[1:])))
        elif "+" in word:
            first, step = word.split("+")
            peers = tuple(PeerId(peer) for peer in first or path)
            lines.append(Began(key(step), peers, (SampleRange(0, 0, 1),), (1,), (1,)))
        else:
            lines.append(Applied(key(word), 1.0, 0.1, False, 1.0, None))
    numbers: Counter[PeerId] = Counter()
    known: dict[tuple[PeerId, int], list[Generation]] = {}
    for each in earlier:
        numbers[each.peer] += 1
        known[each.peer, numbers[each.peer]] = [each]
    return generation_of(number, PeerId(name), int(name in "QT"), PLACE, lines, known)


def record(round: int, *stages: Sequence[str]) -> Record:
    outcomes = [
        StageOutcome(stage, 0, tuple(PeerId(peer) for peer in members), tuple(1 for _ in members), HASHES, 0)
        for stage, members in enumerate(stages)
    ]
    return Record("run", round, Ballot(1, PeerId("C"), 1), "", tuple(outcomes), (), (), {})


def order_of(generations: Sequence[Generation], *records: Record) -> ReplayOrder:
    """What is computed; the step log of round 1 is that of the first two generations."""
    logs = {each.peer: (each.stage, each.segments[0].log) for each in generations[:2]}
    return ReplayOrder(
        records, generations, [members_of(each, generations, logs if each.round == 1 else {}) for each in records]
    )


def told(order: ReplayOrder) -> list[str]:
    """The actions as words."""
    words: list[str] = []
    for action in order:
        match action:
            case Begin(who):
                words.append(f"begin {who.peer}")
            case Load(who, loaded):
                words.append(f"load {who.peer} {loaded.round}")
            case Compute(_, began, generations):
                path = "".join(each.peer for each in generations)
                words.append(f"compute {'abc'[began.key.trainer]}{began.key.number} {path}")
            case Apply(_, who, applied):
                words.append(f"apply {who.peer} {'abc'[applied.key.trainer]}{applied.key.number}")
            case Average(of_round):
                words.append(f"average {of_round.round}")
            case Keep(who, boundary, _):
                words.append(f"keep {who.peer} {boundary.commits}")
            case Resume(who, origin):
                words.append(f"resume {who.peer} {origin.commits}")
            case Inherit(who, slot):
                words.append(f"inherit {who.peer} {slot}")
            case End(who):
                words.append(f"end {who.peer}")
    return words


def place(words: list[str], *wanted: str) -> list[int]:
    return [words.index(word) for word in wanted]


def test_a_step_sees_what_each_replica_of_its_path_held_when_it_began_there() -> None:
    # Q commits in another order than P, and b0 saw P before a0 was applied.
    generations = [generation(0, "P", "L0 +a0 +b0 a0 b0 L1"), generation(1, "Q", "L0 +b0 +a0 b0 a0 L1")]
    words = told(order_of(generations, record(1, ["P"], ["Q"])))
    first_commit = min(words.index("apply P a0"), words.index("apply Q b0"))
    assert max(place(words, "compute a0 PQ", "compute b0 PQ")) < first_commit
    assert place(words, "apply P a0", "apply P b0") == sorted(place(words, "apply P a0", "apply P b0"))
    assert words.index("apply Q b0") < words.index("apply Q a0")
    assert words[-1] == "average 1"


def test_a_commit_waits_for_the_other_steps_that_have_begun_before_it() -> None:
    # When P is at its commit of a0, T has not been looked at yet.
    generations = [
        generation(0, "Q", "L0 +a0 a0"),
        generation(1, "P", "L0 +a0 PT+b0 a0 b0"),
        generation(2, "T", "L0 PT+b0 b0"),
    ]
    words = told(order_of(generations, record(1, ["P"], ["Q", "T"])))
    assert words.index("compute b0 PT") < words.index("apply P a0")


def test_a_load_waits_for_the_steps_that_have_begun_before_it() -> None:
    # P and T are left out of the record, and P goes on before T has begun b0.
    generations = [
        generation(0, "R", "L0"),
        generation(1, "Q", "L0"),
        generation(2, "P", "L0 PT+b0 L1"),
        generation(3, "T", "L0 XT+c0 c0 PT+b0 b0 L1"),
        generation(4, "X", "L0 XT+c0 c0"),
    ]
    words = told(order_of(generations, record(1, ["R"], ["Q"]), record(2, ["P"], ["T"])))
    assert words.index("average 1") < words.index("compute b0 PT") < words.index("load P 1")


def test_a_step_that_began_after_a_commit_is_computed_after_it_on_both_replicas() -> None:
    generations = [generation(0, "P", "L0 +a0 a0 +b0 b0"), generation(1, "Q", "L0 +a0 a0 +b0 b0")]
    words = told(order_of(generations, record(1, ["P"], ["Q"])))
    assert max(place(words, "apply P a0", "apply Q a0")) < words.index("compute b0 PQ")


def test_a_replica_that_died_before_its_commit_has_still_computed_for_the_other_one() -> None:
    generations = [generation(0, "P", "L0 +a0 a0"), generation(1, "Q", "L0 +a0"), generation(2, "Q", "L0")]
    order = order_of(generations, record(1, ["P"], ["Q"]))
    keeps = [action.keeps for action in order if isinstance(action, Compute)]
    assert keeps == [(True, False)]


def test_steps_that_nobody_has_committed_are_left_out() -> None:
    generations = [generation(0, "P", "L0 +a0 +b0 b0"), generation(1, "Q", "L0 +b0 b0")]
    order = order_of(generations, record(1, ["P"], ["Q"]))
    assert order.num_steps == 1
    assert not any("a0" in word for word in told(order))


def test_what_was_trained_after_the_last_record_is_left_out() -> None:
    generations = [generation(0, "P", "L0 +a0 a0 L1 +a1 a1"), generation(1, "Q", "L0 +a0 a0 L1 +a1 a1")]
    order = order_of(generations, record(1, ["P"], ["Q"]))
    assert (order.num_steps, told(order)[-1]) == (1, "average 1")


def test_a_replica_that_is_left_out_of_a_record_keeps_its_optimizer_and_loads_the_next_state() -> None:
    generations = [
        generation(0, "P", "L0 +a0 a0 L1 +a1 a1 L2"),
        generation(1, "Q", "L0 +a0 a0 RQ+b0 b0 L1 +a1 a1 RQ+b1 b1 L2"),
        generation(2, "R", "L0 RQ+b0 b0 L1 RQ+b1 b1 L2"),
    ]
    words = told(order_of(generations, record(1, ["P"], ["Q"]), record(2, ["P", "R"], ["Q"])))
    assert words.count("begin R") == 1
    assert words.index("average 1") < words.index("load R 1") < words.index("compute b1 RQ") < words.index("average 2")


def test_a_life_is_not_built_before_it_takes_part_and_ends_with_its_last_round() -> None:
    generations = [
        generation(0, "P", "L0 +a0 a0 L1"),
        generation(1, "Q", "L0 +a0 a0 L1 +a1 a1 L2 +a2 a2"),
        generation(2, "P", "L0 L1 +a1 a1 L2 +a2 a2"),
    ]
    words = told(order_of(generations, record(1, ["P"], ["Q"]), record(2, ["P"], ["Q"]), record(3, ["P"], ["Q"])))
    begun = [index for index, word in enumerate(words) if word == "begin P"]
    assert words.index("average 1") < begun[1]
    assert words[begun[1] + 1] == "load P 1"
    assert words.index("average 1") < words.index("end P") < words.index("average 2")


def test_the_last_life_with_the_steps_of_the_log_is_the_one_that_a_record_means() -> None:
    generations = [generation(0, "P", "L0 +a0 a0"), generation(1, "Q", "L0 +a0 a0"), generation(2, "P", "L0")]
    logs = {PeerId("P"): (0, generations[0].segments[0].log), PeerId("Q"): (1, generations[1].segments[0].log)}
    assert members_of(record(1, ["P"], ["Q"]), generations, logs)[0, PeerId("P")].generation == 0


def test_without_a_step_log_it_is_the_last_life_with_as_many_samples_as_the_record_says() -> None:
    of_round = record(1, ["P"], ["Q"])
    begun = [generation(0, "P", "L0 +a0 a0"), generation(1, "Q", "L0 +a0 a0"), generation(2, "P", "L0")]
    assert members_of(of_round, begun, {})[0, PeerId("P")].generation == 0
    assert members_of(of_round, [generation(0, "P", "L0"), begun[1], begun[2]], {})[0, PeerId("P")].generation == 2


def contradiction(generations: Sequence[Generation], *records: Record) -> Contradiction:
    with pytest.raises(Contradiction) as caught:
        told(order_of(generations, *records))
    return caught.value


def test_commits_in_an_order_that_cannot_have_been_name_the_replica() -> None:
    # Q says that it began b0 after a0's commit, P began a0 only after b0's.
    error = contradiction(
        [generation(0, "P", "L0 +b0 b0 +a0 a0"), generation(1, "Q", "L0 +a0 a0 +b0 b0")], record(1, ["P"], ["Q"])
    )
    assert (error.round, error.stage, error.peer) == (1, 1, "Q")
    assert "step t1.1/0#0" in str(error)


def test_a_replica_whose_log_is_missing_is_named() -> None:
    error = contradiction([generation(0, "P", "L0 +a0 a0")], record(1, ["P"], ["Q"]))
    assert (error.stage, error.peer) == (1, "Q")
    assert "folder `replicas`" in str(error)


def test_a_log_that_lacks_a_step_is_named() -> None:
    error = contradiction([generation(0, "P", "L0 +a0 a0 L1"), generation(1, "Q", "L0 L1")], record(1, ["P"], ["Q"]))
    assert (error.stage, error.peer) == (1, "Q")
    assert "incomplete" in str(error)


def test_a_commit_without_a_beginning_is_named() -> None:
    error = contradiction([generation(0, "P", "L0 a0 L1"), generation(1, "Q", "L0 L1")], record(1, ["P"], ["Q"]))
    assert (error.stage, error.peer) == (0, "P")
    assert "without having begun" in str(error)


def test_a_life_goes_on_from_where_an_earlier_one_was() -> None:
    first = generation(1, "Q", "L0 +a0 a0 +a1 a1")
    second = generation(2, "Q", "L0 S1 +a2 a2", earlier=[first])
    # The second generation is looked at before the first one.
    generations = [generation(0, "P", "L0 +a0 a0 +a1 a1 +a2 a2"), first, second]
    assert [entry.key.number for entry in second.segments[0].log] == [0, 2]
    assert [entry.version for entry in second.segments[0].log] == [0, 1]
    logs = {PeerId("P"): (0, generations[0].segments[0].log), PeerId("Q"): (1, second.segments[0].log)}
    of_round = record(1, ["P"], ["Q"])
    words = told(ReplayOrder([of_round], generations, [members_of(of_round, generations, logs)]))
    kept, went_on = place(words, "keep Q 1", "resume Q 1")
    assert words.index("apply Q a0") < kept < words.index("apply Q a1")
    assert kept < went_on < words.index("compute a2 PQ")
    assert words[-1] == "average 1"


def test_a_third_life_goes_on_from_a_second_one_that_went_on_from_a_first_one() -> None:
    first = generation(1, "Q", "L0 +a0 a0")
    second = generation(2, "Q", "L0 S1 +a1 a1", earlier=[first])
    third = generation(3, "Q", "L0 S2", earlier=[first, second])
    generations = [generation(0, "P", "L0 +a0 a0 +a1 a1"), first, second, third]
    assert third.segments[0].log == second.segments[0].log
    logs = {PeerId("P"): (0, generations[0].segments[0].log), PeerId("Q"): (1, third.segments[0].log)}
    of_round = record(1, ["P"], ["Q"])
    words = told(ReplayOrder([of_round], generations, [members_of(of_round, generations, logs)]))
    places = place(words, "keep Q 1", "resume Q 1", "keep Q 2", "resume Q 2", "average 1")
    assert places == sorted(places)


def test_a_life_goes_on_from_what_another_peer_was_at_the_record() -> None:
    lost = generation(1, "T", "L0 +a0 a0 L1 RT+a1 a1", path="PT")
    heirs = [generation(number, "Q", "L1 ST +a2 a2", earlier=[lost]) for number in (2, 3)]
    generations = [generation(0, "P", "L0 PT+a0 a0 L1 +a2 a2"), lost, *heirs]
    rounds = [record(1, ["P"], ["T"]), record(2, ["P"], ["Q"])]
    logs = {PeerId("P"): (0, generations[0].segments[1].log), PeerId("Q"): (1, heirs[1].segments[0].log)}
    members = [members_of(rounds[0], generations, {}), members_of(rounds[1], generations, logs)]
    words = told(ReplayOrder(rounds, generations, members))
    kept, went_on = place(words, "keep T 0", "resume Q 0")
    assert words.index("load T 1") < kept < went_on < words.index("compute a2 PQ")
    assert words.count("keep T 0") == words.count("resume Q 0") == 2, "each heir has it"


def test_a_fork_begins_with_the_record_and_the_inner_states_of_its_first_checkpoint() -> None:
    first = generation(1, "T", "L0 L4 I1 PT+a0 PT+a1 a0 a1")
    heir = generation(2, "Q", "L4 ST +a0 +a1 a0 a1", earlier=[first])
    generations = [generation(0, "P", "L0 L4 I0 +a0 +a1 a0 a1 L5"), first, heir]
    rounds = [record(5, ["P"], ["Q"])]
    words = told(ReplayOrder(rounds, generations, [members_of(rounds[0], generations, {})], base_round=4))
    inherited, kept, went_on = place(words, "inherit T 1", "keep T 0", "resume Q 0")
    assert words.index("load T 4") < inherited < kept < went_on
    assert words.index("load P 4") < words.index("inherit P 0") < words.index("compute a0 PQ")
    assert words[-1] == "average 5"


def test_a_life_that_goes_on_from_one_that_is_not_there_is_refused() -> None:
    first = generation(1, "Q", "L0 +a0 a0")
    with pytest.raises(RecordRejected, match="copy it"):
        generation(2, "Q", "L0 S2", earlier=[first])


@pytest.mark.parametrize("sizes", [(), (2,), (1, 1), (1, 0)])
def test_a_log_whose_microbatches_are_not_the_samples_of_their_step_is_refused(sizes: tuple[int, ...]) -> None:
    began = Began(key("a0"), (PeerId("P"), PeerId("Q")), (SampleRange(0, 0, 1),), sizes, sizes)
    with pytest.raises(RecordRejected, match=r"log of P .* has 1 samples in microbatches of"):
        generation_of(0, PeerId("P"), 0, PLACE, [Loaded(0, HASHES), began])
