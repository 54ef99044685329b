"""What a model of the user's own would raise anywhere is told from what another machine may not."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from shoal.pipeline.model_mistake import is_of_model
from shoal.pipeline.out_of_memory import DEVICE_ERRORS


def _raised(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except DEVICE_ERRORS as error:
        return error
    raise AssertionError("nothing was raised")


def _raises(error: BaseException) -> Callable[[], object]:
    def raise_it() -> None:
        raise error

    return raise_it


def _of_another(first: BaseException, then: BaseException) -> Callable[[], object]:
    def raise_it() -> None:
        try:
            raise first
        except type(first):
            raise then  # noqa: B904 - as users do

    return raise_it


def _asserts() -> None:
    assert not torch.ones(1).any(), "no ones"


def _unknown_name() -> None:
    no_such_name  # type: ignore[name-defined] # noqa: B018, F821


NONE: Any = None

MISTAKES: dict[str, Callable[[], object]] = {
    "what it raises": _raises(ValueError("odd")),
    "a RuntimeError": _raises(RuntimeError("never")),
    "what is to be written yet": _raises(NotImplementedError()),
    "an assertion": _asserts,
    "a name": _unknown_name,
    "a key": lambda: {}["x"],
    "None": lambda: NONE.shape,
    "an argument": lambda: F.relu(),  # type: ignore[call-arg]
    "shapes": lambda: F.linear(torch.ones(2, 3), torch.ones(4, 5)),
    "sizes": lambda: torch.ones(3) + torch.ones(4),
    "a view": lambda: torch.ones(7).view(2, 3),
    "channels": lambda: F.conv2d(torch.ones(1, 3, 8, 8), torch.ones(2, 4, 3, 3)),
    "dtypes": lambda: F.linear(torch.ones(2, 3), torch.ones(4, 3, dtype=torch.float64)),
    "an index": lambda: F.embedding(torch.tensor([9]), torch.ones(2, 2)),
}


@pytest.mark.parametrize("call", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_of_the_model_is_one(call: Callable[[], object]) -> None:
    assert is_of_model(_raised(call))


OTHERS: dict[str, Callable[[], object]] = {
    "memory of a GPU": _raises(torch.OutOfMemoryError("CUDA out of memory.")),
    "memory of the CPU": lambda: torch.empty(2**60, dtype=torch.uint8),
    "memory of Python": _raises(MemoryError()),
    "CUDA": _raises(torch.AcceleratorError("CUDA error: an illegal memory access was encountered")),
    "CUDA, as it was": _raises(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")),
    "cuDNN": _raises(RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED, of this shape")),
    "another device": lambda: torch.ones(1).cuda(),
    "tensors of two devices": lambda: torch.ones(2) + torch.ones(2, device="meta"),
    "a disk": _raises(OSError(errno.ENOSPC, "No space left on device")),
    "a file": lambda: open("/no/such/file"),  # noqa: SIM115
    "a connection": _raises(ConnectionResetError()),
    "time": _raises(TimeoutError()),
    "what is not installed": _raises(ModuleNotFoundError("No module named 'flash_attn'")),
    "what torch has not on this device": lambda: torch.linalg.cholesky(torch.eye(2, dtype=torch.half)),
    "what torch has not of this type": lambda: torch.fft.fft(torch.ones(3, dtype=torch.half)),
    "an error made of one of memory": _of_another(MemoryError(), RuntimeError("too large")),
    "an error made of one of an import": _of_another(ImportError("flash_attn"), ValueError("no attention")),
}


@pytest.mark.parametrize("call", OTHERS.values(), ids=OTHERS.keys())
def test_what_a_machine_may_be_the_cause_of_is_none(call: Callable[[], object]) -> None:
    assert not is_of_model(_raised(call))


def test_what_nothing_of_the_users_own_has_raised_is_none() -> None:
    assert not is_of_model(ValueError("odd"))
