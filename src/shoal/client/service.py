"""The role's entry: joins the swarm, has its data server started, runs the rounds, sums the run up.

A client that was started again goes on at once, with the servers that it knew; it joins the swarm meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import msgspec

from shoal.averaging.signing import Signer
from shoal.checkpoint.stored import StoredCheckpoint
from shoal.client.client import Beginning, Client, ClientRun
from shoal.client.diary import FILE_NAME as DIARY_FILE
from shoal.client.diary import Diary
from shoal.client.ledger import Ledger
from shoal.client.resuming import needed_checkpoint
from shoal.clock import Clock, SystemClock
from shoal.config.schema import Config
from shoal.control.counter_report import counters_logged
from shoal.control.dial_back import DialBack
from shoal.control.join import join_swarm
from shoal.control.membership import Membership
from shoal.control.peers_file import PeersFile, keep_peers_file
from shoal.control.records import ClientRecord, RunRecord, Undialled
from shoal.control.registry import Registry
from shoal.control.role_start import ClientSpec, open_role_endpoint
from shoal.control.run_end import say_run_is_over
from shoal.errors import ControlError, StorageError
from shoal.events.base import tell
from shoal.events.run import DiskAwaited
from shoal.file_thread import FileThread
from shoal.identity import swarm_authority
from shoal.model.meta import trained_names, units_of
from shoal.optim.inner import require_matches
from shoal.pipeline.role_hooks import role_hooks
from shoal.quant.coverage import require_quantisable
from shoal.runtime.control_pipe import RoleControl
from shoal.runtime.launcher_messages import RoleReady, RunSummary, RunUnwanted, StartDataServer
from shoal.runtime.patient_thread import run_in_thread
from shoal.runtime.process_info import process_age_s
from shoal.runtime.role import leaves
from shoal.transport.base import Endpoint, Received
from shoal.transport.dispatch import Handler, Rest, dispatch
from shoal.transport.reach import why_unreachable
from shoal.transport.tls import tls_contexts
from shoal.wire.messages.base import Hop
from shoal.wire.messages.control import MAX_STATE_CHARS, AskStatus, RunStatus

logger = logging.getLogger(__name__)

_SLOW_S: Final = 2.0
"""After so long it is said that a disk is waited for."""
_DISK_PATIENCE_S: Final = 600.0
"""So long may a file server take to be back. What trains goes on meanwhile up to the end of its round."""
_LAST_WORD_S = 0.25
"""So long is the connection kept after the run's last word: who writes into one that has ended reads no more of it."""


async def main(payload: bytes, control: RoleControl) -> None:
    """Run a client.

    Args:
        control: is asked for a data server and trainers; is told `RoleReady`, and at the end `RunSummary`, also when
            the run is interrupted or fails.

    Raises:
        ConfigError: the model cannot be quantised, or its parameters not grouped, as the configuration says.
        ShoalError: the run failed.
    """
    spec = ClientSpec.begun(payload)
    config, clock = spec.config(), SystemClock()
    require_quantisable(config.quant, units_of(config))
    require_matches(config.diloco.inner_optim, trained_names(config))
    async with open_role_endpoint(spec) as endpoint, counters_logged(endpoint):
        diary = await opened_diary(Path(spec.log_dir), spec.run_id, control)
        if not await data_server_started(control, endpoint, config, is_new=not diary.is_resumed):
            return
        membership = Membership(clock)
        joined, trained = anyio.Event(), anyio.Event()
        signer = Signer(spec.identity, swarm_authority(spec.swarm_key), spec.run_id)
        # A disk or a store of objects, which may take its time.
        checkpoint = await run_in_thread(needed_checkpoint, spec.resumed, diary.saved, signer.unseal)
        client = _build(spec, endpoint, membership, diary, signer, checkpoint, control, clock)
        turn, end = client.turn_taken.event, RunEnd()

        async def take_part() -> None:
            async with join_swarm(spec, control, clock, endpoint, membership) as registry:
                run = RunRecord(spec.run_id, spec.config().num_stages, clock.unix_s())
                me = ClientRecord(
                    endpoint.addresses,
                    clock.unix_s(),
                    host=spec.config().network.shown_host_name,
                    resumed=spec.resumed is not None,
                )
                if not client.has_turn:
                    registry.advertise(msgspec.structs.replace(me, waits=True))
                joined.set()
                try:
                    async with anyio.create_task_group() as beside:
                        # Until the end only: when all leave, the last ones are not where the swarm can be joined.
                        file = PeersFile(Path(spec.log_dir), control.notice)
                        beside.start_soon(keep_peers_file, file, membership)
                        await turn.wait()
                        if client.has_turn:
                            registry.advertise(run)
                            registry.advertise(me)
                            if spec.between_hosts:
                                beside.start_soon(_dial_back(spec, me, registry, clock, control).run)
                        await trained.wait()
                        beside.cancel_scope.cancel()
                finally:
                    if client.has_turn and client.ends_run:
                        # Servers and other clients may go; without this word they would wait for this one to come back.
                        view = membership.view
                        others = {hop.peer for hop in (*view.replicas, *view.clients)} | client.teller.askers
                        # Those of this host end a moment later, and are not to look for this process.
                        others |= {hop.peer for hop in (*client.slots.present.values(), spec.data_server, spec.monitor)}
                        others.discard(endpoint.peer_id)
                        interrupted = end.exit == "interrupted"
                        say_run_is_over(endpoint, others, interrupted=interrupted, failure=end.failure)
                        await registry.conclude(msgspec.structs.replace(run, ended=True))
                        with anyio.CancelScope(shield=True):
                            await clock.sleep_s(_LAST_WORD_S)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(take_part)
            if not client.has_turn or not diary.is_resumed:
                await joined.wait()
            await _train(client, control, clock, end)
            await joined.wait()
            turn.set()
            trained.set()


