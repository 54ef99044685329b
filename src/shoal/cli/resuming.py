"""`--resume`: which checkpoint a run goes on from, on this host, and everything that speaks against it.

latest | PATH | URL -> run -> its swarm's key -> newest good checkpoint -> shared configuration -> nobody trains it?
                                                      |-> `go_back`: the run's folder, as its client left that round
           this host sets shared keys otherwise: a fork '-> `write_fork`: another run, which is resumed from there on

A fork may change everything but the tensors of the model. Its state is cut before any process of it could measure what
units cost, so a cut that is not known follows from the family's own figures.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio

from shoal.averaging.journal import genesis_of
from shoal.averaging.signing import unsealer
from shoal.checkpoint.manifest import GENESIS
from shoal.checkpoint.model_folder import has_model_of
from shoal.checkpoint.model_layout import stage_layouts
from shoal.checkpoint.places import round_of
from shoal.checkpoint.recut import Recut
from shoal.checkpoint.store import CheckpointStore, NewestGood, stores_at
from shoal.checkpoint.stored import StoredCheckpoint
from shoal.cli.cuts import has_cut, with_cut, with_known_cut
from shoal.cli.run_files import new_run_id, take_log_dir
from shoal.cli.run_folder import CONFIG_FILE, LOCAL_KEY, is_run_id
from shoal.cli.runs_here import living_runs
from shoal.client.forking import write_fork
from shoal.client.model_export import FOLDER
from shoal.client.resuming import go_back
from shoal.clock import Clock, SystemClock
from shoal.config import Config
from shoal.config.shared import (
    ChangedKey,
    adopt_shared,
    changed_keys,
    fork_shared,
    has_same_samples,
    require_shared,
    shared_configuration,
)
from shoal.control.initial_peers import look, parse
from shoal.control.peers_file import PEERS_FILE, read_peers_file
from shoal.control.role_start import ResumedFrom
from shoal.errors import ConfigError, RecordRejected, ShoalError, StateMismatch
from shoal.identity import create_swarm_key, load_swarm_key, swarm_authority
from shoal.ids import RunId
from shoal.model.partition import counts_by_cost
from shoal.model.registry import load_family
from shoal.model.stage import checked_unit_costs

LATEST: Final = "latest"
"""What `--resume` alone means: the checkpoint that was written last."""

LoadHost = Callable[[Mapping[str, Any], Path | None], "tuple[Config, Mapping[str, str]]"]
"""Reads what this host says of a run with this shared configuration (empty: not known yet), and what sets each key: its
own file, or else the given one, and flags."""


@dataclass(frozen=True)
class Resumption:
    """A run that goes on from a checkpoint.

    Attributes:
        config: of this host, with the shared keys of the run.
        swarm_key: of the run's swarm.
        checkpoint: of this run; of a fork, which has none before `prepare`, of the one that it goes on from.
        source: where this run's checkpoint is.
    """

    config: Config
    run_id: RunId
    swarm_key: bytes
    checkpoint: StoredCheckpoint
    source: ResumedFrom

    def prepare(
        self,
        clock: Clock,
        say: Callable[[str], None],
        *,
        is_local: bool,
        claim: Callable[[Path], bool] = lambda _: True,
    ) -> Path:
        """Return the run's folder, as its client would have left it at the checkpoint.

        Args:
            claim: as `RunDir.claim_folder`.

        Raises:
            ConfigError: it cannot be made, written or read, or another launcher has it.
        """
        log_dir = take_log_dir(self.config, self.run_id, claim, is_local=is_local)
        try:
            damaged = go_back(log_dir, self._first_checkpoint(log_dir, clock, is_local=is_local), clock.now_s())
            # Who starts would wait for the peers of then; none of them is there any more.
            (log_dir / PEERS_FILE).unlink(missing_ok=True)
        except (ShoalError, OSError) as error:
            raise ConfigError(f"--resume: {log_dir} cannot be used: {error}") from error
        for problem in damaged:
            say(problem)
        return log_dir

    def _first_checkpoint(self, log_dir: Path, clock: Clock, *, is_local: bool) -> StoredCheckpoint:
        """Return the checkpoint that the run goes on from, which of a fork is written now."""
        if self.checkpoint.manifest.run_id == self.run_id:
            return self.checkpoint
        if is_local:
            create_swarm_key(log_dir / LOCAL_KEY, self.swarm_key)
        authority = swarm_authority(self.swarm_key)
        return write_fork(self.checkpoint, config=self.config, run_id=self.run_id, authority=authority, clock=clock)


def find_resumption(wanted: str, load: LoadHost, say: Callable[[str], None], *, is_local: bool) -> Resumption:
    """Return what is gone on from; damaged checkpoints that are passed over are named.

    Where this host sets shared keys otherwise than the run has them, that is a fork: another run.

    Args:
        wanted: `latest`, or where checkpoints lie: of runs, of one run, or one alone.
        is_local: the run has servers on this host only, and a key of its own.

    Raises:
        ConfigError: there is none, or something speaks against it; all of it is named.
        StorageError: the place cannot be read.
    """
    config, origins = load({}, None)
    place = config.checkpoint_location if wanted == LATEST else wanted
    store, round = _store(place, origins.get("experiment_prefix") and config.experiment_prefix)
    run_id = RunId(store.run_id)
    log_dir = config.log_dir.absolute() / run_id
    swarm_key = _swarm_key(config, log_dir, is_local=is_local)
    store = CheckpointStore(store.location, run_id, unsealer(run_id, swarm_authority(swarm_key).peer_id))
    checkpoint, passed_over = _good(store, round)
    for damaged in passed_over:
        say(f"the checkpoint of {damaged}: it is passed over")
    if checkpoint is None:
        raise ConfigError(
            f"--resume: run {run_id} has no good checkpoint in {store.location}/{run_id}: what is wrong with each "
            "stands above; name another place by --resume, or begin a new run without it"
        )
    own = log_dir / CONFIG_FILE
    problems = list(_still_there(run_id, log_dir, is_local=is_local))
    changed: list[ChangedKey] = []
    before: dict[str, Any] = {}
    try:
        # Who may write at that place may have written it: what it says counts for what a run shares, and code that it
        # names is imported only if this host's flags, environment or file name it too.
        before = genesis_of(checkpoint.genesis, GENESIS).configuration
        require_shared(before)
        config, origins = load(before, own if own.exists() else None)
        changed += changed_keys(config, origins, before)
        config = forked(config, origins, changed, before, checkpoint) if changed else _shared(config, origins, before)
        problems += [] if changed else _has_ended(config, checkpoint, log_dir)
    except (ConfigError, RecordRejected) as error:
        problems.append(str(error))
    if problems:
        raise ConfigError(f"--resume: run {run_id} is not resumed:\n" + "\n".join(problems))
    round, at = checkpoint.manifest.round, f"its checkpoint of round {checkpoint.manifest.round} in {store.location}"
    if not changed:
        say(f"resuming run {run_id} from {at}/{run_id}")
        return Resumption(config, run_id, swarm_key, checkpoint, ResumedFrom(store.location, round))
    fork = new_run_id(config, SystemClock())
    said = "; ".join(f"{name} = {mine} instead of {wanted}" for name, mine, wanted, _ in changed)
    say(f"forking run {run_id} from {at}/{run_id}, with {said}: the fork is run {fork}")
    if not has_same_samples(shared_configuration(config), before):
        say("its samples, or their order, are others: none of them counts as trained")
    return Resumption(config, fork, swarm_key, checkpoint, ResumedFrom(config.checkpoint_location, round))


def _store(place: str, prefix: str | None) -> tuple[CheckpointStore, int | None]:
    """Return the run at a place whose checkpoint was written last, and the round if it is one checkpoint's.

    Args:
        prefix: how the run has to be called; None: it may have any name.
    """
    if "://" not in place:
        place = str(Path(place).expanduser().absolute())
    folder, _, name = place.rstrip("/").rpartition("/")
    if (round := round_of(name)) is not None:
        location, _, run_id = folder.rpartition("/")
        if not is_run_id(run_id):
            raise ConfigError(
                f"--resume: {folder} is not called as a run is, <name>-<date>-<time>-<4 digits>: the folder of a run "
                "keeps its name, wherever it is copied to"
            )
        return CheckpointStore(location, run_id), round
    if "://" not in place and not os.path.isdir(place):
        wrong = f"{place} is no folder" if os.path.exists(place) else f"there is no {place}"
        raise ConfigError(
            f"--resume: {wrong}: name the folder or URL with the checkpoints, by --resume or checkpoint_dir"
        )
    # What has the name of another folder of this host's logs would pass for a run with a key and a file of its own.
    stores = [store for store in stores_at(place) if is_run_id(store.run_id)]
    stores = [store for store in stores if prefix is None or store.run_id.startswith(f"{prefix}-")]
    if not stores:
        of = "" if prefix is None else f" of a run called {prefix}-..."
        raise ConfigError(f"--resume: there is no checkpoint{of} in {place}")
    return max(stores, key=lambda store: (store.newest_unix_s(), store.run_id)), None


def _good(store: CheckpointStore, round: int | None) -> NewestGood:
    if round is None:
        return store.newest_good()
    try:
        return NewestGood(store.open(round), ())
    except StateMismatch as error:
        raise ConfigError(f"--resume: {error}") from error


def _swarm_key(config: Config, log_dir: Path, *, is_local: bool) -> bytes:
    path = log_dir / LOCAL_KEY if is_local else config.network.swarm_key_file
    if is_local and not path.exists():
        raise ConfigError(
            f"--resume: run {log_dir.name} goes on with the swarm key that it was begun with, which no checkpoint has: "
            f"copy {LOCAL_KEY} from its log folder to {path}; a run of start_trainer_client.py has none there: "
            "resume it by that, with --resume"
        )
    try:
        return load_swarm_key(path)
    except ConfigError as error:
        where = "its own folder" if is_local else "network.swarm_key_file"
        raise ConfigError(
            f"--resume: a run goes on with the swarm key that it was begun with, from {where}: {error}"
        ) from error


def _shared(config: Config, origins: Mapping[str, str], before: Mapping[str, Any]) -> Config:
    """Return the configuration with the run's shared keys; raises ConfigError."""
    config = adopt_shared(config, origins, before, told_by="its checkpoint", from_peers=False)
    if shared_configuration(config) != before:
        raise ConfigError("the run was begun with another version of shoal, whose keys are others: use that one")
    return config


