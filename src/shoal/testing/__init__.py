"""For tests, ours and yours: a whole swarm in one process, with faults at the message of your choice."""

from shoal.testing.cluster import Cluster
from shoal.testing.results import ClusterResult

__all__ = ["Cluster", "ClusterResult"]
