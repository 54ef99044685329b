"""What a client sees of its trainers and its data server, beside what is lost and what is counted."""

from __future__ import annotations

from logging import ERROR, WARNING

from shoal.events.base import Event
from shoal.ids import PeerId


class TrainerStale(Event, frozen=True, tag="trainer.stale"):
    """A trainer has said hello whose slot has another one: it belongs to an earlier start, or is none of this run."""

    level = WARNING
    peer: PeerId
    slot: int
    generation: int


class TrainersSilent(Event, frozen=True, tag="trainer.silent"):
    """Trainers were started and have not said hello in time; the round goes on without them."""

    level = WARNING
    slots: tuple[int, ...]
    waited_s: float


class TrainerWithoutPath(Event, frozen=True, tag="trainer.no_path"):
    """A trainer finds no server that answers in some stages."""

    level = WARNING
    slot: int
    stages: tuple[int, ...]


class StepRefused(Event, frozen=True, tag="step.refused"):
    """Servers of a stage refuse a trainer's step, again and again. It is tried again, at most a minute later and when
    servers come or go. Where no step is committed for five minutes, a run of one host has failed; at once where a model
    of one's own fails at all of them. One that other hosts may join waits for a server that can, until someone ends it.

    Attributes:
        refusal: of the last server that was asked.
    """

    level = WARNING
    why = "the model fails on these samples, or no server has the memory for them"
    do = "the log of a server of that stage has where it failed (step.failed): mend the model or the data, start again"
    says = "servers refuse the next step of trainer {slot}, which waits: {refusal}"
    slot: int
    refusal: str


class TrainerFenced(Event, frozen=True, tag="trainer.fenced"):
    """Every live server refuses a lost trainer from now on, and has said what it had done.

    Attributes:
        lowest: the lowest generation of the slot that they do not refuse.
        committed: steps that it has committed in the round.
        in_doubt: steps that it may have committed.
        complete: nothing else of it can turn up.
    """

    slot: int
    lowest: int
    committed: int
    in_doubt: int
    complete: bool
    after_s: float


class TrainerReplaced(Event, frozen=True, tag="trainer.replaced"):
    """The next trainer of a slot goes on where the lost one has stopped."""

    slot: int
    generation: int
    next_step: int


class TrainerNotReplaced(Event, frozen=True, tag="trainer.not_replaced"):
    """The next trainer of a slot could not be started: the slot does no more steps in this round."""

    level = ERROR
    why = "its host cannot start a process, or the process was started and has said nothing in time"
    says = "trainer {slot} could not be replaced ({reason}): it does no more steps in this round"
    slot: int
    reason: str


class TrainerGivenUp(Event, frozen=True, tag="trainer.given_up"):
    """A slot has lost too many trainers in one round, and does no more steps in it."""

    level = ERROR
    why = "each of its processes has ended or was frozen: its log in the run's folder says more"
    says = "trainer {slot} was lost again after {starts} replacements in this round: it does no more steps in it"
    slot: int
    starts: int


class ReportOfStranger(Event, frozen=True, tag="report.stranger"):
    """A peer has reported for a slot whose trainer it is not; its report is ignored."""

    level = WARNING
    peer: PeerId
    slot: int


class DataServerFrozen(Event, frozen=True, tag="data_server.frozen"):
    """The data server can be dialled and does not answer, so its launcher is asked for another one."""

    level = WARNING
    waited_s: float
