"""A data set whose samples hang, fail or kill whoever prepares them, as their test says; opened in data workers too."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import msgspec
import numpy as np

from shoal.data.fields import Fields
from shoal.data.source import Array, ArraySpec, DataSet, Indices, Source
from shoal.data.worker_messages import Opening
from shoal.errors import ConfigError


class Trap(msgspec.Struct, frozen=True):
    """What the data set does besides giving numbers; samples by index, -1 for none.

    Attributes:
        fails: reading it raises.
        kills: reading it kills the process, after half of the batch has been written as rubbish.
        once: the file that is removed by a killing, which does not happen without it; empty: it always happens.
        stops: reading it stops the process, after half of the batch has been written as rubbish.
        left: the file that has how often processes are to be stopped yet.
        hangs: reading it takes for ever.
        unopened: opening the data set in a worker fails ("error"), kills it ("kill") or stops it ("stop").
    """

    num_samples: int = 50
    fails: int = -1
    kills: int = -1
    once: str = ""
    stops: int = -1
    left: str = ""
    hangs: int = -1
    unopened: str = ""

    def opening(self) -> Opening:
        return Opening(f"{__name__}:open_trapped", msgspec.msgpack.encode(self))


class Trapped(Source):
    """Sample i is (i, i + 1, ... i + 4) with label `first` + i."""

    inputs = ArraySpec("float32", (5,))
    labels = ArraySpec("int64", ())

    def __init__(self, trap: Trap, num_samples: int, first: int = 0) -> None:
        self._trap = trap
        self._num_samples, self._first = num_samples, first

    @property
    def num_samples(self) -> int:
        return self._num_samples

    def read_into(self, indices: Indices, batch: Fields[Array]) -> None:
        trap = self._trap
        if trap.fails in indices:
            raise ValueError("broken picture")
        if trap.kills in indices:
            self._kill(batch.inputs)
        if trap.stops in indices:
            batch.inputs[: len(indices) // 2] = -7
            stop(trap)
        if trap.hangs in indices:
            threading.Event().wait()
        batch.inputs[...] = indices[:, None] + np.arange(5)
        batch.labels[...] = indices + self._first

    def _kill(self, inputs: Array) -> None:
        once = self._trap.once
        if once and not Path(once).exists():
            return
        inputs[: len(inputs) // 2] = -7
        if once:
            Path(once).unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def stop(trap: Trap) -> None:
    """Stop this process, unless that was done as often as it is to be."""
    left = int(Path(trap.left).read_text())
    if left:
        Path(trap.left).write_text(str(left - 1))
        os.kill(os.getpid(), signal.SIGSTOP)


def trapped(trap: Trap) -> DataSet:
    """Return the data set without opening it as a worker does."""
    return DataSet("trapped", Trapped(trap, trap.num_samples), Trapped(Trap(), 30, 1000), num_classes=2000)


def open_trapped(payload: bytes) -> DataSet:
    """Open the data set in a worker."""
    trap = msgspec.msgpack.decode(payload, type=Trap)
    if trap.unopened == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if trap.unopened == "stop":
        stop(trap)
    if trap.unopened == "error":
        raise ConfigError("data.dataset_name = trapped is gone")
    return trapped(trap)