def _has_ended(config: Config, checkpoint: StoredCheckpoint, log_dir: Path) -> Iterator[str]:
    """Yield why there is nothing to do: all rounds are trained, and the model is left as well."""
    last, model = config.diloco.outer_steps, log_dir / FOLDER
    if checkpoint.manifest.round >= last and has_model_of(model, checkpoint.manifest.record):
        yield (
            f"all of its {last} rounds are trained, and its model is in {model}: --diloco.outer-steps=N with N above "
            f"{last} trains on from there, as another run"
        )


def _still_there(run_id: RunId, log_dir: Path, *, is_local: bool) -> Iterator[str]:
    """Yield who has the run as it is now, which is newer than any checkpoint."""
    for note in living_runs():
        if note.run_id == run_id and note.hosts == "client":
            yield f"it runs here (process {note.launcher_pid}): `shoal stop {run_id}` ends it"
        elif note.run_id == run_id:
            yield f"its servers on this host hold what is newer: {_continue(Path(note.log_dir))}"
    if is_local:
        return
    maddrs = [maddr for maddr in read_peers_file(log_dir) if parse(maddr) is not None]
    obstacles = anyio.run(look, maddrs)
    if answering := [maddr for maddr, obstacle in zip(maddrs, obstacles, strict=True) if obstacle is None]:
        yield f"its peers at {', '.join(answering)} hold what is newer: {_continue(log_dir)}"


