"""The host of a run's client: what `start_trainer_client.py` and `shoal start-trainer-client` do.

Monitor, client, data server and trainers run here; servers join from other hosts, with the lines that are printed. From
the launch to the summary it is the same as a run on one machine, without servers of its own. With initial peers it
takes the place of a client that is gone: run and configuration are those that the swarm knows. Where nobody of the
swarm is left, a checkpoint tells both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import anyio

from shoal import log
from shoal.cli.cuts import with_class_names, with_known_cut
from shoal.cli.devices import devices_of_servers
from shoal.cli.early import EarlyStart
from shoal.cli.finding import FoundRun, find_run
from shoal.cli.host_network import HostNetwork
from shoal.cli.inviting import invitation_text
from shoal.cli.joining import LastingIdentities, invitation, load_or_create_swarm_key, require_membership
from shoal.cli.local import HostRun
from shoal.cli.run_files import make_log_dir, new_run_id, no_unbegun_log_dir
from shoal.cli.run_folder import LAUNCHER
from shoal.clock import SystemClock
from shoal.config import Config
from shoal.data.places import require_here
from shoal.ids import RunId

if TYPE_CHECKING:
    from shoal.cli.resuming import Resumption


def start_trainer_client(
    config: Config,
    origins: Mapping[str, str] | None,
    early: EarlyStart,
    resumption: Resumption | None = None,
    *,
    baseline: bool = False,
    invites: bool = False,
) -> int:
    """Wait for servers of other hosts, train with them until the run is done, and return the exit code.

    Args:
        config: resolved; with initial peers, the run that they know is continued.
        origins: names the keys that this host sets, and where. None: it begins a run; otherwise the other shared keys
            come from the run.
        early: runs already; the caller ends it.
        resumption: of the run that goes on from a checkpoint, which has given `config`.
        baseline: also train the plain loop here, beside the swarm, of a run that begins.
        invites: print the text by which other hosts join.

    Raises:
        ConfigError: there is no such device for the plain loop, the data is not here, the swarm key or the identities
            cannot be used, the log directory cannot be written, or a shared key differs from the run's.
        BootstrapError: no initial peer answered in time, or none of them knows a run.
    """
    if origins is None:
        require_here(config.data)
    if baseline:
        devices_of_servers(config)
    if resumption is not None:
        swarm_key, is_new = resumption.swarm_key, False
    elif origins is None:
        swarm_key, is_new = load_or_create_swarm_key(config.network.swarm_key_file)
    else:
        swarm_key, is_new = require_membership(config), False
    identities = LastingIdentities("client")
    try:
        clock = SystemClock()

        async def run() -> int:
            if resumption is not None:
                found = FoundRun(resumption.run_id, with_known_cut(config))
            elif origins is None:
                found = FoundRun(new_run_id(config, clock), with_known_cut(with_class_names(config)))
            else:
                print(f"looking for the run at {', '.join(config.network.initial_peers)}", flush=True)
                found = await find_run(
                    config,
                    origins,
                    swarm_key=swarm_key,
                    identity_of=identities.identity,
                    run_dir=early.run_dir,
                    clock=clock,
                    say=partial(print, flush=True),
                )
                require_here(found.config.data)
            return await train(found.config, found.run_id)

        async def train(config: Config, run_id: RunId) -> int:
            with no_unbegun_log_dir(config, run_id):
                if resumption is None:
                    log_dir, source = make_log_dir(config, run_id), None
                else:
                    claim = early.run_dir.claim_folder
                    log_dir = resumption.prepare(clock, partial(print, flush=True), is_local=False, claim=claim)
                    source = resumption.source
                log.configure(LAUNCHER, log_dir, config.log_level)

                def invite(maddrs: Sequence[str], is_first: bool) -> Iterator[str]:
                    text = invitation_text(config, swarm_key, maddrs, clock) if invites else ""
                    return invitation(config, maddrs, log_dir, new_key=is_new, text=text, is_first=is_first)

                host = HostRun(
                    config,
                    run_id,
                    log_dir,
                    clock,
                    swarm_key,
                    baseline=baseline,
                    network=HostNetwork(config.network),
                    identity_of=identities.identity,
                    invite=invite,
                    succeeds=origins is not None,
                    resumed=source,
                )
                return await host.run(early)

        early.require_uninterrupted()
        return anyio.run(run, backend_options={"use_uvloop": True})
    finally:
        identities.close()
