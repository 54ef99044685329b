"""What a host may change of a run that it forks: everything but the tensors of the model.

    keys that it sets otherwise + the run's -> cut, decided here -> same tensors by name? something left to train?

The state is cut before any process of the fork could measure what units cost, so a cut that is not known follows from
the family's own figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shoal.checkpoint.model_layout import stage_layouts
from shoal.checkpoint.recut import Recut
from shoal.checkpoint.stored import StoredCheckpoint
from shoal.cli.cuts import has_cut, with_cut, with_known_cut
from shoal.config import Config
from shoal.config.shared import ChangedKey, fork_shared
from shoal.errors import ConfigError, StateMismatch
from shoal.model.partition import counts_by_cost
from shoal.model.registry import load_family
from shoal.model.stage import checked_unit_costs


def forked(
    config: Config,
    origins: Mapping[str, str],
    changed: Iterable[ChangedKey],
    before: Mapping[str, Any],
    checkpoint: StoredCheckpoint,
) -> Config:
    """Return the configuration of a fork, with its cut.

    Args:
        config: of this host.
        origins: the keys that it sets, and where.
        changed: the shared keys that it sets otherwise than the run.
        before: the shared configuration of the run.
        checkpoint: of the run.

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
