"""A link's bytes arrive late, in order, at the line's rate, in bursts after losses and wrong where it flips."""

from __future__ import annotations

import itertools
import random

import pytest

from shoal_lab.faults.link import PACKET_BYTES, LinkConditions
from shoal_lab.faults.link_model import LinkModel, Parcel

MBIT = 1e6 / 8


def stream(model: LinkModel, *, num_bytes: int, rate_bytes_per_s: float, piece_bytes: int = 5000) -> list[Parcel]:
    """Give the model zeros at this rate and return what arrives."""
    parcels: list[Parcel] = []
    for start in range(0, num_bytes, piece_bytes):
        size = min(piece_bytes, num_bytes - start)
        parcels += model.take(start / rate_bytes_per_s, bytes(size))
    return parcels


def test_a_message_on_an_idle_link_takes_its_delay_and_its_time_on_the_line() -> None:
    model = LinkModel(LinkConditions(rate_bytes_per_s=20 * MBIT, delay_s=0.075), 0)
    for now_s in (10.0, 11.0):  # what was not used of the line is not saved up
        (parcel,) = model.take(now_s, b"x" * 1000)
        assert parcel.data == b"x" * 1000
        assert parcel.arrives_s == pytest.approx(now_s + 0.075 + 1000 / (20 * MBIT))


@pytest.mark.parametrize("piece_bytes", [100, 5000, 65536])
def test_a_flooded_line_carries_its_rate_and_nothing_arrives_faster(piece_bytes: int) -> None:
    model = LinkModel(LinkConditions(rate_bytes_per_s=20 * MBIT, delay_s=0.075), 0)
    parcels = [p for _ in range(2_500_000 // piece_bytes) for p in model.take(5.0, bytes(piece_bytes))]
    carried = sum(len(p.data) for p in parcels)
    assert parcels[-1].arrives_s == pytest.approx(5.075 + carried / (20 * MBIT))
    arrived = 0
    for parcel in parcels:
        arrived += len(parcel.data)
        assert parcel.arrives_s == pytest.approx(5.075 + arrived / (20 * MBIT))


def test_the_queue_is_bounded_and_says_when_there_is_room() -> None:
    conditions = LinkConditions(rate_bytes_per_s=20 * MBIT)
    model = LinkModel(conditions, 0)
    assert conditions.queue_bytes == 250_000
    assert model.room_bytes(1.0) == 250_000
    model.take(1.0, bytes(250_000))
    assert model.room_bytes(1.0) == pytest.approx(0, abs=1)
    assert model.room_at_s(8192) == pytest.approx(1.0 + 8192 / (20 * MBIT))
    assert model.room_bytes(model.room_at_s(8192)) == pytest.approx(8192)
    assert model.room_bytes(9.0) == 250_000
    assert LinkConditions(rate_bytes_per_s=1000).queue_bytes == 64 * 1024


def test_order_is_kept_under_jitter_which_adds_up_to_its_amount() -> None:
    model = LinkModel(LinkConditions(delay_s=0.05, jitter_s=0.02), 1)
    parcels = [model.take(number * 0.05, b"x")[0] for number in range(200)]
    extra_s = [parcel.arrives_s - number * 0.05 - 0.05 for number, parcel in enumerate(parcels)]
    assert 0 <= min(extra_s) < 0.002
    assert 0.018 < max(extra_s) <= 0.02
    dense = stream(model, num_bytes=2_000_000, rate_bytes_per_s=20 * MBIT)
    assert all(a.arrives_s <= b.arrives_s for a, b in itertools.pairwise(dense))


def test_a_loss_is_a_stall_and_then_a_burst_of_all_that_waited() -> None:
    conditions = LinkConditions(rate_bytes_per_s=20 * MBIT, delay_s=0.075, loss=0.001)
    model = LinkModel(conditions, 0)
    # At the line's own rate, so that nothing queues and every gap is a loss.
    parcels = stream(model, num_bytes=10_000_000, rate_bytes_per_s=20 * MBIT)
    assert model.num_lost == pytest.approx(0.001 * 10_000_000 / PACKET_BYTES, rel=0.6)
    gaps = [b.arrives_s - a.arrives_s for a, b in itertools.pairwise(parcels)]
    assert max(gaps) == pytest.approx(conditions.repair_s, abs=0.003)
    bursts = [sum(len(p.data) for p in same) for _, same in itertools.groupby(parcels, lambda p: p.arrives_s)]
    assert max(bursts) == pytest.approx(conditions.repair_s * 20 * MBIT, rel=0.05)
    # It costs time once, not rate: the burst makes up for the stall.
    assert parcels[-1].arrives_s <= 10_000_000 / (20 * MBIT) + 0.075 + 2 * conditions.repair_s


def test_a_packet_that_is_lost_again_waits_twice_as_long_again() -> None:
    conditions = LinkConditions(delay_s=0.05, loss=0.5)
    model = LinkModel(conditions, 3)
    late_s = {round(model.take(n * 100.0, b"x")[0].arrives_s - n * 100.0 - 0.05, 6) for n in range(200)}
    repair_s = conditions.repair_s
    assert {0.0, *(round(repair_s * (2**n - 1), 6) for n in (1, 2, 3))} <= late_s
    assert model.num_lost == pytest.approx(100, rel=0.3)


def test_flipped_bits_depend_on_the_seed_and_the_place_in_the_stream_only() -> None:
    data = random.Random(0).randbytes(300_000)

    def received(seed: int, piece_bytes: int) -> tuple[bytes, int]:
        model = LinkModel(LinkConditions(bytes_per_flip=10_000), seed)
        parcels = [
            parcel
            for start in range(0, len(data), piece_bytes)
            for parcel in model.take(0.0, data[start : start + piece_bytes])
        ]
        return b"".join(parcel.data for parcel in parcels), model.num_flipped

    whole, num_flipped = received(1, 300_000)
    assert 15 < num_flipped < 50
    assert sum((a ^ b).bit_count() for a, b in zip(whole, data, strict=True)) == num_flipped
    assert received(1, 777) == (whole, num_flipped)
    assert received(2, 777)[0] != whole


def test_the_same_seed_gives_the_same_parcels_and_another_one_others() -> None:
    def fate(seed: int) -> list[Parcel]:
        model = LinkModel(LinkConditions(rate_bytes_per_s=20 * MBIT, jitter_s=0.01, loss=0.01), seed)
        return stream(model, num_bytes=1_000_000, rate_bytes_per_s=10 * MBIT)

    assert fate(1) == fate(1) != fate(2)


def test_the_end_of_the_stream_arrives_behind_the_bytes() -> None:
    model = LinkModel(LinkConditions(rate_bytes_per_s=20 * MBIT, delay_s=0.075), 0)
    *_, last = model.take(0.0, bytes(100_000))
    assert model.take(0.0, b"") == [Parcel(last.arrives_s, b"")]
    assert model.take(9.0, b"") == [Parcel(9.075, b"")]


def test_changed_conditions_are_for_what_comes_after_and_never_overtake() -> None:
    model = LinkModel(LinkConditions(delay_s=1.0), 0)
    (slow,) = model.take(0.0, b"x")
    model.change(LinkConditions(bytes_per_flip=1e-9))
    assert model.conditions.delay_s == 0
    (fast,) = model.take(0.5, b"\0")
    assert fast.arrives_s == slow.arrives_s == 1.0
    assert fast.data != b"\0"
    (later,) = model.take(2.0, b"\0")
    assert later.arrives_s == 2.0
