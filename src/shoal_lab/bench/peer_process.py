"""The program of a peer process: `python -m shoal_lab.bench.peer_process SOCKET_FD LIFELINE_FD`."""

from __future__ import annotations

import importlib
import socket
import sys
from collections.abc import Iterator
from typing import cast

from shoal.errors import InvariantViolation
from shoal.runtime.frames import framed, received
from shoal.runtime.lifeline import watch_in_thread
from shoal.runtime.process_control import kill_descendants
from shoal_lab.bench.peer import PeerMain, Seat
from shoal_lab.bench.peer_messages import Call, Ready, Request, Result, Start


def main() -> None:
    """Serve calls until the benchmark closes the socket; end at once when the benchmark's process is gone."""
    socket_fd, lifeline_fd = (int(word) for word in sys.argv[1:])
    watch_in_thread(lifeline_fd, "")
    try:
        _serve(socket_fd)
    finally:
        # The benchmark does the same, unless it was killed: then this thread may end before the one on the lifeline.
        kill_descendants()


def _serve(socket_fd: int) -> None:
    with socket.socket(fileno=socket_fd) as sock:
        requests: Iterator[Request] = received(sock, Request)
        start = next(requests, None)
        if not isinstance(start, Start):
            raise InvariantViolation(f"a peer process begins with its start, not with {start}")
        module, _, function = start.target.partition(":")
        enter = cast("PeerMain", getattr(importlib.import_module(module), function))
        with enter(Seat(start.index, start.num_peers, start.arguments)) as calls:
            sock.sendall(framed(Ready()))
            for call in _calls(requests):
                to_call = calls[call.name]
                sock.sendall(framed(Ready()))
                if next(requests, None) is None:
                    return
                sock.sendall(framed(Result(to_call(*call.args))))


def _calls(requests: Iterator[Request]) -> Iterator[Call]:
    for request in requests:
        if not isinstance(request, Call):
            raise InvariantViolation(f"a peer process that waits for a call got {request}")
        yield request


if __name__ == "__main__":
    main()
