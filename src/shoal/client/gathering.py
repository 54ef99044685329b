"""Before the first round, and before a client that was started again goes on: wait for servers, and lead them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import anyio

from shoal.averaging.coordinator import Leading, RoundCoordinator
from shoal.client.diary import RoundPlan
from shoal.client.ledger import Ledger
from shoal.client.reassignment import Reassignment
from shoal.client.stage_watch import StageWatch
from shoal.config.schema import Config
from shoal.control.membership import Membership
from shoal.errors import ControlError, NoPipeline
from shoal.events.mirror import MirrorsBehind
from shoal.events.stages import ServersFewer, StagesMissing

_SETTLE_S = 1.0
_NO_FURTHER_S = 30.0
"""Of a mirror that can be reached: a stage over a slow link takes as long."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """How a client's part of a run begins.

    Attributes:
        expected_servers: are waited for before the first round, for at most `servers_timeout_s`.
        succeeds: clients of other hosts have begun the run; this one takes it over when they are gone.
        patient: wait without a limit for the servers, or for one complete pipeline if `expected_servers` is 0; and for
            one that can compute a step which all others refuse.
    """

    expected_servers: int
    succeeds: bool = False
    patient: bool = False


class Gathering:
    """Has a client lead the servers that are there."""

    def __init__(
        self,
        config: Config,
        membership: Membership,
        coordinator: RoundCoordinator,
        reassignment: Reassignment,
        ledger: Ledger,
        stages: StageWatch,
        beginning: Beginning,
    ) -> None:
        """Wait for nobody yet."""
        self._config = config
        self._membership = membership
        self._coordinator = coordinator
        self._reassignment = reassignment
        self._ledger = ledger
        self._stages = stages
        self._beginning = beginning

    async def run(self) -> None:
        """Have the registry asked often while a stage waits for servers, until cancelled."""
        while True:
            await self._stages.incomplete()
            with self._membership.eager():
                await self._stages.complete()

    async def led(self, left: RoundPlan | None, base: str) -> tuple[Leading, bool]:
        """Wait for servers, lead them, and have each serve its stage.

        Args:
            left: the round in which an earlier start of this client was.
            base: hash of the record on which that is trained; empty: not known.

        Returns:
            Where the run stands, and whether it has not gone on without this client.

        Raises:
            NoPipeline: a stage has no replica, and none came in time.
            RoundAborted: another client coordinates the run now.
            ControlError: the replicas are not where this client was when it was started again.
        """
        config, membership, coordinator, begins = self._config, self._membership, self._coordinator, self._beginning
        expected = begins.expected_servers if left is None else 0
        await wait_for_servers(membership, config, self._ledger, coordinator, expected, patient=begins.patient)
        if not expected and left is None:
            await settled(membership)
        leading = await lead(coordinator, membership, config, patient=begins.patient)
        if left is None and base:
            await all_hold(coordinator, membership, config)
        if left is None and not begins.succeeds:
            await self._reassignment.place()
        return leading, is_where_it_was(left, base, leading, succeeds=begins.succeeds)


async def wait_for_servers(
    membership: Membership,
    config: Config,
    ledger: Ledger,
    coordinator: RoundCoordinator,
    expected: int,
    *,
    patient: bool,
) -> None:
    """Wait for the servers that were started with this client; go on with fewer if some do not come.

    Args:
        coordinator: takes the lead early if enough servers have come, but a stage has none.
        expected: how many servers there will be; 0: unknown, so wait for one complete pipeline.
        patient: wait without a limit.

    Raises:
        NoPipeline: a stage has no replica, and none came in time.
    """
    stages = config.num_stages
    with anyio.move_on_after(None if patient else config.servers_timeout_s):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_look_for_gap, membership, stages, ledger, coordinator)
            await membership.wait_for(
                lambda view: len(view.replicas) >= expected and view.max_pipelines(stages) > 0,
            )
            tasks.cancel_scope.cancel()
        return
    if not membership.view.max_pipelines(stages):
        raise NoPipeline(no_replica(membership.view.missing_stages(stages)))
    ledger.note(ServersFewer(expected, len(membership.view.replicas)))


async def _look_for_gap(membership: Membership, num_stages: int, ledger: Ledger, coordinator: RoundCoordinator) -> None:
    """Servers that start together on several hosts may not see each other in time, and take the same stage."""

    def has_gap() -> bool:
        view = membership.view
        return len(view.replicas) >= num_stages and not view.candidates and bool(view.missing_stages(num_stages))

    while True:
        await membership.wait_for(lambda _: has_gap())
        with anyio.move_on_after(_SETTLE_S) as timer:
            while has_gap():
                await membership.changed()
        if timer.cancelled_caught:
            ledger.note(StagesMissing(tuple(membership.view.missing_stages(num_stages))))
            coordinator.stand()
            return


async def lead(coordinator: RoundCoordinator, membership: Membership, config: Config, *, patient: bool) -> Leading:
    """Take the lead, if that was not done before, and wait until the servers agree on where the run is.

    A client that was started again has not seen the servers in its records: they may have died with it.

    Args:
        patient: wait for servers without a limit.

    Raises:
        NoPipeline: a stage has no replica, and none came in time.
        RoundAborted: another client coordinates the run now.
    """
    if not coordinator.leads:
        coordinator.stand()
    async with anyio.create_task_group() as tasks:
        if not patient:
            tasks.start_soon(_give_up, membership, config)
        await coordinator.leading()
        tasks.cancel_scope.cancel()
    return await coordinator.leading()


async def all_hold(coordinator: RoundCoordinator, membership: Membership, config: Config) -> None:
    """Let servers that begin without the state of the record that stands take it: return when all that are there hold
    it, or have taken long; those that still lack it come in later."""
    with anyio.move_on_after(config.servers_timeout_s):
        while {replica.peer for replica in membership.view.replicas} - (coordinator.holders or {}).keys():
            await coordinator.changed()


async def mirrored(coordinator: RoundCoordinator, ledger: Ledger) -> None:
    """Let mirrors take the record that stands before servers leave: return when those that can be reached have it of
    every stage, or have got no further for long."""
    while lacking := coordinator.unmirrored:
        with anyio.move_on_after(_NO_FURTHER_S) as timer:
            while coordinator.unmirrored == lacking:
                await coordinator.changed()
        if timer.cancelled_caught:
            ledger.note(MirrorsBehind(coordinator.round - 1, len({peer for peer, _ in lacking}), _NO_FURTHER_S))
            return


async def _give_up(membership: Membership, config: Config) -> None:
    """Wait until some stage has been without a replica for too long.

    Raises:
        NoPipeline: names it.
    """
    while True:
        if not membership.view.missing_stages(config.num_stages):
            await membership.changed()
            continue
        with anyio.move_on_after(config.servers_timeout_s) as timer:
            await membership.wait_for(lambda view: not view.missing_stages(config.num_stages))
        if timer.cancelled_caught:
            raise NoPipeline(no_replica(membership.view.missing_stages(config.num_stages)))


async def settled(membership: Membership) -> None:
    """Let servers that are just starting into the first round: return when nobody has come for a moment."""
    alone = False
    with membership.eager():
        while not alone:
            with anyio.move_on_after(_SETTLE_S) as timer:
                await membership.changed()
            alone = timer.cancelled_caught


def no_replica(stages: Sequence[int]) -> str:
    """Say that these stages have no replica, and what to do."""
    return (
        f"no replica serves stage {names(stages)} any more: start servers for it; "
        "see the servers' logs for why they ended"
    )


def names(stages: Sequence[int]) -> str:
    """Name stages in a sentence."""
    return ", ".join(map(str, stages)) or "of some pipeline"


def is_where_it_was(plan: RoundPlan | None, base: str, leading: Leading, *, succeeds: bool) -> bool:
    """Whether the run has not gone on without this client since its last start; a successor was never there.

    Args:
        plan: the round of the last start; None: there was none.
        base: hash of the record on which that round was trained, or is to be; empty: not known.
        succeeds: a client of another host has begun the run.

    Raises:
        ControlError: the replicas are further back.
    """
    if plan is None:
        return not succeeds and base in ("", leading.record_hash)
    if leading.base_round == plan.round - 1 and base in ("", leading.record_hash):
        return True
    if leading.outcome is None:
        raise ControlError(
            f"the servers hold record {leading.base_round}, but this client was in round {plan.round} before it "
            "was started again: start a new run, or servers that hold the record before"
        )
    return leading.base_round == plan.round and base in ("", leading.outcome.record.previous)
