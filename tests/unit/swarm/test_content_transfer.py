"""Which chunk is asked of whom, step by step."""

from __future__ import annotations

import hashlib
import math

import pytest

from shoal.ids import PeerId
from shoal.swarm.content_transfer import (
    AskDonor,
    ChunkPlace,
    ChunkPlan,
    ContentTransfer,
    Distrust,
    Late,
    Nobody,
    Request,
    Store,
    TransferDone,
    TransferEffect,
    TransferSettings,
    Verify,
)

A, B, C = PeerId("A"), PeerId("B"), PeerId("C")
SETTINGS = TransferSettings(window=2, retry_s=0.5, slow_s=2.0, timeout_s=60.0)


def sha(chunk: int, round: int = 1) -> bytes:
    return hashlib.sha256(f"{round}/{chunk}".encode()).digest()


def offer(num_chunks: int, wrong: tuple[int, ...] = ()) -> bytes:
    return b"".join(sha(chunk, -1 if chunk in wrong else 1) for chunk in range(num_chunks))


def begin(num_chunks: int, *peers: PeerId) -> ContentTransfer:
    transfer = ContentTransfer(num_chunks, SETTINGS)
    assert transfer.peers(peers, 0.0) == [AskDonor(peer) for peer in peers]
    return transfer


def requests(effects: list[TransferEffect]) -> list[tuple[PeerId, int]]:
    return [(effect.peer, effect.chunk) for effect in effects if isinstance(effect, Request)]


def test_vectors_are_cut_each_by_itself() -> None:
    plan = ChunkPlan([5, 0, 4], 2)
    assert list(plan) == [
        ChunkPlace(0, 0, 2),
        ChunkPlace(0, 2, 4),
        ChunkPlace(0, 4, 5),
        ChunkPlace(2, 0, 2),
        ChunkPlace(2, 2, 4),
    ]
    for none in (-1, 5):
        with pytest.raises(IndexError):
            plan.place(none)


def test_chunks_are_asked_of_all_donors_a_window_at_a_time() -> None:
    transfer = begin(5, A, B)
    assert requests(transfer.offered(A, offer(5), 0.0)) == [(A, 0), (A, 1)]
    assert requests(transfer.offered(B, offer(5), 0.0)) == [(B, 2), (B, 3)]
    assert transfer.received(A, 0, sha(0), 0.1) == [Store(0), Request(A, 4)]
    for peer, chunk in ((A, 1), (B, 2), (B, 3)):
        assert transfer.received(peer, chunk, sha(chunk), 0.2) == [Store(chunk)]
    assert transfer.received(A, 4, sha(4), 0.3) == [Store(4), Verify()]
    assert transfer.verified(True, 0.4) == [TransferDone()]
    assert transfer.sources == {A: 3, B: 2}
    assert transfer.wake_at_s == math.inf


def test_while_a_donor_of_this_host_gives_all_nobody_else_is_asked_for_any() -> None:
    transfer = begin(5, A, B, C)
    assert requests(transfer.offered(A, offer(5), 0.0)) == [(A, 0), (A, 1)], "nobody else has offered it yet"
    assert requests(transfer.offered(B, offer(5), 0.1, is_here=True)) == [(B, 2), (B, 3)]
    assert requests(transfer.offered(C, offer(5), 0.1)) == []
    assert requests(transfer.received(A, 0, sha(0), 0.2)) == []
    assert requests(transfer.received(B, 2, sha(2), 0.2)) == [(B, 4)]


def test_a_donor_of_this_host_that_is_slow_or_lost_is_helped_by_others() -> None:
    for trouble in ("slow", "lost"):
        transfer = begin(2, A, B)
        assert requests(transfer.offered(B, offer(2), 0.0, is_here=True)) == [(B, 0), (B, 1)]
        assert requests(transfer.offered(A, offer(2), 0.0)) == []
        effects = transfer.lost(B, 2.5) if trouble == "lost" else transfer.tick(2.5)
        assert requests(effects) == [(A, 0), (A, 1)], trouble


def test_a_donor_of_this_host_with_another_offer_is_not_preferred() -> None:
    transfer = begin(4, A, B, C)
    transfer.offered(A, offer(4), 0.0)
    transfer.offered(C, offer(4), 0.0)
    assert requests(transfer.offered(B, offer(4, wrong=(3,)), 0.0, is_here=True)) == []


def test_a_donor_that_dies_is_replaced_in_the_middle() -> None:
    transfer = begin(3, A, B)
    transfer.offered(A, offer(3), 0.0)
    transfer.offered(B, offer(3), 0.0)
    transfer.received(A, 0, sha(0), 0.1)
    assert requests(transfer.lost(A, 0.2)) == [(B, 1)]
    assert transfer.received(A, 1, sha(1), 0.3) == []


