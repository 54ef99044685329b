"""For tests, ours and yours: a whole swarm in one process, with faults at the message of your choice.

Public names are loaded on first use: the grammar of links is also for commands that list something, without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.testing.cluster import Cluster
    from shoal.testing.results import ClusterResult

__all__ = ["Cluster", "ClusterResult"]


def __getattr__(name: str) -> object:
    """Load a public name on first use (PEP 562)."""
    if name == "Cluster":
        from shoal.testing.cluster import Cluster

        return Cluster
    if name == "ClusterResult":
        from shoal.testing.results import ClusterResult

        return ClusterResult
    raise AttributeError(f"module 'shoal.testing' has no attribute {name!r}")
