"""A trainer's part in evaluation: whose answers count."""

from __future__ import annotations

import math

import anyio
from tests.alongside import alongside, until

from shoal.data.fields import Fields
from shoal.data.microbatch import Microbatch
from shoal.ids import PeerId
from shoal.pipeline.driver import EvalDriver
from shoal.transport.memory import MemoryNetwork
from shoal.wire.messages.step import EvalResult
from shoal.wire.tensors import WireTensor

SERVER = PeerId("server")


def tensor() -> WireTensor:
    return WireTensor("int64", (2,), memoryview(bytearray(16)))


async def test_answers_about_batches_that_were_never_sent_mean_nothing() -> None:
    network = MemoryNetwork(seed=0)
    endpoint, server = network.endpoint(PeerId("trainer")), network.endpoint(SERVER)
    driver = EvalDriver(endpoint, window=1, timeout_s=math.inf)
    found: list[tuple[float, int]] = []

    async def evaluate() -> None:
        batch = Microbatch(Fields(tensor(), tensor(), {}), 2)
        found.append(await driver.evaluate(3, 1, [batch], (server.hop,), lambda _: None))

    async with alongside(evaluate):
        await until(lambda: driver._path)
        driver.receive(SERVER, EvalResult(3, 1, 9.0, 2))
        await anyio.wait_all_tasks_blocked()
        driver.receive(SERVER, EvalResult(3, 0, 0.5, 2))
        await until(lambda: found)
    assert found == [(1.0, 2)]
