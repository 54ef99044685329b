"""A small twin of a model of transformers proves that cutting it is exact: forward and all gradients, bit for bit.

    transformers' own class == our uncut stage == our stages, every unit alone, in halves, in thirds

What a version of a model does between its layers (a scale, a cache that they share) may be in no list of what is cut. A
model that is cut wrongly trains, and nobody sees it; so each is compared before a run, by a twin that takes a moment.

Shapes: B samples, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, cast

import torch
from torch import Tensor

from shoal.model.hf.described import transformers_version
from shoal.model.hf.library import build_whole, model_config
from shoal.model.hf.routers import coefficient_of, unknown_routers
from shoal.model.hf.skeleton import Part
from shoal.model.hf.small import few_layers, small_values
from shoal.model.router_loss import router_loss
from shoal.model.seeding import seeded
from shoal.model.stage import Family, StageModule, build_stage

TOKENS: Final = 12
CHUNK_TOKENS: Final = 5
_SAMPLES: Final = 2
_TEXTS: Final = (5, 7)
SEED: Final = 1
# Of the largest gradient.
_MOST_GAP: Final = 1e-4
_MOST_PARAMETERS: Final = 50_000_000


def difference(values: Mapping[str, Any], family_of: Callable[[dict[str, Any]], Family]) -> str:
    """Return why a model must not be cut, in words; empty if it may be.

    Args:
        values: What transformers is told of it.
        family_of: Makes the family of such values, for `TOKENS` tokens and chunks of `CHUNK_TOKENS`.

    Raises:
        ConfigError: The values describe no model.
    """
    config = model_config(values, {})
    name = f"{config.model_type} of transformers {transformers_version()}"
    reasons: list[str] = []
    for shrunk in (small_values, few_layers):
        try:
            twin = family_of(shrunk(values, config))
            if reasons and _num_parameters(twin) > _MOST_PARAMETERS:
                break
            whole = _Whole(twin)
        except Exception as error:  # noqa: BLE001 - a size may not go with another one, and then the model's own sizes do
            reasons.append(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
            continue
        try:
            found = whole.difference()
        except Exception as error:  # noqa: BLE001 - whatever a layer raises that looks for another one
            found = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return f"{name} cannot be cut exactly: {found}; train another model, or another version" if found else ""
    return f"{name} cannot be checked, and what is not checked is not cut: no small twin of it runs ({reasons[0]})"


class _Whole:
    """The model of transformers' own class with our initial values, and what it computes of a batch.

    Raises:
        Exception: The model cannot be built, or does not compute.
    """

    def __init__(self, family: Family) -> None:
        self._family = family
        self._uncut = build_stage(family, 0, 1, seed=SEED, in_chunks=False)
        generator = torch.Generator().manual_seed(SEED)
        vocabulary = self._uncut.output_spec.shape[-1]
        # Tokens 0 to 2 may mean padding and the like.
        tokens = torch.randint(3, vocabulary, (_SAMPLES, TOKENS + 1), generator=generator)
        self._inputs_BT, self._labels_BT = tokens[:, :-1], tokens[:, 1:]
        ours = cast("Part", self._uncut.assembled).model
        with seeded(SEED):
            self._theirs = theirs = build_whole(ours.config)
        theirs.load_state_dict(ours.state_dict())
        with seeded(SEED):
            output, loss = _forward_of(theirs, self._inputs_BT)
            torch.autograd.backward(family.loss(output, self._labels_BT) + loss)
        self._expected = output.detach()
        gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
        own_names = {id(parameter): name for name, parameter in self._uncut.named_parameters()}
        self._gradients = {own_names[id(p)]: gradients[name] for name, p in ours.named_parameters()}

    def difference(self) -> str:
        """Return what stages compute otherwise; empty: nothing."""
        if found := unknown_routers(self._theirs):
            return found
        for cut in _cuts(self._family):
            stages = [
                build_stage(self._family, s, len(cut), seed=SEED, cut=cut, in_chunks=False) for s in range(len(cut))
            ]
            if found := self._difference_of(stages):
                return f"in {len(cut)} stages {found}"
        return self._difference_in_chunks() or (self._difference_of_packed() if self._family.context_specs() else "")

    def _difference_of_packed(self) -> str:
        """Texts that share a sample have other masks, so only gross differences count: those of texts that mix."""
        texts = torch.tensor_split(self._inputs_BT, [_TEXTS[0]], dim=1)
        positions_T = torch.cat([torch.arange(length) for length in _TEXTS])
        self._uncut.eval()
        with torch.no_grad():
            apart = torch.cat([self._uncut(text) for text in texts], dim=1)
            packed = self._uncut(self._inputs_BT, positions_T.expand_as(self._inputs_BT))
        self._uncut.train()
        gap = (packed - apart).abs().max().item()
        if gap <= _MOST_GAP * apart.abs().max().item():
            return ""
        return f"texts that share a sample do not stay apart, by up to {gap:.1e}, so conversations cannot be packed"

    def _difference_in_chunks(self) -> str:
        """Other sums have other bits, so only gross differences count: those of a last unit that mixes tokens."""
        stage = build_stage(self._family, 0, 1, seed=SEED)
        run_stages([stage], self._inputs_BT, self._labels_BT)
        pairs = [(p.grad, self._gradients[name]) for name, p in stage.named_parameters()]
        largest = max(expected.abs().max().item() for _, expected in pairs if expected is not None)
        gaps = [(found - expected).abs().max().item() for found, expected in pairs if None not in (found, expected)]
        if max(gaps) <= _MOST_GAP * largest:
            return ""
        return f"with its loss in chunks of {CHUNK_TOKENS} tokens gradients are others, by up to {max(gaps):.1e}"

    def _difference_of(self, stages: Sequence[StageModule]) -> str:
        output = run_stages(stages, self._inputs_BT, self._labels_BT)
        if not torch.equal(output, self._expected):
            return f"the output is another one, by up to {(output - self._expected).abs().max().item():.1e}"
        found = {name: parameter.grad for stage in stages for name, parameter in stage.named_parameters()}
        if odd := sorted(found.keys() ^ self._gradients.keys()):
            return f"there are other parameters ({', '.join(odd[:3])})"
        for name, gradient in found.items():
            expected = self._gradients[name]
            if (gradient is None) != (expected is None):
                return f"{name} has a gradient in one of the two alone"
            if gradient is not None and expected is not None and not torch.equal(gradient, expected):
                return f"the gradient of {name} is another one, by up to {(gradient - expected).abs().max().item():.1e}"
        return ""


def _forward_of(model: Any, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of a model of transformers, and what its routers add to the loss."""
    coefficient = coefficient_of(model.config)
    if not coefficient:
        return model(input_ids=inputs, use_cache=False).logits, torch.zeros(())
    output = model(input_ids=inputs, use_cache=False, output_router_logits=True)
    losses = [router_loss(logits, model.config.num_experts_per_tok).loss for logits in output.router_logits or ()]
    return output.logits, sum((loss * coefficient for loss in losses), torch.zeros(()))


