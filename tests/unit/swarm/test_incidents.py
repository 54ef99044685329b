"""Each kind of loss from its first sign to its end, and what it cost."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import msgspec
import pytest

from shoal.events.base import Event
from shoal.events.incidents import (
    Cause,
    IncidentClosed,
    IncidentOpened,
    LossExplained,
    LostSteps,
    StepsLost,
    TroubleOver,
    TroubleSeen,
)
from shoal.events.losses import (
    ClientReplaced,
    DataServerBack,
    DataServerLost,
    LossFound,
    ServerBack,
    ServerHeard,
    ServerLeaving,
    ServerLost,
    TrainerLost,
    TrainerReady,
    TrainingGoesOn,
)
from shoal.events.run import RoundBegun, StepReported
from shoal.events.stages import ChainLost, StageBeganAnew
from shoal.ids import PeerId
from shoal.swarm.incidents import Incident, Incidents, LostStep, steps_lost_by

A, B = PeerId("a"), PeerId("b")


def server_lost(peer: PeerId, at_s: float, *slots: int, silent_s: float = 0.0, stage: int = 0) -> ServerLost:
    return ServerLost(peer, f"server {peer}", stage, silent_s, "", (), slots, at_s)


def step(slot: int, at_s: float, attempt: int = 0) -> StepReported:
    return StepReported(slot, 0, attempt, 4, 4, 1.0, False, 0.5, at_s)


def own(round: int, stage: int, peer: PeerId) -> LostStep:
    """It is not in the record of its own round."""
    return LostStep(round, stage, peer, round)


def after(*events: Event) -> Incidents:
    incidents = Incidents()
    for event in events:
        incidents.apply(event)
    return incidents


def times(incident: Incident) -> tuple[float, float, float | None, float | None]:
    return incident.began_s, incident.noticed_s, incident.recovered_s, incident.back_s


STORIES: dict[str, tuple[list[Event], str, tuple[float, float, float | None, float | None]]] = {
    "a server that was killed": (
        [
            server_lost(A, 10.0, 0, 2),
            step(1, 10.5),
            step(0, 11.0),
            step(2, 12.5),
            step(2, 13.0),
            ServerHeard(A, "", 3.0),
            ServerBack(A, "", 0, 5.0, 15.0),
        ],
        "server",
        (10.0, 10.0, 12.5, 15.0),
    ),
    "a server that was frozen": (
        [server_lost(A, 10.0, 0, silent_s=2.0), step(0, 10.25)],
        "server",
        (8.0, 10.0, 10.25, None),
    ),
    "a server that no trainer used": ([server_lost(A, 3.0)], "server", (3.0, 3.0, 3.0, None)),
    "a trainer": (
        [TrainerLost(1, 0.0, "", 1.0), TrainerReady(1, 2, 2.0), step(1, 4.0)],
        "trainer",
        (1.0, 1.0, 4.0, 2.0),
    ),
    "a frozen trainer": ([TrainerLost(1, 0.5, "", 1.0), TrainerReady(0, 2, 2.0)], "trainer", (0.5, 1.0, None, None)),
    "the data server": (
        [DataServerLost((0, 1), 1.0), step(0, 1.5), DataServerBack(1, 2.0), step(1, 3.0)],
        "data_server",
        (1.0, 1.0, 3.0, 2.0),
    ),
    "the client": (
        [LossFound("client", "", (0,), 5.0, 6.0), step(0, 4.9), step(0, 5.5)],
        "client",
        (5.0, 5.0, 5.5, 6.0),
    ),
    "a trainer while there was no client": (
        [LossFound("trainer", "", (1,), 5.0, 6.0), TrainerReady(1, 2, 7.0), step(1, 8.0)],
        "trainer",
        (5.0, 5.0, 8.0, 7.0),
    ),
    "a server while there was no client": (
        [LossFound("server", "", (), 5.0, 6.0, A), ServerHeard(A, "", 2.0), ServerBack(A, "", 0, 4.0, 9.0)],
        "server",
        (5.0, 5.0, 5.0, 9.0),
    ),
    "the data server while there was no client": (
        [LossFound("data_server", "", (0,), 5.0, 6.0), DataServerBack(1, 7.0), step(0, 7.5)],
        "data_server",
        (5.0, 5.0, 7.5, 7.0),
    ),
}


@pytest.mark.parametrize("story", STORIES)
def test_a_loss_is_told_from_its_first_sign_to_its_end(story: str) -> None:
    events, kind, expected = STORIES[story]
    [incident] = after(*events).all
    assert (incident.kind, times(incident)) == (kind, expected)


@pytest.mark.parametrize("story", STORIES)
def test_a_machine_that_is_written_down_anywhere_goes_on_as_if_it_had_not_been(story: str) -> None:
    events, _, _ = STORIES[story]
    for number in range(len(events)):
        written = msgspec.msgpack.encode(after(*events[:number]))
        again = msgspec.msgpack.decode(written, type=Incidents)
        for event in events[number:]:
            again.apply(event)
        assert again == after(*events)


def test_losses_are_kept_apart_and_in_order() -> None:
    incidents = after(TrainerLost(1, 0.0, "", 1.0), server_lost(A, 2.0, 1), step(1, 4.0))
    assert [(each.kind, each.recovered_s) for each in incidents.all] == [("trainer", 4.0), ("server", 4.0)]


def test_a_server_is_missing_until_it_is_heard_and_returns_until_it_takes_part() -> None:
    incidents = after(server_lost(A, 1.0))
    assert (incidents.is_missing(A), incidents.is_missing(B), incidents.returning()) == (True, False, set())
    incidents.apply(ServerHeard(A, "", 1.0))
    assert (incidents.is_missing(A), incidents.returning()) == (False, {A})
    incidents.apply(server_lost(A, 4.0, silent_s=1.0))
    assert (incidents.is_missing(A), incidents.began_s(A)) == (True, 1.0)
    incidents.apply(ServerHeard(A, "", 6.0))
    incidents.apply(ServerBack(A, "", 0, 8.0, 9.0))
    assert (incidents.is_missing(A), incidents.returning()) == (False, set())
    assert [each.back_s for each in incidents.all] == [9.0, 9.0]


def is_known(incidents: Incidents, *found: LossFound) -> bool:
    return not incidents.unknown(found, within_s=1.0)


def test_a_loss_is_known_by_who_it_was_and_its_time() -> None:
    incidents = after(server_lost(A, 10.0))
    ended = partial(LossFound, "server", "", (), found_s=20.0)
    assert is_known(incidents, ended(9.5, peer=A)), "it was noticed a moment later"
    assert not is_known(incidents, ended(8.5, peer=A))
    assert is_known(incidents, ended(15.0, peer=A)), "it was silent before it ended, and is away"
    assert not is_known(incidents, ended(10.0, peer=B))
    assert not is_known(incidents, LossFound("client", "", (), 10.0, 12.0))
    incidents.apply(ServerHeard(A, "", 4.0))
    incidents.apply(ServerBack(A, "", 0, 4.0, 14.0))
    assert not is_known(incidents, ended(15.0, peer=A)), "it was back"


def test_who_has_ended_twice_while_nobody_was_there_to_see_it_back_is_lost_twice() -> None:
    incidents = after(DataServerLost((), 10.0, 0.0, ""))
    first, second = (LossFound("data_server", "", (), at_s, 20.0) for at_s in (10.0, 13.0))
    assert incidents.unknown([second, first], within_s=1.0) == [second]


def test_each_end_of_a_client_is_known_by_itself() -> None:
    incidents = after(LossFound("client", "", (), 10.0, 12.0))
    assert is_known(incidents, LossFound("client", "", (), 10.0, 20.0))
    assert not is_known(incidents, LossFound("client", "", (), 10.25, 20.0))


def test_a_client_has_made_no_step_begin_again() -> None:
    incidents = after(LossFound("client", "", (0,), 1.0, 2.0), server_lost(A, 1.5, 0), step(0, 3.0, attempt=1))
    assert [each.replayed for each in incidents.all] == [0, 1]


def test_the_first_step_of_each_slot_says_for_how_long_it_had_none_and_what_was_begun_again() -> None:
    incidents = after(step(0, 2.8), server_lost(A, 5.1, 0, 1, silent_s=2.1))
    assert incidents.apply(step(0, 5.0)) == []
    assert incidents.apply(step(0, 5.5, attempt=2)) == [TrainingGoesOn(0, 2.2, ("server a",))]
    assert incidents.apply(step(0, 5.6, attempt=1)) == []
    assert incidents.apply(step(1, 6.0, attempt=1)) == [TrainingGoesOn(1, 3.0, ("server a",))]
    assert incidents.all[0].replayed == 2, "a step that is begun often is one step"


def test_a_round_is_that_of_the_training_also_while_the_last_record_is_evaluated() -> None:
    incidents = after(RoundBegun(4, 8, 1, 1, 2), RoundBegun(5, 0, 1, 1, 2), server_lost(A, 1.0))
    assert incidents.all[0].round == 4


def test_a_step_is_lost_with_the_server_that_has_computed_it() -> None:
    incidents = after(
        RoundBegun(1, 8, 1, 1, 2),
        server_lost(A, 1.0),
        TrainerLost(0, 0.0, "", 1.5),
        RoundBegun(2, 8, 1, 1, 2),
        server_lost(B, 2.0),
        server_lost(A, 3.0),
    )
    lost = [own(1, 0, A), own(1, 0, A), own(2, 0, A), own(2, 0, B), own(1, 0, B)]
    assert steps_lost_by(incidents.all, lost) == ([2, 0, 1, 1], 1)


def test_the_rounds_of_a_stage_that_starts_again_are_lost_with_its_last_server() -> None:
    incidents = after(
        RoundBegun(1, 8, 1, 1, 2),
        server_lost(A, 1.0, stage=1),
        RoundBegun(3, 8, 1, 1, 2),
        server_lost(B, 2.0, stage=1),
        server_lost(A, 2.0, stage=0),
        StageBeganAnew(1, 4, 1, "p"),
        RoundBegun(5, 8, 1, 1, 2),
        server_lost(A, 3.0, stage=1),
    )
    lost = [LostStep(2, 1, A, 4), LostStep(3, 1, B, 4), own(2, 1, B), own(2, 0, B)]
    assert steps_lost_by(incidents.all, lost) == ([0, 2, 0, 0], 2)


def test_what_a_stage_has_lost_that_begins_anew_is_not_put_down_to_a_loss_whose_end_was_told() -> None:
    over = (RoundBegun(3, 8, 1, 1, 2), server_lost(A, 10.0, stage=1), ServerHeard(A, "", 0.0))
    over = (*over, ServerBack(A, "", 1, 0.0, 10.0), StepsLost(3, ()))
    incidents = after(*over, RoundBegun(5, 8, 1, 1, 2), StageBeganAnew(1, 5, 2, "p"))
    assert incidents.all[0].is_closed
    assert not incidents.wants_costs
    assert steps_lost_by(incidents.all, [LostStep(3, 1, A, 5), LostStep(4, 1, A, 5)]) == ([0], 2)


def told(*events: Event) -> list[Event]:
    incidents = Incidents()
    return [following for event in events for following in incidents.apply(event)]


def test_what_was_lost_is_told_when_it_is_noticed_and_when_it_is_back_and_its_cost_is_recorded() -> None:
    begun = (RoundBegun(3, 8, 1, 1, 2), server_lost(A, 10.0, 0, silent_s=2.0))
    back = (ServerHeard(A, "", 4.0), LossExplained(A, Cause.FROZEN), ServerBack(A, "", 0, 5.0, 13.0))
    recorded = StepsLost(3, (LostSteps(3, 0, A, 4), LostSteps(3, 1, B, 1)))
    [opened, goes_on] = told(*begun, step(0, 10.5, attempt=2), *back)
    assert isinstance(opened, IncidentOpened)
    assert (opened.number, opened.kind, opened.cause, opened.round) == (1, "server", Cause.SILENT, 3)
    assert (opened.noticed_after_s, opened.stage) == (2.0, 0)
    assert isinstance(goes_on, TrainingGoesOn)
    *_, closed = told(*begun, step(0, 10.5, attempt=2), *back, recorded, step(0, 14.0))
    assert closed == IncidentClosed(1, "server", Cause.FROZEN, "server a", "", 0, 3, 2.0, 2.5, 5.0, 4, 1, 1)
    assert closed.say() == (
        "server a was frozen: noticed after 2.0 s, training went on after 2.5 s, back after 5.0 s; "
        "4 steps of stage 0 lost, 1 begun again"
    )


def test_what_is_open_when_the_run_ends_is_told_then_with_what_the_audit_has_found() -> None:
    incidents = after(server_lost(A, 1.0, 0), TrainerLost(0, 0.0, "", 2.0, "box"))
    first, second = incidents.end([3, 0])
    assert (
        first.say()
        == "server a had ended: noticed at once, no step since, not back when the run ended; 3 steps of stage 0 lost"
    )
    assert (
        second.say()
        == "trainer 0@box had ended: noticed at once, no step since, not back when the run ended; no step lost"
    )
    assert incidents.end([3, 0]) == []


def test_a_server_that_leaves_is_no_loss_until_it_has_gone_and_is_told_as_one_that_left() -> None:
    leaving = ServerLeaving(A, "server 1@box", "box", 0, 5.0)
    incidents = after(leaving, leaving)
    assert (incidents.is_missing(A), incidents.returning(), incidents.wants_costs) == (False, set(), False)
    assert incidents.apply(server_lost(A, 6.5, 0)) == []
    assert incidents.is_missing(A)
    incidents.apply(step(0, 7.0))
    [closed] = incidents.apply(StepsLost(1, ()))
    assert isinstance(closed, IncidentClosed)
    assert closed.say() == (
        "server 1@box has left: noticed at once, training went on after 2.0 s, gone after 1.5 s; no step lost"
    )


def test_a_server_that_wanted_to_leave_and_is_there_when_the_run_ends_has_not_left() -> None:
    [closed] = after(ServerLeaving(A, "server 1@box", "box", 0, 5.0)).end([0])
    assert closed.say() == (
        "server 1@box wanted to leave: noticed at once, no trainer was hit, still there when the run ended; "
        "no step lost"
    )


def test_a_slot_that_has_no_pipeline_since_a_server_left_is_waited_for_no_longer_than_a_whole_round() -> None:
    begun, leaving = RoundBegun(4, 8, 2, 2, 4), ServerLeaving(A, "server 1@box", "box", 0, 5.0)
    incidents = after(begun, step(0, 4.0), step(1, 4.5), leaving, server_lost(A, 6.0, 1), StepsLost(4, ()))
    # In the next round it may be a slow one.
    for event in (RoundBegun(5, 8, 1, 2, 2), step(0, 8.0)):
        assert incidents.apply(event) == []
    assert incidents.apply(RoundBegun(6, 8, 1, 2, 2)) == []
    [closed] = incidents.apply(step(0, 10.0))
    assert isinstance(closed, IncidentClosed)
    assert closed.say() == (
        "server 1@box has left: noticed at once, training went on after 5.0 s, gone after 1.0 s; no step lost"
    )


def test_trouble_is_told_once_and_is_over_when_it_is_said_or_its_server_is_lost() -> None:
    seen = TroubleSeen("server", Cause.DISK, A, "server 1@box", "box", "it is full", 1.0, 1.5)
    [opened] = told(seen, seen)
    assert isinstance(opened, IncidentOpened)
    assert opened.say() == "it is full"
    [_, closed] = told(seen, TroubleOver(Cause.MEMORY, A, 2.0), TroubleOver(Cause.DISK, A, 4.0))
    assert isinstance(closed, IncidentClosed)
    assert closed.say() == "server 1@box could not write to its disk: over after 3.0 s"
    [_, lost, over] = told(seen, server_lost(A, 5.0, 0))
    assert (type(lost), type(over)) == (IncidentOpened, IncidentClosed)


def test_two_sides_that_meet_and_a_client_whose_place_is_taken_are_over_with_the_next_step_of_anybody() -> None:
    chains = ChainLost(5, "ab", 3, 40, 6, 7, "cd", 20.0)
    [_, apart, goes_on, closed] = told(server_lost(A, 10.0, 0, silent_s=2.0), chains, step(0, 21.0))
    assert isinstance(apart, IncidentOpened)
    assert (apart.kind, apart.cause, apart.noticed_after_s) == ("swarm", Cause.SPLIT, 12.0)
    assert isinstance(goes_on, TrainingGoesOn)
    assert isinstance(closed, IncidentClosed)
    assert closed.back_after_s == 13.0
    replaced = ClientReplaced(B, "client@box1", 1.5, 30.0, "box1")
    [_, over] = told(replaced, step(1, 33.0))
    assert isinstance(over, IncidentClosed)
    assert over.say() == (
        "client@box1 was lost, and this client goes on in its place: noticed after 1.5 s, "
        "training went on after 4.5 s; no step lost"
    )


def test_what_only_the_launcher_says_on_the_screen_is_in_the_file_all_the_same() -> None:
    [opened] = told(TrainerLost(1, 0.0, "", 1.0, "box1"))
    assert isinstance(opened, IncidentOpened)
    assert opened.say() == ""
    assert opened.fields()["says"] == (
        "trainer 1@box1 is gone: its connection has closed; its client replaces it, unless it was lost too often in "
        "this round"
    )


class _Put(list[Incident]):
    """What was put away, and is not looked through."""

    def __iter__(self) -> Iterator[Incident]:
        pytest.fail("a step has looked through all that ever happened")


def test_no_step_looks_at_what_is_over() -> None:
    lost = (server_lost(A, 1.0, 0), step(0, 2.0), ServerHeard(A, "", 1.0), ServerBack(A, "", 0, 2.0, 3.0))
    trouble = TroubleSeen("server", Cause.DISK, B, "server 1@box", "box", "it is full", 4.0, 4.0)
    incidents = after(*lost, StepsLost(1, ()), trouble, TroubleOver(Cause.DISK, B, 5.0))
    assert [each.is_closed for each in incidents.all] == [True, True]
    written = msgspec.msgpack.encode(incidents)
    for machine in (incidents, msgspec.msgpack.decode(written, type=Incidents)):
        machine.all = _Put(machine.all)
        again = [following for event in (step(0, 6.0), trouble, *lost) for following in machine.apply(event)]
        assert [each.number for each in again if isinstance(each, IncidentOpened)] == [3, 4]
        assert (machine.wants_costs, machine.returning(), machine.is_away("server", A)) == (True, set(), False)
