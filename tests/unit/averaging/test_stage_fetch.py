"""A client that keeps the states of several stages gives each to who asks for it; another client fetches them."""

from __future__ import annotations

from types import SimpleNamespace

import anyio
import torch
from tests.alongside import alongside
from torch import nn

from shoal.averaging.contents import Contents
from shoal.averaging.replica_state import OuterState
from shoal.averaging.stage_fetch import StageFetch, state_bytes
from shoal.averaging.state_donor import StateDonor
from shoal.checkpoint.model_layout import StageLayout
from shoal.clock import SystemClock
from shoal.ids import Ballot, PeerId
from shoal.swarm.view import ClientPeer, SwarmView
from shoal.transport.dispatch import dispatch
from shoal.transport.memory import MemoryNetwork
from shoal.wire.messages.round import Record, StageOutcome


class Patient(SystemClock):
    """A busy machine is not taken for one that says nothing."""

    async def sleep_s(self, duration_s: float) -> None:
        await anyio.sleep_forever()


async def test_of_several_stages_that_are_kept_each_is_given_by_its_name() -> None:
    network, layout = MemoryNetwork(seed=0), StageLayout.of(nn.Linear(3, 2))
    keeper, reader = network.endpoint(PeerId("keeper")), network.endpoint(PeerId("reader"))
    kept, wanted = Contents(keeper, Patient(), chunk_bytes=8), Contents(reader, Patient(), chunk_bytes=8)
    none = torch.empty(0), torch.empty(0, dtype=torch.int64)
    states = [OuterState(torch.full((8,), 1.0 + stage), torch.full((8,), -1.0), *none) for stage in range(2)]
    for stage, state in enumerate(states):
        StateDonor(kept, stage).hold(3, "digest", state)
    outcomes = tuple(StageOutcome(stage, 0, (), (), state.hashes(), 0) for stage, state in enumerate(states))
    record = Record("run", 3, Ballot(1, PeerId("keeper"), 1), "", outcomes, (), (), {})
    membership = SimpleNamespace(view=SwarmView(clients=(ClientPeer(keeper.hop, 0.0),)))
    fetch = StageFetch(wanted, membership)  # type: ignore[arg-type]
    async with alongside(kept.run) as tasks:
        tasks.start_soon(dispatch, keeper, (kept,))
        tasks.start_soon(dispatch, reader, (fetch, wanted))
        for stage in (1, 0):
            found = await fetch.fetch(stage, layout, record, "digest")
            assert found is not None
            for mine, theirs in zip(found, states[stage], strict=True):
                assert torch.equal(mine, theirs)
        assert fetch.fetched_bytes == 2 * state_bytes(layout)
