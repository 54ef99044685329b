"""A mirror: what it holds, and why it holds nothing."""

from __future__ import annotations

from logging import WARNING

from shoal.events.base import Event


class MirrorServes(Event, frozen=True, tag="mirror.serves"):
    """A host that was started as a mirror follows the run."""

    says = "{role} follows run {run}: it takes the state of every stage, record by record, and gives it to newcomers"
    role: str
    run: str


class MirrorHolds(Event, frozen=True, tag="mirror.holds"):
    """This mirror holds the state of a stage as a record names it, and gives it to whoever asks."""

    stage: int
    round: int
    record: str


class MirrorTooSmall(Event, frozen=True, tag="mirror.too_small"):
    """This host has not the memory for the states of all stages: the mirror takes no state until it has."""

    level = WARNING
    why = "a mirror holds parameters, momentum and buffers of all stages, and has to have room for one that arrives"
    do = "free memory here, or run `shoal mirror` on a host that has it; --no-param-mirror-enable starts none here"
    says = (
        "the mirror takes no state: it needs {needed_mb:,.0f} MB more, and {free_mb:,.0f} MB are free on its host; the "
        "run goes on without it"
    )
    needed_mb: float
    free_mb: float
