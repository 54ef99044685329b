"""One member of hivemind's group in the benchmark `ring`: a `DecentralizedAverager` as its users run it.

Only the all-reduce is timed, not the search for a group before it, which takes seconds: a group is formed first, and
waits for its trigger.
"""

# hivemind ships no type information.
# pyright: basic, reportMissingTypeStubs=false

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import TimeoutError as ResultTimeout
from contextlib import contextmanager, suppress

import hivemind
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import AveragingStage, StepControl

from shoal.clock import SystemClock
from shoal.errors import InvariantViolation
from shoal_lab.bench.peer import Calls, Seat

_MATCHMAKING_S = 1.0
_POLL_S = 0.02
_LISTEN = ["/ip4/127.0.0.1/tcp/0"]


class _AveragerPeer:
    """An averager, and the step that it is in."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._clock = SystemClock()
        self._dht: hivemind.DHT | None = None
        self._averager: DecentralizedAverager | None = None
        self._step: StepControl | None = None

    def address(self) -> str:
        """The first member founds the DHT, and says where it is."""
        if self._seat.index > 0:
            return ""
        self._dht = hivemind.DHT(start=True, host_maddrs=_LISTEN)
        return str(self._dht.get_visible_maddrs()[0])

    def meet(self, address: str, num_elements: int) -> None:
        """Everyone joins the DHT and starts the averager of a vector."""
        if self._dht is None:
            self._dht = hivemind.DHT(initial_peers=[address], start=True, host_maddrs=_LISTEN)
        self._averager = DecentralizedAverager(
            [torch.full((num_elements,), float(self._seat.index))],
            self._dht,
            start=True,
            prefix="bench",
            target_group_size=self._seat.num_peers,
            min_group_size=self._seat.num_peers,
            min_matchmaking_time=_MATCHMAKING_S,
            request_timeout=_MATCHMAKING_S / 2,
        )

    def form(self) -> None:
        """Find the group of the next step."""
        if self._averager is None:
            raise InvariantViolation("the averager has not been started")
        step = self._averager.step(require_trigger=True, wait=False)
        if not isinstance(step, StepControl):
            raise InvariantViolation("hivemind has waited for the step")
        while step.stage is not AveragingStage.AWAITING_TRIGGER:
            with suppress(ResultTimeout):
                step.result(_POLL_S)
        self._step = step

    def step(self) -> float:
        """Return the seconds from the trigger to the average."""
        if self._step is None:
            raise InvariantViolation("the group has not been formed")
        start_s = self._clock.now_s()
        self._step.allow_allreduce()
        group = self._step.result()
        taken_s = self._clock.now_s() - start_s
        if group is None or len(group) != self._seat.num_peers:
            raise InvariantViolation("not everyone has taken part: the measurement would mean nothing")
        return taken_s

    def close(self) -> None:
        """End the processes of hivemind."""
        if self._averager is not None:
            self._averager.shutdown()
        if self._dht is not None:
            self._dht.shutdown()


@contextmanager
def main(seat: Seat) -> Generator[Calls, None, None]:
    """Offer the calls of a member, in the order in which they have to be made; `form` and `step` again and again."""
    torch.set_num_threads(1)
    # Files of the strategy that hivemind sets stay in /dev/shm when its processes are ended.
    torch.multiprocessing.set_sharing_strategy("file_descriptor")
    member = _AveragerPeer(seat)
    try:
        yield {"address": member.address, "meet": member.meet, "form": member.form, "step": member.step}
    finally:
        member.close()
