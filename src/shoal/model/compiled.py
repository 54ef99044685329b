"""A stage computed by code that `torch.compile` makes of it: the same on every replica, or not at all.

    compile_stage: trace -> C++ -> build (seconds to minutes) -> module.compute_by(...)

All of it happens before the first step: each size is run forward and backward once, so that nothing is left to compile
later. Where compiled code does not fit a call, torch would compile again or compute without it: at any time, on some
replicas only, and with other bits. A compiled stage fails instead.

Of one start for the next only libraries are kept, in files that are named by their C++ and the options of the compiler;
the servers of a host share them. Torch's own caches of what it has traced are pickles, and are off.
"""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Collection, Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.model.cpp_compiler import require_compiler
from shoal.model.seeding import seeded
from shoal.model.stage import StageModule, TensorSpec
from shoal.runtime.file_locks import locked

_COMPILERS = ("_dynamo", "_functorch", "_inductor")
_MANY = 1_000_000
_WORK = "work-"
_KEPT = frozenset({".so", ".gch"})


def compile_stage(module: StageModule, sizes: Collection[int], cache: Path) -> None:
    """Let a stage compute training microbatches of these sizes by compiled code from now on, and others as before.

    Parameters, buffers and torch's generators stay as they are.

    Args:
        module: On a CPU or a GPU, in training mode, and quantised if it will be. The call must run in the thread that
            will compute, with that thread's number of torch threads, because the code is made for them.
        sizes: Samples of a microbatch.
        cache: Folder of built libraries; is made if there is none.

    Raises:
        ConfigError: This host lacks something, or the stage cannot be compiled.
    """
    stage = f"model_pipeline.compile: stage {module.stage} of {module.num_stages}"
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"{stage}: only what runs on a CPU or a GPU can be compiled, not on {device}; use --device cpu"
        )
    require_compiler()
    parts = [module] if module.head is None else [module, module.head]
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{stage}: {cache} cannot be made ({error.strerror}); set XDG_CACHE_HOME to a folder that can be written"
        ) from None
    try:
        with _work_folder(cache, module.stage) as work, _torch_set_up(work, device):
            for part in parts:
                _compile_part(part, sizes, device)
    except Exception as error:  # torch raises all sorts of them, and the module may be anybody's code
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{stage} cannot be compiled: {reason[:600]}; train without compile") from error


def _compile_part(module: StageModule, sizes: Collection[int], device: torch.device) -> None:
    """Let a part of the stage compute by what torch compiles as it is first run with each size, here."""
    before = [buffer.clone() for buffer in module.buffers()]
    spec, *others = module.forward_specs
    forward = _compiled(module.computed)
    chunks = frozenset[int]().union(*map(module.chunk_sizes, sizes))
    loss = _compiled(module.computed_loss)
    with seeded(0, device):
        for size in sorted(sizes):
            received = _zeros(size, spec, device).requires_grad_(not module.is_first)
            context = [_zeros(size, each, device) for each in others]
            # The weight of a microbatch is no part of the code.
            with module.weighed(1.0):
                output = forward(received, *context)
            _differentiate(output, received, module)
        for size in sorted(chunks):
            received, labels = (_zeros(size, each, device) for each in module.chunk_specs)
            _differentiate(loss(received.requires_grad_(), labels), received, module)
    with torch.no_grad():
        for buffer, old in zip(module.buffers(), before, strict=True):
            buffer.copy_(old)
    module.compute_by(_as_it_is(forward), sizes)
    module.compute_loss_by(_as_it_is(loss), chunks)


def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # torch's own hint leaves open what it takes.
    return torch.compile(function, fullgraph=True, dynamic=False)  # pyright: ignore[reportUnknownMemberType]


