"""Peers that a node of the DHT is connected to, and has given up as nodes of it.

hivemind forgets a peer that does not answer within a second, and asks only peers that it knows. So nodes of a machine
that is too busy for a while forget each other one by one, and what they announce is then read by nobody, for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any


async def meet_again(node: Any, connected: Sequence[Any]) -> None:
    """Where a node does not know half of its connected peers, ask the others whether they answer now.

    Those that do know it again as well. Where it knows more, it is heard; single peers may be frozen.

    Args:
        node: hivemind's; None meets nobody.
        connected: names of peers, as hivemind has them.
    """
    if node is None:
        return
    known = node.protocol.routing_table.peer_id_to_uid
    strangers = [peer for peer in connected if peer not in known]
    if 2 * len(strangers) <= len(connected):
        return
    # Each ends by hivemind's own time limit, and raises nothing.
    await asyncio.gather(*(node.protocol.call_ping(peer) for peer in strangers))
