"""The newest numbers of a run by name, from the messages of all roles. Plain bookkeeping, no I/O."""

from __future__ import annotations

import math

from shoal.ids import PeerId
from shoal.swarm.view import SwarmView
from shoal.wire.messages.control import Metrics

SHARED_ROLES = ("client", "baseline")
"""Roles whose numbers are about the run as a whole: they keep their names. Others are prefixed with their peer's."""

_MAX_NAMES = 2000


class Status:
    """What is known now.

    Names of the run as a whole: `round`, `step`, `loss/train`, `loss/eval`, `loss/baseline` (nats), `samples`,
    `samples_per_s`, `pipelines`, `alive_peers`, `missing_stages` (how many), `replicas/0` and so on (of each stage),
    `paused` (1 if a user has paused the run, else 0); of a model with experts `loss/router` (mean over the layers; 1
    where all is even) and `router/load_cv` (of the layer whose experts' numbers of tokens vary the most); what
    `Family.figures` names.

    Attributes:
        at_s: when each number came, in monotonic time; what the registry says has none.
    """

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._values: dict[str, float] = {}
        self.at_s: dict[str, float] = {}
        self._seen: dict[str, float] = {}
        self._client: PeerId | None = None
        self._view = SwarmView()

    def add(self, message: Metrics, now_s: float) -> dict[str, float]:
        """Take over a message's numbers; return them under the names that they have here, `round` included.

        Numbers that are not finite, or come under one name too many, are left out: a peer must not fill this memory.

        Args:
            message: its `peer` has sent it.
        """
        prefix = "" if message.role in SHARED_ROLES else f"{self._view.name_of(message.peer)}/"
        named = {prefix + name: value for name, value in message.values.items() if math.isfinite(value)}
        added = {name: v for name, v in named.items() if name in self._values or len(self._values) < _MAX_NAMES}
        if message.role == "client":
            self._client = message.peer
            if message.round:  # the first one has begun
                added["round"] = float(message.round)
        self._values |= added
        self.at_s |= dict.fromkeys(added, now_s)
        return added

    def lost(self, peer: PeerId) -> bool:
        """A connection has ended. Returns whether it was the client's: until it speaks again the registry counts."""
        is_client = peer == self._client
        if is_client:
            self._client = None
        return is_client

    def seen(self, view: SwarmView) -> None:
        """Take over what the registry says; it counts as long as no client says better."""
        self._view = view
        replicas = view.num_replicas(self._num_stages)
        self._seen = {
            "alive_peers": float(view.num_peers),
            **{f"replicas/{stage}": float(number) for stage, number in enumerate(replicas)},
            "missing_stages": float(len(view.missing_stages(self._num_stages))),
            "pipelines": float(view.max_pipelines(self._num_stages)),
        }

    @property
    def values(self) -> dict[str, float]:
        """All numbers by name."""
        return self._values | self._seen if self._client is None else self._seen | self._values
