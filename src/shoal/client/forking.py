"""How a fork begins: a checkpoint of another run becomes the first checkpoint of this one.

    checkpoint of D_r --cut into the fork's stages--> rebase record on top of the fork's own D_0 --> checkpoint of that
                                                                  the fork is resumed from it as any run <--'

Samples go on where they mean the same in both runs.
"""

from __future__ import annotations

from functools import partial

from shoal.averaging.inner_exchange import owned_by
from shoal.averaging.journal import Genesis, genesis_content, genesis_of
from shoal.averaging.signing import Signer
from shoal.checkpoint.manifest import GENESIS
from shoal.checkpoint.model_folder import configuration_with_cut
from shoal.checkpoint.model_layout import stage_layouts
from shoal.checkpoint.recut import Recut
from shoal.checkpoint.store import Checkpoint, CheckpointStore
from shoal.checkpoint.stored import StoredCheckpoint
from shoal.client.resuming import KeptTotals
from shoal.client.totals import RunTotals
from shoal.clock import Clock
from shoal.config.schema import Config
from shoal.config.shared import has_same_samples, shared_configuration
from shoal.identity import Identity
from shoal.ids import Ballot
from shoal.runtime.hardware import machine_type, program_versions
from shoal.swarm.records import parameters_of, rebase_record, record_hash, used_samples


def write_fork(
    origin: StoredCheckpoint, *, config: Config, run_id: str, authority: Identity, clock: Clock
) -> StoredCheckpoint:
    """Write the first checkpoint of a fork, where its own checkpoints lie, and return it.

    Args:
        config: of the fork, with the cut.
        authority: of the swarm. The record is signed by a peer that is there for this alone.

    Raises:
        StateMismatch: the model is another one; all tensors that differ are named.
        ShoalError: the origin cannot be read any more, or the fork cannot be written.
        OSError: the same.
    """
    recut = Recut(origin, stage_layouts(config))
    identity, before = Identity.generate(), origin.record
    signer = Signer(identity, authority, run_id)
    shared, configured = shared_configuration(config), genesis_of(origin.genesis, GENESIS).configuration
    goes_on = has_same_samples(shared, configured)
    genesis = Genesis(
        config.run.seed, signer.authority, shared, config.servers.threads, program_versions(), machine_type()
    )
    record = rebase_record(
        run_id=run_id,
        genesis=genesis.hash(run_id),
        ballot=Ballot(1, identity.peer_id, 1),
        origin=before,
        origin_hash=record_hash(origin.signed),
        stages=recut.hashes(),
        recorded=used_samples(before) if goes_on else (),
        marks=before.marks if goes_on else b"",
    )
    totals = RunTotals(rounds=record.round, hashes=parameters_of(record))
    checkpoint = Checkpoint(
        signed=signer.seal(record),
        genesis=genesis_content(genesis),
        layouts=stage_layouts(config),
        cut=configuration_with_cut(config)["model_pipeline"]["cut"],
        members=[()] * config.num_stages,
        unix_s=clock.unix_s(),
        client=KeptTotals(totals, clock.now_s()).encoded(),
    )
    store = CheckpointStore(config.checkpoint_location, run_id, signer.unseal)
    # Who goes on with an inner state says in its log whose it was: of a fork's first ones, who has signed the record.
    store.write(checkpoint, recut.parts(partial(owned_by, identity.peer_id)))
    return store.unread(record.round)
