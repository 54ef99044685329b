"""How a step's microbatches are cut further where a replica of the path takes fewer samples at a time. Pure.

A function of the sizes and the smallest cap alone: everybody cuts alike, and a path without caps leaves all as it is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.ids import PeerId
from shoal.swarm.step_operations import MALFORMED
from shoal.wire.messages.base import Replicas

EVAL_SAMPLES = 64
"""Samples that travel together in an evaluation: it keeps no activations, so they can be more than in training."""

MAX_MICROBATCHES = 4096
"""Of one step; a replica keeps a bitmap of them."""


@dataclass(frozen=True, slots=True)
class MicrobatchPart:
    """Samples [start, stop) of microbatch `whole` of the uncut step."""

    whole: int
    start: int
    stop: int

    @property
    def num_samples(self) -> int:
        """At least 1."""
        return self.stop - self.start


def smallest_cap(caps: Iterable[int | None]) -> int | None:
    """Return the most samples that all replicas with these caps take in a microbatch; None: any number."""
    return min((cap for cap in caps if cap is not None), default=None)


class KnownCaps:
    """The caps of replicas as a trainer knows them: its client says them, and a replica that has lowered its own says
    so in a refusal, before the client can."""

    def __init__(self) -> None:
        self._told: dict[PeerId, int | None] = {}
        self._lowered: dict[PeerId, int] = {}

    def lower(self, peer: PeerId, cap: int) -> None:
        """The peer has refused a step and says that it takes no more than this."""
        self._lowered[peer] = cap

    def told(self, replicas: Replicas) -> None:
        """The client has said these: it knows by now of those that it says no higher cap of."""
        self._told = {replica.peer: replica.cap for stage in replicas for replica in stage}
        self._lowered = {peer: cap for peer, cap in self._lowered.items() if self._is_news(peer, cap)}

    def _is_news(self, peer: PeerId, cap: int) -> bool:
        told = self._told.get(peer)
        return told is None or told > cap

    def forget(self, peer: PeerId) -> None:
        """The peer's connection has ended: what answers next may be another replica."""
        self._lowered.pop(peer, None)

    def smallest(self, path: Iterable[PeerId]) -> int | None:
        """Return `smallest_cap` of a path."""
        return smallest_cap(self._lowered.get(peer, self._told.get(peer)) for peer in path)


def cut(sizes: Sequence[int], cap: int | None) -> tuple[MicrobatchPart, ...]:
    """Return the parts of microbatches of these sizes, in order: of each as few as the cap allows, as even as can be.

    The sizes of a microbatch's parts are those of `torch.chunk`: ceil(n / k), the last one perhaps smaller. Cutting
    with the largest part as the cap gives the same parts again, so that the sizes in a step tell how it was cut.
    """
    parts: list[MicrobatchPart] = []
    for whole, num_samples in enumerate(sizes):
        num_parts = 1 if cap is None else -(-num_samples // cap)
        size = -(-num_samples // num_parts)
        parts += [MicrobatchPart(whole, start, min(start + size, num_samples)) for start in range(0, num_samples, size)]
    return tuple(parts)


def within(sizes: Sequence[int]) -> int:
    """Return the smallest cap that leaves a step of microbatches of these sizes with a number that replicas take."""
    caps = range(1, max(sizes) + 1)
    return caps[min(bisect_left(caps, True, key=lambda cap: len(cut(sizes, cap)) <= MAX_MICROBATCHES), len(caps) - 1)]


def lowered(sizes: Sequence[int], cap: int | None) -> int | None:
    """Return the cap of a replica whose memory was too small for a step with microbatches of these sizes.

    Half of the largest, at least one sample; what the replica has already lowered its cap to since the step was opened
    is not halved again. None: the step cannot be cut any further.
    """
    largest = max(sizes)
    half = max(1, largest // 2)
    new = half if cap is None else min(cap, half)
    return new if within(sizes) <= new < largest else None


def exceeded(sizes: Sequence[int], cap: int | None) -> int | None:
    """Return the cap if a step with microbatches of these sizes is above it: what a refused trainer has to know."""
    return cap if cap is not None and max(sizes, default=0) > cap else None


def refusal(sizes: Sequence[int], targets: Sequence[int], cap: int | None) -> str | None:
    """Return why a replica with this cap refuses a step with microbatches of these sizes, or None if it takes it."""
    if not 0 < len(sizes) <= MAX_MICROBATCHES or min(sizes) < 1:
        return MALFORMED
    if len(targets) != len(sizes) or min(targets) < 0:
        return MALFORMED
    return too_large(max(sizes), cap)


def weight_of(targets: Sequence[int], microbatch: int) -> float:
    """Return a microbatch's part of its step's targets: so weighted, the means of microbatches add up to the step's."""
    return targets[microbatch] / max(1, sum(targets))


def too_large(num_samples: int, cap: int | None) -> str | None:
    """Return why a replica with this cap refuses a microbatch, or None if it takes it."""
    if cap is None or num_samples <= cap:
        return None
    return f"a microbatch of {num_samples} samples is above this replica's cap of {cap}: cut it"
