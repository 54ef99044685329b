"""Section `emulation`: what a host pretends, so that slow devices and deaths at a chosen point can be measured."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Final, NamedTuple

from pydantic import Field, field_validator

from shoal.config.base import NonNegativeFloat, Section, Words

POINTS: Final = {
    "server": ("forward", "backward", "prepared", "commit", "ring", "staged", "record", "swapped", "fetch", "donate"),
    "trainer": ("forward", "prepared", "commit"),
    "data_server": ("lease",),
    "client": ("prepared",),
    "mirror": ("file", "sync", "manifest", "rename", "renamed", "removal"),
}
"""Where a role can die, see `shoal_lab.emulation.death_points`."""


class Death(NamedTuple):
    """A process that kills itself: which one (of several: the first one there), where, and in which step or round."""

    role: str
    processes: tuple[int, ...]
    point: str
    number: int


def parse_death(text: str) -> Death:
    """Return what a text such as server:1@commit#120 says.

    server:1/3@commit#120 is server 1 or server 3, whichever is there first.

    Raises:
        ValueError: it says nothing, or names a point that the role does not have.
    """
    found = re.fullmatch(r"(\w+):(\d+(?:/\d+)*)@(\w+)#(\d+)", text)
    if found is None:
        raise ValueError(f"{text!r} is no death; write ROLE:INDEX@POINT#NUMBER, as in server:1@commit#120")
    role, point = found[1], found[3]
    if point not in POINTS.get(role, ()):
        known = "; ".join(f"{name}: {', '.join(points)}" for name, points in POINTS.items())
        raise ValueError(f"{text!r}: there is no point {point!r} of a {role!r}; there are {known}")
    return Death(role, tuple(map(int, found[2].split("/"))), point, int(found[4]))


class SampleTime(NamedTuple):
    """How long a forward of a server takes for each sample, from one of its operations on."""

    server: int
    seconds: float
    operation: int


def parse_sample_time(text: str) -> SampleTime:
    """Return what a text such as 1=0.01 or 1=0.0025#350 says.

    Raises:
        ValueError: it says nothing, or a time that is none.
    """
    found = re.fullmatch(r"(\d+)=(\d*\.?\d+)(?:#(\d+))?", text)
    if found is None or float(found[2]) <= 0:
        raise ValueError(
            f"{text!r} is no time of a sample; write SERVER=SECONDS or SERVER=SECONDS#OPERATION, as in 1=0.01"
        )
    return SampleTime(int(found[1]), float(found[2]), int(found[3] or 0))


class EmulationConfig(Section):
    """What the processes of this host pretend; nothing of it is for training."""

    call_s: NonNegativeFloat = Field(
        default=0.0,
        description="The least time of each forward and each backward of a stage, evaluations included: what computing "
        "leaves of it is waited for, so that many slow devices fit on few cores. 0: as fast as the device is.",
    )
    sample_s: Words = Field(
        default=(),
        description="Servers of this host whose forwards last so long for each sample, as those of machines of "
        "different speed do; each SERVER=SECONDS, and SERVER=SECONDS#OPERATION from that operation of it on, as in "
        "0=0.0025 1=0.01 1=0.0025#350. call_s does not count for them. benchmarks/shares.py measures with it.",
    )
    deaths: Words = Field(
        default=(),
        description="Processes of this host that kill themselves, each ROLE:INDEX@POINT#NUMBER, as in "
        "server:1@commit#120: in which step, or at the end of which round. benchmarks/faults.py measures with it.",
    )

    @field_validator("deaths")
    @classmethod
    def _check_deaths(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            parse_death(text)
        return value

    @field_validator("sample_s")
    @classmethod
    def _check_times(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        times = sorted(map(parse_sample_time, value), key=lambda time: (time.server, time.operation))
        first: dict[int, SampleTime] = {}
        for time in times:
            if first.setdefault(time.server, time).operation:
                raise ValueError(f"server {time.server} has no time before its operation {time.operation}")
        for one, two in pairwise(times):
            if (one.server, one.operation) == (two.server, two.operation):
                raise ValueError(f"server {one.server} has two times from operation {one.operation} on")
        return value

    def sample_times_of(self, server: int) -> tuple[SampleTime, ...]:
        """Return how long samples take at one server, in the order of its operations; nothing if that is as it is."""
        times = (time for time in map(parse_sample_time, self.sample_s) if time.server == server)
        return tuple(sorted(times, key=lambda time: time.operation))

    def is_about(self, role: str, index: int) -> bool:
        """Whether one process is to pretend anything."""
        has_pace = role == "server" and bool(self.call_s or self.sample_times_of(index))
        return has_pace or bool(self.deaths_of(role, index))

    def deaths_of(self, role: str, index: int) -> tuple[Death, ...]:
        """Return the deaths of one process."""
        return tuple(
            death for death in map(parse_death, self.deaths) if death.role == role and index in death.processes
        )
