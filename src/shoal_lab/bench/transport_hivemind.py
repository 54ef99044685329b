"""hivemind's streaming call in the benchmark, as its experts use it: a tensor in, a tensor out.

Each call serializes a tensor without compression, sends it in parts as long as a message may be, and the handler puts
it together again: the steps of `RemoteExpert`, with the same functions of hivemind.
"""

# hivemind ships no type information, and protobuf makes its messages when it is imported.
# pyright: basic, reportMissingTypeStubs=false, reportAttributeAccessIssue=false

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Final, Self

import torch

from shoal.clock import SystemClock
from shoal_lab.bench.transport_rendezvous import Rendezvous

_HANDLER: Final = "shoal.benchmark"


class HivemindEnd:
    """One end: a daemon of hivemind's and the loop that serves it, started in the first call and kept."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._receives = rendezvous.is_first
        self._clock = SystemClock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._p2p: Any = None
        self._target: Any = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._p2p is not None:
            self._run(self._p2p.shutdown())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def rate(self, size_bytes: int, count: int) -> float | None:
        """Send so many tensors, one call each; return GB/s at the sender. The receiver serves at any time."""
        if self._p2p is None:
            self._run(self._start())
        return None if self._receives else self._run(self._send(size_bytes, count))

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _start(self) -> None:
        from hivemind.p2p import P2P, PeerID
        from hivemind.proto import runtime_pb2

        if self._receives:
            self._p2p = await P2P.create(dht_mode="client", use_relay=False, auto_nat=False)
            await self._p2p.add_protobuf_handler(
                _HANDLER, self._take, runtime_pb2.ExpertRequest, stream_input=True, stream_output=True
            )
            addresses = await self._p2p.get_visible_maddrs()
            self._rendezvous.share("hivemind", "\n".join(map(str, addresses)))
            return
        told = await asyncio.to_thread(self._rendezvous.share, "hivemind", "")
        addresses = told.split()
        self._p2p = await P2P.create(initial_peers=addresses, dht_mode="client", use_relay=False, auto_nat=False)
        await self._p2p.wait_for_at_least_n_peers(1)
        self._target = PeerID.from_base58(addresses[0].rpartition("/")[2])

    async def _take(self, requests: AsyncIterator[Any], _context: Any) -> AsyncIterator[Any]:
        from hivemind.compression import deserialize_tensor_stream
        from hivemind.proto import runtime_pb2

        async def tensors() -> AsyncIterator[Any]:
            async for request in requests:
                yield request.tensors

        await deserialize_tensor_stream(tensors())
        yield runtime_pb2.ExpertResponse()

    async def _send(self, size_bytes: int, count: int) -> float:
        from hivemind.compression import serialize_torch_tensor
        from hivemind.p2p.p2p_daemon_bindings.control import DEFAULT_MAX_MSG_SIZE
        from hivemind.proto import runtime_pb2
        from hivemind.utils.streaming import split_for_streaming

        tensor = torch.ones(size_bytes // 4)

        async def parts() -> AsyncIterator[Any]:
            for part in split_for_streaming(serialize_torch_tensor(tensor), DEFAULT_MAX_MSG_SIZE):
                yield runtime_pb2.ExpertRequest(tensors=[part])

        async def call() -> None:
            answers = await self._p2p.iterate_protobuf_handler(
                self._target, _HANDLER, parts(), runtime_pb2.ExpertResponse
            )
            async for _ in answers:
                pass

        await call()
        begun_s = self._clock.now_s()
        for _ in range(count):
            await call()
        return size_bytes * count / 1e9 / (self._clock.now_s() - begun_s)
