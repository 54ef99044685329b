"""A child that answers, fails, dies, hangs and stands still, as it is told; and a parent that waits to be killed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Final

import msgspec

from shoal.errors import ConfigError, Contradiction
from shoal.runtime.child import Child, Parent

PROGRAM: Final = "tests.integration.runtime.child_program"


class Do(msgspec.Struct, frozen=True):
    what: str


class Done(msgspec.Struct, frozen=True, tag=True):
    what: str


class Arguments(msgspec.Struct, frozen=True, tag=True):
    given: list[str]
    session: int
    ignores_interrupt: bool


Answer = Done | Arguments


def _raise(error: Exception) -> None:
    raise error


def _print_and_fail() -> None:
    print("\n".join(f"line {number}" for number in range(60)), flush=True)
    raise ValueError("this cannot be")


DEEDS: Final[dict[str, Callable[[], object]]] = {
    "rest": lambda: None,
    "refuse": lambda: _raise(ConfigError("data.x = 1: say 2")),
    "contradict": lambda: _raise(Contradiction("two logs", round=1, stage=0, peer="p")),
    "fail": _print_and_fail,
    "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: sys.exit(7),
    "hang": signal.pause,
    "stand still": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def main() -> None:
    """Do what is told, one thing after the other."""
    with Parent(Do) as parent:
        for order in parent.orders:
            if order.what == "arguments":
                ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
                parent.say(Arguments(sys.argv[3:], os.getsid(0), ignored))
                continue
            parent.say(Done(f"about to {order.what}"))
            DEEDS[order.what]()
            parent.say(Done(order.what))


def start_and_wait() -> None:
    """Be a parent: print the child's number, and wait to be killed."""
    child = Child[Answer](PROGRAM, Answer)
    child.tell(Do("hang"))
    child.hear()
    print(child.pid, flush=True)
    signal.pause()


if __name__ == "__main__":
    start_and_wait() if sys.argv[1:] == ["parent"] else main()
