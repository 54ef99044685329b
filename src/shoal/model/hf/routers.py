"""Which modules of a model of transformers are its routers: those whose logits transformers itself records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

from torch import nn

from shoal.model.router_loss import RouterLosses

_RECORDED = "router_logits"


def coefficient_of(config: Any) -> float | None:
    """Return what the routers' loss is multiplied with; None: this kind of model has none."""
    found = getattr(config, "router_aux_loss_coef", None)
    return None if found is None else float(found)


def unknown_routers(model: Any) -> str:
    """Return why the routers' loss of a model would be missing; empty: it has none, or its routers are known."""
    if not coefficient_of(model.config) or _recorder(model) is not None:
        return ""
    return (
        "it does not say which of its modules are routers, whose loss it has (set model.extra.router_aux_loss_coef to "
        "0 to train without)"
    )


def router_losses(model: Any, layers: Iterable[nn.Module]) -> RouterLosses | None:
    """Attach the loss to the routers in some layers of a model, in their order; None: it has none."""
    coefficient, recorder = coefficient_of(model.config), _recorder(model)
    if coefficient is None or recorder is None:
        return None
    losses = RouterLosses(coefficient, model.config.num_experts_per_tok)
    for layer in layers:
        for name, module in cast("Iterator[tuple[str, nn.Module]]", layer.named_modules()):
            if isinstance(module, recorder.target_class) and (recorder.layer_name or "") in name:
                losses.attach(module, recorder.index)
    return losses


def _recorder(model: Any) -> Any:
    """What transformers records routers by; None: it does not."""
    recorders: dict[str, Any] = getattr(model, "_can_record_outputs", None) or {}
    found = recorders.get(_RECORDED)
    return found if hasattr(found, "target_class") else None
