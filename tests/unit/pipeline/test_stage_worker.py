"""A replica's end of the training step: whom it takes a trainer's word for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.ids import PeerId, StepKey
from shoal.pipeline import stage_worker as stage_worker_module
from shoal.pipeline.stage_worker import StageWorker, StepLimits, StepRights
from shoal.swarm.step_operations import BEHIND, Schedule
from shoal.telemetry.registry import MetricRegistry
from shoal.transport.base import Received
from shoal.wire.messages.base import Hop
from shoal.wire.messages.step import Fence, Forward, Open, Opened, Refused
from shoal.wire.tensors import WireTensor

BEFORE, ME, NEXT, TRAINER = PeerId("before"), PeerId("me"), PeerId("next"), PeerId("trainer")


class Post:
    """An endpoint that dials nobody."""

    def __init__(self) -> None:
        self.peer_id, self.metrics = ME, MetricRegistry()
        self.introduced: list[PeerId] = []
        self.posted: list[tuple[object, ...]] = []

    def introduce(self, hop: Hop) -> None:
        self.introduced.append(hop.peer)

    def post(self, *what: object) -> None:
        self.posted.append(what)


def stage_worker(post: Post, stage: int = 0, **options: Any) -> StageWorker:
    module = SimpleNamespace(is_wrapped=False, has_loss=False, part=lambda is_head: None)
    compute: Any = SimpleNamespace(stage=stage, schedule=Schedule.ONE_F_ONE_B, module=module)
    device: Any = None
    endpoint: Any = post
    worker = StageWorker(
        endpoint=endpoint, compute=compute, device=device, num_stages=2, limits=StepLimits(open_steps=1), **options
    )
    worker.start_round(1)
    return worker


def test_only_the_client_that_it_follows_fences_a_trainer() -> None:
    client: PeerId | None = None
    worker = stage_worker(Post(), rights=StepRights(is_client=lambda peer: peer == client))
    assert not worker.receive(Received(PeerId("client"), Fence({0: 5}), ()))
    client = PeerId("client")
    assert not worker.receive(Received(PeerId("another"), Fence({0: 5}), ()))
    assert worker._machine._ledger.lowest_generation(0) == 0
    assert worker.receive(Received(client, Fence({0: 5}), ()))
    assert worker._machine._ledger.lowest_generation(0) == 5


def test_nobody_is_known_by_a_step_that_is_not_opened() -> None:
    post = Post()
    worker = stage_worker(post)
    invented = tuple(Hop(PeerId(f"nobody {number}"), ()) for number in range(1000))
    path = (Hop(ME, ()), Hop(NEXT, ()))
    worker.receive(Received(TRAINER, Open(StepKey(0, 1, 0, 0), 1, invented, (2,), (2,), ()), ()))
    assert post.introduced == []
    worker.receive(Received(TRAINER, Open(StepKey(0, 1, 0, 1), 1, path, (2,), (2,), ()), ()))
    assert post.introduced == [NEXT]
    worker.receive(Received(PeerId("another"), Open(StepKey(0, 1, 0, 1), 1, invented[:2], (2,), (2,), ()), ()))
    assert post.introduced == [NEXT]


def test_who_is_not_the_trainer_opens_no_step_and_takes_no_slot() -> None:
    post = Post()
    worker = stage_worker(post, rights=StepRights(may_open=lambda peer, _: peer == TRAINER))
    path = (Hop(ME, ()), Hop(NEXT, ()))
    later = StepKey(0, 1 << 62, 1 << 40, 0)
    worker.receive(Received(PeerId("another"), Open(later, 1, path, (2,), (2,), ()), ()))
    assert (post.posted, worker.num_open) == ([(PeerId("another"), Refused(later, BEHIND))], 0)
    key = StepKey(0, 1, 0, 0)
    worker.receive(Received(TRAINER, Open(key, 1, path, (2,), (2,), ()), ()))
    assert (post.posted[1:], worker.num_open) == ([(TRAINER, Opened(key))], 1)


def test_a_tensor_that_comes_before_its_step_is_kept_until_that_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_worker_module, "payload_misfit", lambda *_: None)
    post, key = Post(), StepKey(0, 1, 0, 0)
    worker = stage_worker(post, stage=1)
    tensor = WireTensor("float32", (2,), memoryview(bytes(8)))
    worker.receive(Received(BEFORE, Forward(key, 0), (tensor,)))
    worker.receive(Received(PeerId("another"), Forward(key, 0), ()))
    assert post.posted == []
    worker.receive(Received(TRAINER, Open(key, 1, (Hop(BEFORE, ()), Hop(ME, ())), (2,), (2,), ()), ()))
    assert post.posted == [(TRAINER, Opened(key))]
    assert list(worker._payloads[key].values()) == [(tensor,)]
    assert worker._machine.open[key].passes[0].inputs == 1


def test_early_tensors_end_with_their_sender_s_connection_and_with_the_round() -> None:
    post, key = Post(), StepKey(0, 1, 0, 0)
    worker = stage_worker(post, stage=1)
    worker.receive(Received(BEFORE, Forward(key, 0), ()))
    worker.peer_lost(BEFORE)
    assert worker._early._held == []
    worker.receive(Received(BEFORE, Forward(key, 0), ()))
    worker.start_round(2)
    assert worker._early._held == []
