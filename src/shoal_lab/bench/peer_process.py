"""The program of a peer process: `python -m shoal_lab.bench.peer_process`, a child (`runtime.child`)."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterator
from typing import cast

from shoal.errors import InvariantViolation, ShoalError
from shoal.runtime.child import Parent
from shoal.runtime.process_control import kill_descendants
from shoal_lab.bench.peer import PeerMain, Seat
from shoal_lab.bench.peer_messages import Call, Ready, Request, Result, Start


def main() -> None:
    """Serve calls until the benchmark closes the socket; end at once when the benchmark's process is gone."""
    with Parent[Request](Request) as benchmark:
        try:
            _serve(benchmark)
        except ShoalError:
            # As of any other error, the benchmark shows the traceback.
            traceback.print_exc()
            sys.exit(1)
        finally:
            # The benchmark does the same, unless it was killed: this thread may end before the one on the lifeline.
            kill_descendants()


def _serve(benchmark: Parent[Request]) -> None:
    start = next(benchmark.orders, None)
    if not isinstance(start, Start):
        raise InvariantViolation(f"a peer process begins with its start, not with {start}")
    module, _, function = start.target.partition(":")
    enter = cast("PeerMain", getattr(importlib.import_module(module), function))
    with enter(Seat(start.index, start.num_peers, start.arguments)) as calls:
        benchmark.say(Ready())
        for call in _calls(benchmark.orders):
            to_call = calls[call.name]
            benchmark.say(Ready())
            if next(benchmark.orders, None) is None:
                return
            benchmark.say(Result(to_call(*call.args)))


def _calls(requests: Iterator[Request]) -> Iterator[Call]:
    for request in requests:
        if not isinstance(request, Call):
            raise InvariantViolation(f"a peer process that waits for a call got {request}")
        yield request


if __name__ == "__main__":
    main()
