"""What torch says of GPUs in a process of its own; a module in its place says what this machine cannot."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from shoal.server.visible_gpus import VisibleGpus, answer_of

PROGRAM = "shoal.server.visible_gpus"
LONG_S = 120.0
WITH_GPUS = """
import os, types, warnings
__version__ = "9.9+cu999"
version = types.SimpleNamespace(cuda="99.9", hip=None)
backends = types.SimpleNamespace(mps=types.SimpleNamespace(is_available=lambda: False))
_ALL = ["Big GPU", "Small GPU"]
_seen = [int(index) for index in os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",") if index]
cuda = types.SimpleNamespace(device_count=lambda: len(_seen), get_device_name=lambda index: _ALL[_seen[index]])
print("torch is chatty")
"""
OLD_DRIVER = """
def _fail(index):
    raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\\nPlease update it.")
cuda.get_device_name = _fail
"""
ON_A_MAC = """
backends.mps.is_available = lambda: True
cuda.device_count = lambda: 0
device = lambda name: types.SimpleNamespace(type=name)
"""
NO_DEVICE = """
def _none():
    warnings.warn("CUDA initialization: no CUDA-capable device is detected")
    return 0
cuda.device_count = _none
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the module that the asked process finds as torch."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "torch.py"


def test_the_torch_of_this_host_is_asked_and_this_process_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = answer_of(PROGRAM, LONG_S)
    assert found.torch == torch.__version__
    assert len(found.names) == torch.cuda.device_count()
    if torch.version.cuda is None and torch.version.hip is None:
        assert found == VisibleGpus(torch.__version__, reason="it is built for CPUs alone")


@pytest.mark.parametrize(
    ("visible", "names"), [(None, ("Big GPU", "Small GPU")), ("1,0", ("Small GPU", "Big GPU")), ("1", ("Small GPU",))]
)
def test_gpus_are_named_as_torch_counts_them(
    visible: str | None, names: tuple[str, ...], stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.write_text(WITH_GPUS)
    hiding: tuple[str, ...] = ()
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        hiding = (f"CUDA_VISIBLE_DEVICES={visible}",)
    assert answer_of(PROGRAM, LONG_S) == VisibleGpus("9.9+cu999", names, hiding)


def test_the_gpu_of_a_mac_is_named_where_torch_has_one(stand_in: Path) -> None:
    stand_in.write_text(WITH_GPUS + ON_A_MAC)
    assert answer_of(PROGRAM, LONG_S) == VisibleGpus("9.9+cu999", mps="Apple GPU")


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (OLD_DRIVER, "The NVIDIA driver on your system is too old (found version 11040)."),
        (NO_DEVICE, "CUDA initialization: no CUDA-capable device is detected"),
    ],
    ids=["old driver", "no device"],
)
def test_why_torch_cannot_use_a_gpu_is_said_in_its_words(more: str, reason: str, stand_in: Path) -> None:
    stand_in.write_text(WITH_GPUS + more)
    assert answer_of(PROGRAM, LONG_S) == VisibleGpus("9.9+cu999", reason=reason)


@pytest.mark.parametrize(
    ("broken", "patience_s", "reason"),
    [
        ("raise ImportError('libcudart.so.99: cannot open')", LONG_S, "ImportError: libcudart.so.99: cannot open"),
        ("import os; os.kill(os.getpid(), 11)", LONG_S, "it ended with exit code -11"),
        ("import threading; threading.Event().wait()", 0.5, "it did not say within 0.5 s which GPUs there are"),
    ],
    ids=["does not load", "crashes", "hangs"],
)
def test_a_torch_that_gives_no_answer_has_no_gpus_and_the_reason_is_said(
    broken: str, patience_s: float, reason: str, stand_in: Path
) -> None:
    stand_in.write_text(broken)
    assert answer_of(PROGRAM, patience_s) == VisibleGpus(version("torch"), reason=reason)
