"""Which GPUs torch can use on this host. A process of its own is asked, so that the launcher loads no torch.

    visible_gpus() -> python -m shoal.server.visible_gpus -> torch.cuda -> VisibleGpus

The answer is what the servers of this host will find: with CUDA_VISIBLE_DEVICES, with GPUs of AMD, and with a torch
that has no code for the GPUs that are there.
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from importlib.metadata import version

import msgspec

from shoal.errors import ChildDied, DeadlineExceeded
from shoal.runtime.child import Parent, ask

_PATIENCE_S = 120.0
"""Longer than torch takes to load on a busy machine. A damaged driver may never answer."""
_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_MAX_REASON = 300


class GpusAsked(msgspec.Struct, frozen=True):
    """The question."""


class VisibleGpus(msgspec.Struct, frozen=True, tag=True):
    """What torch can use.

    Attributes:
        names: of the GPUs; the first is cuda:0.
        hiding: environment variables that hide GPUs from torch, as "NAME=value".
        reason: torch's own reason why it can use none; empty if it gives none.
        mps: the name of Apple's GPU; empty: there is none. "auto" never means it.
    """

    torch: str
    names: tuple[str, ...] = ()
    hiding: tuple[str, ...] = ()
    reason: str = ""
    mps: str = ""

    def __str__(self) -> str:
        """Say it in words: "torch 2.11.0+cu130 sees 1 GPU (cuda:0 NVIDIA H200)"."""
        if self.names:
            listed = ", ".join(f"cuda:{index} {name}" for index, name in enumerate(self.names))
            count = f"{len(self.names)} GPU{'s' if len(self.names) > 1 else ''} ({listed})"
        elif self.mps:
            count = f"1 GPU (mps {self.mps})"
        else:
            count = f"no GPU ({self.reason})" if self.reason else "no GPU"
        hiding = f" with {' '.join(self.hiding)}" if self.hiding else ""
        return f"torch {self.torch} sees {count}{hiding}"


@cache
def visible_gpus() -> VisibleGpus:
    """Ask torch in a process of its own; once, since the answer stays the same while this process lives.

    Raises:
        OSError: the system refuses another process.
    """
    return answer_of(__name__, _PATIENCE_S)


def answer_of(module: str, patience_s: float) -> VisibleGpus:
    """Have the process `module` answer. One that gives no answer has no GPUs, and the reason is said.

    Raises:
        OSError: the system refuses another process.
    """
    try:
        return ask(module, GpusAsked(), VisibleGpus, within_s=patience_s)
    except DeadlineExceeded:
        reason = f"it did not say within {patience_s:g} s which GPUs there are"
    except ChildDied as died:
        said = [line.strip()[:_MAX_REASON] for line in died.lines if line.strip()]
        reason = said[-1] if said else f"it ended with exit code {died.code}"
    return VisibleGpus(version("torch"), reason=reason)


def _look() -> VisibleGpus:
    """Ask torch in this process."""
    import torch

    from shoal.model.device_calls import name_of

    version_of_torch = str(torch.__version__)
    hiding = tuple(f"{name}={os.environ[name]}" for name in _HIDING if name in os.environ)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            names = tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        except RuntimeError as error:
            # There are GPUs, and CUDA cannot be used: torch is newer than the driver, or somebody else has the GPU.
            return VisibleGpus(version_of_torch, (), hiding, _first_line(error))
    if torch.backends.mps.is_available():
        return VisibleGpus(version_of_torch, names, hiding, mps=name_of(torch.device("mps")) or "")
    reason = "" if names or not said else _first_line(said[-1].message)
    if torch.version.cuda is None and torch.version.hip is None:
        reason = "it is built for CPUs alone"
    return VisibleGpus(version_of_torch, names, hiding, reason)


def _first_line(error: BaseException | str) -> str:
    return str(error).partition("\n")[0][:_MAX_REASON]


if __name__ == "__main__":
    with Parent(GpusAsked) as launcher:
        for _ in launcher.orders:
            launcher.say(_look())
