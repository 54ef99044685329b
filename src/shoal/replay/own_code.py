"""Code that the configuration of a replayed run names: anybody may have written the folder that it is in.

No file in a folder can show that a run was of this host, so the code of one's own runs is named as well.
"""

from __future__ import annotations

import msgspec

from shoal.config.named_code import dataset_problem, family_problem, own_dataset, own_family
from shoal.errors import ConfigError, RecordRejected
from shoal.replay.claims import whole_chain
from shoal.replay.run_files import RunFiles


class NamedCode(msgspec.Struct, frozen=True):
    """Code of somebody's own, `package.module:Class`, that a replay may import: who has called it has named it.

    Attributes:
        family: of the model; None: it has to be one of shoal's.
        dataset: that gives the samples; None: no code may.
    """

    family: str | None = None
    dataset: str | None = None


NOTHING_NAMED = NamedCode()


def require_named(files: RunFiles, named: NamedCode, *, opens_data: bool = True) -> None:
    """Check that a run may be computed here, before anything that it names is imported.

    Args:
        opens_data: the data set that the configuration names is opened.

    Raises:
        ConfigError: its configuration names code that nobody here has named.
        RecordRejected: it names code, and its first record does not show that D_0 has that configuration.
    """
    config, where = files.config, str(files.directory / "config.yaml")
    problems = [family_problem(config, named.family, where, "--family {name}")]
    if opens_data:
        problems.append(dataset_problem(config, named.dataset, where, "--dataset-name {name}"))
    if found := [problem for problem in problems if problem is not None]:
        raise ConfigError("\n".join(found))
    if own_family(config) is None and (own_dataset(config) is None or not opens_data):
        return
    chain, broken = whole_chain(files)
    if broken and not chain:
        raise RecordRejected(f"{where} names code of somebody's own, which is not run for such records: {broken[0]}")
