"""Samples: the data set, leases, and those who prepare batches."""

from __future__ import annotations

from logging import WARNING

from shoal.events.base import Event


class DatasetOpened(Event, frozen=True, tag="dataset.opened"):
    """The data server has opened the data set."""

    dataset: str
    num_train: int
    num_holdout: int


class DataServerDialledAgain(Event, frozen=True, tag="data_server.dialled_again"):
    """A trainer dials the lost data server, says what it holds, and asks again for what is missing."""

    held: int
    waiting: int


class LeaseDenied(Event, frozen=True, tag="lease.denied"):
    """A trainer gets no batch for a step."""

    round: int
    step: int
    reason: str


class SamplesRecorded(Event, frozen=True, tag="samples.recorded"):
    """The data server knows which samples the record of a round has trained; leases of others have ended."""

    round: int
    leases_ended: int


class TrainerReleased(Event, frozen=True, tag="trainer.released"):
    """The leases of a dead trainer have ended."""

    trainer: int
    leases: int


class TrainerResumed(Event, frozen=True, tag="trainer.resumed"):
    """A trainer has told a data server that was started again what it has leased."""

    trainer: int
    leases: int


class DataWorkerDied(Event, frozen=True, tag="data_worker.died"):
    """A process that prepares batches has died; another one takes its place."""

    level = WARNING
    index: int
    pid: int
    status: str
