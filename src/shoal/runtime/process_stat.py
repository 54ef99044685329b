"""What is known of a process, whoever says it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """The fields of /proc/<pid>/stat (proc_pid_stat(5)) that shoal reads.

    Attributes:
        state: one letter, which `has_ended` and `is_stopped` know.
        parent_pid: the nearest subreaper once the parent has ended.
        session: which its children inherit.
        started_s: when it started, on a clock of the system's that is never set: seconds after the machine did, and
            without /proc since 1970. It tells a process from an earlier one of the same number.
        args_start, args_end: addresses of its command line in its own memory; 0 where they are not known.
    """

    pid: int
    state: str
    parent_pid: int
    session: int
    started_s: float
    args_start: int
    args_end: int

    @property
    def has_ended(self) -> bool:
        """Whether it has ended and is not reaped yet."""
        return self.state == "Z"

    @property
    def is_stopped(self) -> bool:
        """Whether it stands still, by a signal or a debugger, until somebody lets it go on."""
        return self.state in "Tt"