def run_stages(stages: Sequence[StageModule], inputs: Tensor, labels: Tensor, *context: Tensor) -> Tensor:
    """Run a batch forward and backward through all stages, which get gradients; returns the model's output.

    A head that the first stage hosts comes behind the last one.
    """
    head = stages[0].head
    chain = stages if head is None else [*stages, head]
    passed: list[tuple[Tensor, Tensor]] = []
    x = inputs
    with seeded(SEED):
        for stage in chain:
            received = x.detach().requires_grad_(x.is_floating_point())
            with stage.weighed(1.0):
                x = stage(received, *context)
            passed.append((received, x))
    torch.autograd.backward(chain[-1].loss(x, labels))
    for (_, sent), (received, _) in reversed(list(pairwise(passed))):
        torch.autograd.backward(sent, received.grad)
    return x.detach()


def _cuts(family: Family) -> Iterator[list[int]]:
    """In one piece, each unit alone, in halves and in thirds; the first stage of a tied model has its last unit too."""
    units, least = family.num_units, 2 if family.is_tied else 1
    yield [units]
    yield [least, *[1] * (units - least)]
    half, third = max(least, units // 2), max(least, units // 3)
    yield [half, units - half]
    if units > 3:
        yield [third, units // 3, units - third - units // 3]


def _num_parameters(family: Family) -> int:
    with torch.device("meta"):
        return sum(p.numel() for index in range(family.num_units) for p in family.build_unit(index).parameters())