def _continue(log_dir: Path) -> str:
    return f"go on with them by `start_trainer_client.py --initial-peers=@{log_dir / PEERS_FILE}`, or end them first"


def forked(
    config: Config,
    origins: Mapping[str, str],
    changed: Iterable[ChangedKey],
    before: Mapping[str, Any],
    checkpoint: StoredCheckpoint,
) -> Config:
    """Return the configuration of a fork, with its cut.

    Args:
        origins: the keys that it sets, and where.
        changed: the shared keys that it sets otherwise than the run.
        before: the shared configuration of the run.

    Raises:
        ConfigError: with all that cannot be changed.
    """
    config = _with_family_cut(fork_shared(config, origins, changed, before, told_by="its checkpoint"))
    problems: list[str] = []
    round, last = checkpoint.manifest.round, config.diloco.outer_steps
    if last <= round:
        problems.append(
            f"diloco.outer_steps = {last}: the checkpoint is of round {round}, so a fork has nothing left to train; "
            f"more than {round} are needed"
        )
    try:
        Recut(checkpoint, stage_layouts(config))
    except StateMismatch as error:
        problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def _with_family_cut(config: Config) -> Config:
    config = with_known_cut(config)
    if has_cut(config):
        return config
    family = load_family(config.model, config.data)
    return with_cut(config, counts_by_cost(checked_unit_costs(family), config.num_stages, is_tied=family.is_tied))
