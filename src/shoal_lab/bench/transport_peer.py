"""The two processes of the benchmark `transport`: peer 0 receives, peer 1 sends and measures."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from shoal_lab.bench.peer import Calls, Seat
from shoal_lab.bench.transport_hivemind import HivemindEnd
from shoal_lab.bench.transport_ours import OurEnd
from shoal_lab.bench.transport_raw import RawEnd
from shoal_lab.bench.transport_rendezvous import Rendezvous


@contextmanager
def main(seat: Seat) -> Generator[Calls, None, None]:
    """Offer all sides; of each call one peer returns the value, the other one None."""
    rendezvous = Rendezvous(Path(seat.arguments["folder"]), is_first=seat.index == 0)
    link = seat.arguments["link"]
    ours = OurEnd(rendezvous, link)
    with RawEnd(rendezvous, link) as raw, HivemindEnd(rendezvous) as hivemind:
        yield {
            "rate": ours.rate,
            "round_trip": ours.round_trip,
            "overtaking": ours.overtaking,
            "raw_rate": raw.rate,
            "raw_round_trip": raw.round_trip,
            "raw_waiting": raw.waiting,
            "hivemind_rate": hivemind.rate,
        }
