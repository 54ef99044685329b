"""What a client says of its swarm in numbers. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.swarm.view import SwarmView


def swarm_numbers(
    view: SwarmView, num_stages: int, num_pipelines: int, num_trainers: int, *, is_paused: bool
) -> Mapping[str, float]:
    """Return the numbers of the swarm as it is now, by name as in `monitor.status.Status`.

    Args:
        view: as corrected by the client's own connections.
    """
    replicas = view.num_replicas(num_stages)
    return {
        # Those of the round, as far as each of their stages has a server.
        "pipelines": float(min(num_pipelines, *replicas)),
        # The data server and the trainers announce themselves to nobody but this client.
        "alive_peers": float(view.num_peers + num_trainers + 1),
        "missing_stages": float(len(view.missing_stages(num_stages))),
        "paused": float(is_paused),
        **{f"replicas/{stage}": float(number) for stage, number in enumerate(replicas)},
    }
