"""What differs between two records: it gives the same bytes back, and is short where they are alike."""

from __future__ import annotations

import random

import pytest

from shoal.errors import RemoteProtocolError
from shoal.ids import Ballot, PeerId
from shoal.swarm import record_changes as module
from shoal.swarm.record_changes import changes, completed
from shoal.swarm.records import seal
from shoal.wire.messages.round import MAX_RECORD_BYTES, Copied, Record, StageHashes, StageOutcome

C = PeerId("C")


def body(round: int, members: list[PeerId]) -> bytes:
    rng = random.Random(round)
    outcomes = tuple(
        StageOutcome(
            stage,
            0,
            tuple(members),
            (800,) * len(members),
            StageHashes(*(rng.randbytes(32).hex() for _ in range(3))),
            0,
        )
        for stage in range(4)
    )
    return seal(Record("run", round, Ballot(1, C, 1), "0" * 64, outcomes, (), (), {}), C, lambda _: b"").body


@pytest.mark.parametrize("seed", range(30))
def test_what_differs_gives_the_same_bytes_back(seed: int) -> None:
    rng = random.Random(seed)
    base = rng.randbytes(rng.choice((0, 10, 32, 5000)))
    parts = [base[at : at + rng.randrange(200)] for at in (rng.randrange(len(base) + 1) for _ in range(8))]
    wanted = b"".join(part if rng.random() < 0.7 else rng.randbytes(rng.randrange(60)) for part in parts)
    fresh, copied = changes(wanted, base)
    assert completed(fresh, copied, base) == wanted
    assert len(fresh) + sum(part.length for part in copied) == len(wanted)


def test_of_two_records_with_the_same_members_the_hashes_differ_and_little_else() -> None:
    members = [PeerId(f"12D3KooW{number:044}") for number in range(100)]
    before, after = body(1, members), body(2, members)
    fresh, copied = changes(after, before)
    assert completed(fresh, copied, before) == after
    assert len(fresh) < 4 * (3 * 64 + 3 * module.BLOCK_BYTES)
    assert len(copied) <= 4 * 4 + 2
    assert len(after) > 20_000
    fresh, _ = changes(body(2, [*members[:40], PeerId("N"), *members[41:]]), before)
    assert len(fresh) < 4 * (3 * 64 + 3 * module.BLOCK_BYTES + 2 * 55), "one member of each stage is another one"


def test_what_is_like_nothing_before_is_sent_as_it_is_and_not_looked_at_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_SCANNED", 100)
    base = bytes(range(256))
    wanted = random.Random(0).randbytes(200) + base
    assert changes(wanted, base) == (wanted, ())
    monkeypatch.setattr(module, "MOST_SCANNED", 1000)
    assert changes(wanted, base) == (wanted[:200], (Copied(200, 0, 256),))


@pytest.mark.parametrize(
    ("fresh", "copied"),
    [
        (b"", (Copied(1, 0, 4),)),
        (b"abc", (Copied(2, 0, 4), Copied(2, 0, 4))),
        (b"", (Copied(0, 7, 4),)),
        (b"", (Copied(0, 0, 11),)),
        (b"", (Copied(0, 0, 10),) * (MAX_RECORD_BYTES // 10 + 1)),
    ],
)
def test_parts_that_there_are_not_or_without_end_are_refused(fresh: bytes, copied: tuple[Copied, ...]) -> None:
    with pytest.raises(RemoteProtocolError, match="cannot be made of"):
        completed(fresh, copied, bytes(10))