def _as_it_is(compiled: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return what runs the code that is there: where torch would compile again, it fails."""

    def run(*taken: Tensor) -> Tensor:
        with torch.compiler.set_stance("fail_on_recompile"):
            return compiled(*taken)

    return run


def _zeros(num: int, spec: TensorSpec, device: torch.device) -> Tensor:
    return torch.zeros(num, *spec.shape, dtype=spec.torch_dtype, device=device)


def _differentiate(output: Tensor, received: Tensor, module: StageModule) -> None:
    if output.requires_grad:
        leaves = [leaf for leaf in (received, *module.parameters()) if leaf.requires_grad]
        torch.autograd.grad(output, leaves, torch.zeros_like(output), allow_unused=True)


@contextmanager
def _work_folder(cache: Path, stage: int) -> Generator[Path]:
    """A folder of this process with all that is kept, of which what is new is kept in the end.

    Only whole files come to be kept, whenever somebody is killed; what that one leaves is removed by the next. Replicas
    of a stage take turns, so that the second one finds what the first one has built.
    """
    kept = cache / "kept"
    with ExitStack() as stack:
        with locked(cache / "lock"):
            for left in cache.glob(f"{_WORK}*"):
                with suppress(BlockingIOError), locked(left / "lock", waits=False):
                    shutil.rmtree(left, ignore_errors=True)
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=_WORK, dir=cache)))
            stack.enter_context(locked(work / "lock"))
        stack.enter_context(locked(cache / f"stage-{stage}.lock"))
        _link(kept, work)
        yield work
        _link(work, kept)


def _link(source: Path, target: Path) -> None:
    """Has `target` hold the libraries and precompiled headers of `source`, if this file system can."""
    for path in source.rglob("*"):
        if path.suffix in _KEPT:
            place = target / path.relative_to(source)
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with suppress(OSError):
                os.link(path, place)


@contextmanager
def _torch_set_up(work: Path, device: torch.device) -> Generator[None]:
    """Inside, torch compiles in this process alone, and writes into this folder, and nowhere else."""
    temporary = work / "tmp"
    temporary.mkdir()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of torch's own code
        stack.enter_context(_environment(TORCHINDUCTOR_CACHE_DIR=str(work / "libraries"), TMPDIR=str(temporary)))
        stack.enter_context(_attributes(tempfile, tempdir=str(temporary)))
        # Imported only here: it takes seconds, and memory.
        dynamo, functorch, inductor = (importlib.import_module(f"torch.{name}.config") for name in _COMPILERS)
        # No processes of its own, which would outlive one that is killed. Images stay as they come: with them
        # turned a ResNet-18 took 1.16 times as long as uncompiled, and now 1.01.
        options: dict[str, object] = {"compile_threads": 1, "fx_graph_cache": False, "layout_optimization": False}
        if device.type == "cuda" and hasattr(inductor, "deterministic"):
            # On a GPU the fastest of several kernels would be chosen, and its bits with it, by every replica anew. What
            # is not measured is not padded, unless all is: a matrix of an odd width takes five times as long.
            options |= {"deterministic": True, "force_shape_pad": True}
        stack.enter_context(inductor.patch(options))
        stack.enter_context(functorch.patch({"enable_autograd_cache": False}))
        # Stages of a process share the code of `computed`; how often it is compiled is known.
        stack.enter_context(dynamo.patch({"recompile_limit": _MANY, "accumulated_recompile_limit": _MANY}))
        codecache = importlib.import_module("torch._inductor.codecache")
        # Two thirds of the time are saved by precompiled headers, of 150 MB, which torch puts into /tmp whatever it is
        # told, with a checksum made by openssl.
        precompiles = hasattr(codecache, "_HEADER_DIR") and shutil.which("openssl") is not None
        stack.enter_context(inductor.patch({"cpp_cache_precompile_headers": precompiles}))
        if precompiles:
            places = {"_HEADER_DIR": f"{work}/headers", "_HEADER_LOCK_DIR": f"{work}/headers/locks"}
            stack.enter_context(_attributes(codecache, **places))
        # What an earlier call has found was in another folder.
        importlib.import_module("torch._inductor.utils").clear_caches()
        getattr(getattr(codecache, "_precompile_header", None), "cache_clear", lambda: None)()
        yield


@contextmanager
def _environment(**values: str) -> Generator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _attributes(owner: ModuleType, **values: str) -> Generator[None]:
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
