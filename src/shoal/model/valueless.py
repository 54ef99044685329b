"""Tensors without values: on torch's meta device, what would fill them does nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

# In-place operations that give values. Without values there is nothing to do, and on the meta device torch would
# import its compiler for some of them: 0.7 s and 75 MB.
_RANDOM = frozenset({"normal_", "uniform_", "trunc_normal_", "bernoulli_", "erfinv_"})
_GIVES_VALUES = _RANDOM | {"mul_", "add_", "sub_", "div_", "clamp_", "fill_", "zero_", "copy_"}


class WithoutValues(TorchFunctionMode):
    """Inside, tensors on the meta device are made and not filled."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        # torch.nn.init passes its tensor by name.
        filled = args[0] if args else named.get("tensor")
        if getattr(func, "__name__", "") in _GIVES_VALUES and isinstance(filled, Tensor) and filled.is_meta:
            return filled
        return func(*args, **named)
