"""A server: what it serves, what its units cost, how it moves to another stage and leaves."""

from __future__ import annotations

from logging import ERROR, WARNING
from typing import Any

from shoal.events.base import Event
from shoal.ids import PeerId


class ServerIsReady(Event, frozen=True, tag="server.ready"):
    """This server serves a stage."""

    stage: int
    device: str
    threads: int
    nice: int
    peer: PeerId


class ServerTakesLess(Event, frozen=True, tag="server.takes_less"):
    """This server's memory has room for smaller microbatches only, so that trainers cut them further, or for fewer
    steps of different trainers at the same time, so that others wait or go elsewhere. What is said of files is why
    none of them helps, if none may."""

    level = WARNING
    stage: int
    cap: int | None
    steps: int
    no_files: str
    memory: dict[str, Any]


class ServerUsesDisk(Event, frozen=True, tag="server.uses_disk"):
    """This server's memory has no room for all of its stage: what rounds alone need lies in files (vectors), so that
    rounds wait for the disk, or also what the inner optimizer knows (moments), which each step reads and writes."""

    level = WARNING
    do = (
        "give the server more memory (servers.max_memory_bytes if it is set, or fewer servers on its host), or leave "
        "it so if its disk is fast; with servers.max_disk_bytes = 0 it uses no disk, and takes less or no stage"
    )
    stage: int
    files: str
    file_bytes: int
    memory: dict[str, Any]


class ServerFileRefused(Event, frozen=True, tag="server.file_refused"):
    """The system gives no file for what was to lie in one: it lies in memory, of which there may be too little."""

    level = WARNING
    do = "do soon what the remedy says: a server whose memory is full takes less at a time, or ends and begins again"
    folder: str
    num_bytes: int
    reason: str
    remedy: str


class UnitBuilt(Event, frozen=True, tag="unit.built"):
    """A unit of the model could not be built without memory, and was built for real to see its size."""

    unit: int
    reason: str


class UnitCostsEstimated(Event, frozen=True, tag="unit_costs.estimated"):
    """So many units were not measured; their cost follows from those that were."""

    units: int


class UnitCostsKnown(Event, frozen=True, tag="unit_costs.known"):
    """What each unit of the model costs, and where that is known from."""

    source: str
    elapsed_s: float
    costs: list[float]


class WeightsRead(Event, frozen=True, tag="weights.read"):
    """The weights that the run begins from have been read, and what each unit hashes to is part of the run."""

    name_or_path: str
    commit: str | None
    took_s: float


class UnitsMeasured(Event, frozen=True, tag="unit_costs.measured"):
    """The units of the model were measured, and the cut follows from their costs."""

    elapsed_s: float
    units: list[int]

    def say(self) -> str:
        counts = " + ".join(map(str, self.units))
        return f"measured what the units of the model cost in {self.elapsed_s:.2f} s: {counts} units a stage"


class UnitCostsProblem(Event, frozen=True, tag="unit_costs.problem"):
    """What the units of the model cost could not be measured, read or kept."""

    level = WARNING
    why = "a unit cannot be measured on this device, or the file of earlier measurements cannot be read or written"
    says = "cut of the model: {reason}"
    reason: str


class ServerMoving(Event, frozen=True, tag="server.moving"):
    """This server prepares to serve another stage, as the client has ordered."""

    from_stage: int
    to_stage: int
    urgent: bool


class ServerDrained(Event, frozen=True, tag="server.drained"):
    """This server has ended the steps of the stage that it leaves, or has not in time."""

    stage: int
    in_time: bool


class ServerMoved(Event, frozen=True, tag="server.moved"):
    """A move of this server has ended: it serves this stage now."""

    from_stage: int
    to_stage: int
    stage: int


class ServerStays(Event, frozen=True, tag="server.stays"):
    """This server does not move: it may not, or cannot hold the other stage."""

    level = WARNING
    from_stage: int
    to_stage: int
    reason: str


class ServerGoesBack(Event, frozen=True, tag="server.goes_back"):
    """This server could not load the other stage, and serves again the one that it had left."""

    level = ERROR
    from_stage: int
    to_stage: int
    reason: str


class ServerCanLeave(Event, frozen=True, tag="server.may_leave"):
    """What this server holds is elsewhere as well, so that it leaves."""

    stage: int
    round: int
