"""The laboratory: what tests, measures, slows down and breaks shoal. For tests, ours and yours.

`Cluster` is a whole swarm in one process, with faults at the message of your choice.

Public names are loaded on first use: the grammar of links is also for commands that list something, without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal_lab.cluster import Cluster
    from shoal_lab.results import ClusterResult

__all__ = ["Cluster", "ClusterResult"]


def __getattr__(name: str) -> object:
    """Load a public name on first use (PEP 562)."""
    if name == "Cluster":
        from shoal_lab.cluster import Cluster

        return Cluster
    if name == "ClusterResult":
        from shoal_lab.results import ClusterResult

        return ClusterResult
    raise AttributeError(f"module 'shoal_lab' has no attribute {name!r}")