def test_a_wrong_chunk_costs_only_itself_and_names_its_sender() -> None:
    transfer = begin(2, A, B)
    transfer.offered(A, offer(2), 0.0)
    transfer.offered(B, offer(2), 0.0)
    [distrust, *again] = transfer.received(A, 0, b"something else", 0.1)
    assert isinstance(distrust, Distrust)
    assert distrust.peer == A
    assert "chunk 0" in distrust.reason
    assert requests(again) == [(B, 0), (B, 1)]
    assert transfer.offered(A, offer(2), 0.2) == []
    assert transfer.distrusted == {A}
    transfer.tick(1000.0)
    assert transfer.distrusted == set(), "it has taken too long: everybody gets another chance"


def test_an_offer_whose_whole_is_not_the_record_s_convicts_who_made_it() -> None:
    transfer = begin(2, A, B)
    assert requests(transfer.offered(A, offer(2, wrong=(1,)), 0.0)) == [(A, 0), (A, 1)]
    assert transfer.offered(B, offer(2), 0.0) == []
    transfer.received(A, 0, sha(0), 0.1)
    assert transfer.received(A, 1, sha(1, -1), 0.1) == [Store(1), Verify()]
    effects = transfer.verified(False, 0.2)
    # Chunk 0 is what the other offer says, too: it stays.
    assert [type(effect) for effect in effects] == [Distrust, Request]
    assert transfer.distrusted == {A}
    assert requests(effects) == [(B, 1)]
    assert transfer.received(B, 1, sha(1), 0.3) == [Store(1), Verify()]


def test_the_more_frequent_offer_is_believed_first() -> None:
    transfer = begin(2, A, B, C)
    transfer.offered(A, offer(2, wrong=(0, 1)), 0.0)
    transfer.offered(B, offer(2), 0.0)
    assert requests(transfer.offered(C, offer(2), 0.0)) == [(B, 0), (C, 1)]


def test_an_offer_of_another_size_is_of_another_model() -> None:
    transfer = begin(2, A)
    [distrust, nobody] = transfer.offered(A, offer(3), 0.0)
    assert isinstance(distrust, Distrust)
    assert nobody == Nobody()


def test_a_silent_donor_is_helped_by_the_others_and_what_it_sends_late_still_counts() -> None:
    transfer = begin(4, A, B)
    transfer.offered(A, offer(4), 0.0)
    transfer.offered(B, offer(4), 0.0)
    transfer.received(B, 2, sha(2), 1.0)
    transfer.received(B, 3, sha(3), 1.5)
    assert requests(transfer.tick(1.9)) == []
    assert requests(transfer.tick(2.1)) == [(B, 0), (B, 1)]
    assert transfer.received(A, 0, sha(0), 2.2) == [Store(0)]
    assert transfer.received(B, 0, sha(0), 2.3) == []
    assert transfer.received(B, 1, sha(1), 2.4) == [Store(1), Verify()]


def test_who_does_not_hold_the_record_is_asked_again_and_nobody_is_reported_once() -> None:
    transfer = begin(1, A, B)
    assert transfer.refused(A, 0.1) == []
    assert transfer.refused(B, 0.1) == [Nobody()]
    assert transfer.tick(0.3) == []
    assert transfer.tick(0.7) == [AskDonor(A), AskDonor(B)]
    assert requests(transfer.offered(B, offer(1), 0.8)) == [(B, 0)]
    assert transfer.refused(B, 0.9) == [Nobody()]


def test_nobody_is_reported_when_there_is_nobody() -> None:
    assert ContentTransfer(1, SETTINGS).peers((), 0.0) == [Nobody()]


def test_a_stage_without_state_is_verified_at_once() -> None:
    assert ContentTransfer(0, SETTINGS).peers((), 0.0) == [Verify()]


def test_after_its_time_everybody_gets_another_chance() -> None:
    transfer = begin(1, A)
    transfer.offered(A, offer(1), 0.0)
    transfer.received(A, 0, b"", 0.1)
    effects = transfer.tick(60.5)
    assert effects == [Late(1, 1), AskDonor(A)]
    assert requests(transfer.offered(A, offer(1), 60.6)) == [(A, 0)]


def test_peers_that_leave_the_view_are_not_waited_for() -> None:
    transfer = begin(1, A, B)
    transfer.offered(A, offer(1), 0.0)
    transfer.offered(B, offer(1), 0.0)
    assert requests(transfer.peers((B,), 0.1)) == [(B, 0)]
