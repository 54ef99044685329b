"""Runs that choose their codec by the links that their replicas measure."""

from __future__ import annotations

import json

import pytest

from shoal.averaging.round_average import averaging_codec
from shoal.codec.auto import AutoCodec
from shoal.events.base import name_of
from shoal.events.run import CodecChosen
from shoal.server import replica as server_replica
from shoal.transport.base import Endpoint
from shoal.wire.messages.round import LinkReport

from .conftest import MakeCluster, make_config
from .test_fragments import check

SLOW_ROUNDS = 3
SLOW_MBIT, FAST_MBIT = 1e-6, 1e9


@pytest.mark.parametrize("overlap_steps", [0, 1])
async def test_a_run_sends_less_while_a_link_is_slow_and_all_of_it_is_replayed(
    make_cluster: MakeCluster, overlap_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(
        run={"deterministic": False},
        diloco={
            "inner_steps": 3,
            "outer_steps": 6,
            "averaging_compression": "auto",
            "overlap_steps": overlap_steps,
        },
    )
    async with make_cluster(config) as cluster:

        def links(endpoint: Endpoint) -> tuple[LinkReport, ...]:
            is_slow = min(server.replica.member.base_round for server in cluster.servers) < SLOW_ROUNDS
            mbit = SLOW_MBIT if is_slow else FAST_MBIT
            return tuple(LinkReport(server.peer, 0.0, mbit) for server in cluster.servers)

        monkeypatch.setattr(server_replica, "link_reports", links)
        result = await cluster.run()
        check(cluster, result, config)
        state = cluster.servers[0].replica.state
        num_values, log_dir = state.base.parameters_N.numel(), cluster._log_dir
    named = [record.codec for record in result.records]
    assert named == ["2bit"] * SLOW_ROUNDS + ["int8"] * (6 - SLOW_ROUNDS)
    codec = averaging_codec(config.diloco)
    assert isinstance(codec, AutoCodec)
    for record, travels in zip(result.records, ["int8", *named], strict=False):
        sizes = {payload.num_bytes for payload in record.stages[0].payloads if payload is not None}
        assert sizes == {codec.named(travels).max_size_bytes(num_values)}, "as the record before has said"
    lines = [json.loads(line) for line in (log_dir / "events.jsonl").read_text().splitlines()]
    changes = [(line["round"], line["codec"]) for line in lines if line["event"] == name_of(CodecChosen)]
    assert changes == [(2, "2bit"), (SLOW_ROUNDS + 2, "int8")]
