"""A client that keeps the states of several stages gives each to who asks for it; another client fetches them."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch
from tests.alongside import alongside
from tests.linux_calls import needs
from torch import nn

from shoal.averaging.contents import Contents
from shoal.averaging.replica_state import OuterState
from shoal.averaging.stage_fetch import StageFetch, state_bytes
from shoal.averaging.state_donor import StateDonor
from shoal.checkpoint.model_layout import StageLayout
from shoal.clock import SystemClock
from shoal.ids import Ballot, PeerId
from shoal.optim.vector_memory import FileVectorMemory, is_in_file
from shoal.runtime import file_memory
from shoal.runtime.linux_calls import LinuxCall
from shoal.swarm.view import ClientPeer, SwarmView
from shoal.transport.dispatch import dispatch
from shoal.transport.memory import MemoryNetwork
from shoal.wire.messages import Hop
from shoal.wire.messages.round import Record, StageOutcome

NONE = torch.empty(0), torch.empty(0, dtype=torch.int64)


class Patient(SystemClock):
    """A busy machine is not taken for one that says nothing."""

    async def sleep_s(self, duration_s: float) -> None:
        await anyio.sleep_forever()


def record_of(*states: OuterState) -> Record:
    outcomes = tuple(StageOutcome(stage, 0, (), (), state.hashes(), 0) for stage, state in enumerate(states))
    return Record("run", 3, Ballot(1, PeerId("keeper"), 1), "", outcomes, (), (), {})


def members(client: Hop) -> Any:
    return SimpleNamespace(view=SwarmView(clients=(ClientPeer(client, 0.0),)))


@needs(LinuxCall.FILE_MEMORY, "nothing lies in files")
async def test_nobody_waits_for_the_disk_of_vectors_that_lie_in_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, layout = FileVectorMemory(tmp_path), StageLayout.of(nn.Linear(600, 600, bias=False))
    state = OuterState(*map(memory.copy, torch.rand(2, layout.parameters.numel)), *NONE)
    touched_by = set[int]()
    leave = file_memory.leave

    def watched(address: int, num_bytes: int) -> None:
        touched_by.add(threading.get_ident())
        leave(address, num_bytes)

    network = MemoryNetwork(seed=0)
    keeper, reader = network.endpoint(PeerId("keeper")), network.endpoint(PeerId("reader"))
    kept, wanted = Contents(keeper, Patient()), Contents(reader, Patient(), memory=memory)
    StateDonor(kept, 0).hold(3, "digest", state)
    record = record_of(state)
    fetch = StageFetch(wanted, members(keeper.hop))
    async with alongside(kept.run) as tasks:
        tasks.start_soon(dispatch, keeper, (kept,))
        tasks.start_soon(dispatch, reader, (fetch, wanted))
        monkeypatch.setattr(file_memory, "leave", watched)
        found = await fetch.fetch(0, layout, record, "digest")
    assert found is not None
    assert is_in_file(found[0])
    assert all(map(torch.equal, found, state))
    assert touched_by
    assert threading.get_ident() not in touched_by


async def test_of_several_stages_that_are_kept_each_is_given_by_its_name() -> None:
    network, layout = MemoryNetwork(seed=0), StageLayout.of(nn.Linear(3, 2))
    keeper, reader = network.endpoint(PeerId("keeper")), network.endpoint(PeerId("reader"))
    kept, wanted = Contents(keeper, Patient(), chunk_bytes=8), Contents(reader, Patient(), chunk_bytes=8)
    states = [OuterState(torch.full((8,), 1.0 + stage), torch.full((8,), -1.0), *NONE) for stage in range(2)]
    for stage, state in enumerate(states):
        StateDonor(kept, stage).hold(3, "digest", state)
    record = record_of(*states)
    fetch = StageFetch(wanted, members(keeper.hop))
    async with alongside(kept.run) as tasks:
        tasks.start_soon(dispatch, keeper, (kept,))
        tasks.start_soon(dispatch, reader, (fetch, wanted))
        for stage in (1, 0):
            found = await fetch.fetch(stage, layout, record, "digest")
            assert found is not None
            for mine, theirs in zip(found, states[stage], strict=True):
                assert torch.equal(mine, theirs)
        assert fetch.fetched_bytes == 2 * state_bytes(layout)