async def opened_diary(log_dir: Path, run_id: str, control: RoleControl) -> Diary:
    """Open what an earlier start has left: without it nobody knows where the run was, so its disk is waited for.

    Raises:
        StorageError: the disk does not answer for long.
        RecordRejected: and whatever else `Diary` raises.
    """
    loop = asyncio.get_running_loop()
    said = loop.call_later(_SLOW_S, tell, logger, DiskAwaited(str(log_dir), _SLOW_S), control.notice)
    try:
        with anyio.fail_after(_DISK_PATIENCE_S):
            opening = FileThread("diary", path=log_dir / DIARY_FILE).do(partial(Diary, log_dir, run_id))
            return await asyncio.wrap_future(opening)
    except TimeoutError as error:
        raise StorageError(
            f"{log_dir} does not answer for {_DISK_PATIENCE_S:.0f} s, and without what is there no client can go on: "
            "look after its disk, then --resume the run"
        ) from error
    finally:
        said.cancel()


def _dial_back(spec: ClientSpec, me: ClientRecord, registry: Registry, clock: Clock, control: RoleControl) -> DialBack:
    """Return what dials the servers and says in this client's record who cannot be reached."""
    contexts = tls_contexts(spec.identity, spec.swarm_key)

    async def dial(hop: Hop) -> str:
        return await why_unreachable(hop, contexts)

    def announce(undialled: tuple[Undialled, ...]) -> None:
        registry.advertise(msgspec.structs.replace(me, undialled=undialled))

    return DialBack(registry.membership, dial, clock, on_change=announce, notice=control.notice)


def _build(
    spec: ClientSpec,
    endpoint: Endpoint,
    membership: Membership,
    diary: Diary,
    signer: Signer,
    checkpoint: StoredCheckpoint | None,
    control: RoleControl,
    clock: Clock,
) -> Client:
    run = ClientRun(
        config=spec.config(),
        run_id=spec.run_id,
        log_dir=Path(spec.log_dir),
        data_server=spec.data_server,
        monitor=spec.monitor,
        diary=diary,
        beginning=Beginning(spec.expected_servers, spec.succeeds, spec.patient),
        checkpoint=checkpoint,
    )
    return Client(
        run,
        signer=signer,
        endpoint=endpoint,
        membership=membership,
        launcher=control,
        clock=clock,
        ledger=Ledger(
            clock,
            diary,
            age_s=lambda: process_age_s(spec.launcher_pid),
            log_dir=Path(spec.log_dir),
            show=control.notice,
        ),
        unwanted=lambda: control.tell(RunUnwanted()),
        hooks=role_hooks(spec),
    )


@dataclass
class RunEnd:
    """How a run has ended.

    Attributes:
        exit: "done", "failed" or "interrupted".
        failure: the reason as a sentence; empty without one.
    """

    exit: str = "failed"
    failure: str = ""


async def _train(client: Client, control: RoleControl, clock: Clock, end: RunEnd) -> None:
    """Run the rounds until they are done, fail, or the launcher says stop; then say what was reached.

    Of a run that another host has begun, only the client that has led it ends it.
    """
    try:
        async with anyio.create_task_group() as tasks:

            async def stop_when_told() -> None:
                await control.stopping.wait()
                end.failure = control.stop_reason
                end.exit = "failed" if end.failure else "interrupted"
                client.stop()
                await control.say_it_leaves(clock)

            tasks.start_soon(stop_when_told)
            control.tell(RoleReady())
            await client.run()
            if not control.stopping.is_set():
                end.exit = "done"
            tasks.cancel_scope.cancel()
    except Exception as error:
        end.exit, end.failure = "failed", "; ".join(map(str, leaves(error)))
        raise
    finally:
        with anyio.CancelScope(shield=True):
            await client.counters.gather()
            control.tell(RunSummary(await client.summary(end.exit)))


@dataclass(eq=False, repr=False)
class OpeningAnswers(Handler):
    """The client's side of `shoal status` until the data server serves, which may list many files or make tokens.

    Nobody else knows of this client then, since it has not joined the swarm. A client that is started again has peers
    that send it what it must not miss; its data server serves already.
    """

    endpoint: Endpoint
    config: Config
    control: RoleControl

    def receive(self, event: Received) -> bool:
        """Answer the question; what it is beside that waits for the run."""
        if not isinstance(event.message, AskStatus):
            return False
        state = f"starting: {self.control.doing or 'waiting for the data server'}"
        rounds, stages = self.config.diloco.outer_steps, self.config.num_stages
        status = RunStatus(state[:MAX_STATE_CHARS], 0, rounds, 0, 0, None, None, 0.0, None, (), num_stages=stages)
        self.endpoint.post(event.peer, status)
        return True


async def data_server_started(control: RoleControl, endpoint: Endpoint, config: Config, *, is_new: bool) -> bool:
    """Have the launcher start the data server, and wait until it serves; return whether it does, and not the run's end
    is wanted.

    Args:
        is_new: no peer knows this client.

    Raises:
        ControlError: it could not be started.
    """
    async with anyio.create_task_group() as tasks:

        async def stop_when_told() -> None:
            await control.stopping.wait()
            tasks.cancel_scope.cancel()

        tasks.start_soon(stop_when_told)
        if is_new:
            tasks.start_soon(dispatch, endpoint, (OpeningAnswers(endpoint, config, control), Rest()))
        answer = await control.request(StartDataServer())
        tasks.cancel_scope.cancel()
        if answer.error:
            raise ControlError(f"the data server could not be started: {answer.error}")
        return True
    return False
