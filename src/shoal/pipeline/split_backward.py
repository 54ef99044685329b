"""A backward in two halves, with the bits of one: the gradient of the input now, those of the parameters later.

Source of the idea: Qi et al. 2023 (arXiv:2401.10241), and how torch.distributed.pipelining cuts autograd's graph.

    root --> n3 ------> n2 ------> n1 --> received        the *spine*: nodes from which the input is reached
              |          |          |
              v          v          v
              c      (q) --> b      a                     parameters, some through nodes of their own

The first half runs the spine alone: autograd computes no gradient that nobody asked for. What arrives at a spine node
with parameters is kept, and the second half starts there, node by node. That gives the bits of a whole backward as
long as a parameter hangs on one spine node only; one that hangs on several (tied weights) gets its gradient in the
first half, where autograd adds the parts up in its own order. So does one on a node that has its gradient already
(`is_done_at_once`, as `model.chunked_loss` has it): kept for later, it would only take memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

_Arrived = tuple[Tensor | None, ...]


@dataclass(slots=True)
class _Branch:
    """A spine node, the parameters that hang on it alone, and the gradients that have arrived at it."""

    node: Node
    parameters: list[Tensor]
    arrived: _Arrived = ()

    def keep(self, arrived: _Arrived) -> None:
        """A hook of the node."""
        self.arrived = arrived

    @property
    def edges(self) -> tuple[list[GradientEdge], list[Tensor]]:
        """Where to start, and with which gradients."""
        found = [(GradientEdge(self.node, i), g) for i, g in enumerate(self.arrived) if g is not None]
        return [edge for edge, _ in found], [gradient for _, gradient in found]


@dataclass(slots=True)
class SplitBackward:
    """The backward of one graph; `first_half`, then `second_half`, both with `.grad` of the parameters at hand.

    Attributes:
        received: The input, a leaf.
        at_once: Parameters that get their gradient in the first half.
        branches: Where the second half starts.
    """

    root: Tensor
    received: Tensor
    at_once: list[Tensor]
    branches: list[_Branch] = field(default_factory=list[_Branch])

    def first_half(self, gradient: Tensor) -> None:
        """Adds to the `.grad` of the input.

        Args:
            gradient: Of the root.
        """
        # torch's hint wants a hook of gradients only, not of those that may be missing.
        handles = [branch.node.register_prehook(cast("Callable[..., None]", branch.keep)) for branch in self.branches]
        try:
            inputs = [self.received, *self.at_once]
            torch.autograd.backward(self.root, gradient, retain_graph=True, inputs=inputs)
        finally:
            for handle in handles:
                handle.remove()

    def second_half(self) -> None:
        """Adds to the `.grad` of the parameters; the graph is used up."""
        for branch in self.branches:
            edges, gradients = branch.edges
            if edges:
                torch.autograd.backward(edges, gradients, inputs=branch.parameters)

    def is_exact(self, gradient: Tensor) -> bool:
        """Whether both halves give, bit for bit, what one backward gives; changes nothing, and costs two backwards.

        They do not where the graph has hooks that change gradients, or kernels that are not deterministic.
        """
        inputs = [self.received, *self.at_once, *(p for branch in self.branches for p in branch.parameters)]
        # No shorthand: a `.grad` that is there must stay as it is.
        before = [leaf.grad for leaf in inputs]
        try:
            whole = _gradients(inputs, lambda: torch.autograd.backward(self.root, gradient, retain_graph=True))
            halves = _gradients(inputs, lambda: self._both(gradient))
        finally:
            for leaf, grad in zip(inputs, before, strict=True):
                leaf.grad = grad
        return all(_is_same(one, other) for one, other in zip(whole, halves, strict=True))

    def _both(self, gradient: Tensor) -> None:
        self.first_half(gradient)
        for branch in self.branches:
            edges, gradients = branch.edges
            if edges:
                torch.autograd.backward(edges, gradients, retain_graph=True, inputs=branch.parameters)


def split(root: Tensor, received: Tensor, parameters: Sequence[Tensor]) -> SplitBackward | None:
    """Finds out how a graph can be split.

    Args:
        received: The input, a leaf that requires a gradient.

    Returns:
        None if the graph cannot be split or the second half would be empty. A parameter outside the graph may get its
        gradient by other means (a nested backward), so then there is no split either.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    numbers = {id(parameter): number for number, parameter in enumerate(trained)}
    spine, below = _explore(root, received, numbers)
    holders: dict[int, list[Node]] = {}
    for node in spine:
        side = [child for child, _ in node.next_functions if child is not None and child not in spine]
        for number in sorted({number for child in side for number in below[child]}):
            holders.setdefault(number, []).append(node)
    if len(holders) < len(trained):
        return None
    branches: dict[Node, _Branch] = {}
    at_once: list[Tensor] = []
    for number, nodes in sorted(holders.items()):
        if len(nodes) > 1 or getattr(nodes[0], "is_done_at_once", False):
            at_once.append(trained[number])
        else:
            branches.setdefault(nodes[0], _Branch(nodes[0], [])).parameters.append(trained[number])
    return SplitBackward(root, received, at_once, list(branches.values())) if branches else None


def _explore(
    root: Tensor, received: Tensor, numbers: dict[int, int]
) -> tuple[dict[Node, None], dict[Node, frozenset[int]]]:
    """Return the spine, and for each other node the numbers of the parameters below it."""
    spine: dict[Node, None] = {}
    below: dict[Node, frozenset[int]] = {}
    stack = [(root.grad_fn, False)] if root.grad_fn is not None else []
    opened: set[Node] = set()
    while stack:
        node, is_left = stack.pop()
        children = [child for child, _ in node.next_functions if child is not None]
        if not is_left:
            if node not in opened:
                opened.add(node)
                stack.append((node, True))
                stack += [(child, False) for child in children if child not in opened]
            continue
        # Only where a graph ends a node's `variable` is torch's; others may have one of their own.
        leaf = cast("Tensor | None", None if children else getattr(node, "variable", None))
        if leaf is received or any(child in spine for child in children):
            spine[node] = None
        elif leaf is not None:
            below[node] = frozenset([numbers[id(leaf)]]) if id(leaf) in numbers else frozenset()
        else:
            below[node] = frozenset[int]().union(*(below[child] for child in children))
    return spine, below


def _gradients(leaves: Sequence[Tensor], backward: Callable[[], None]) -> list[Tensor | None]:
    for leaf in leaves:
        leaf.grad = None
    backward()
    return [leaf.grad for leaf in leaves]


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    # A value that is not a number equals none, itself included: both forms have it in the same places.
    return one.dtype == other.dtype and bool(((one == other) | (one.isnan() & other.isnan())).all())
