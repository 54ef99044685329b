"""Names of DistQat (aether) that are none here: keys, model families and files of its own, each with the reason.

A file of DistQat that is given for a run is refused with these reasons; `shoal config convert` writes them beside what
it leaves out.
"""

from collections.abc import Mapping
from typing import Any, cast

_NO_REFRESH = "roles wait for changes instead of asking at intervals"
_NO_PORTS = "shoal needs no fixed ports; see network.host_maddrs, announce_maddrs and monitor_port"
_ONLY_BIGGAN = "only model.family = biggan has it, under other names; see model.extra and diloco.inner_optim.groups"
_NO_ACCUMULATOR = "what an accelerator's accumulator rounds is not emulated"
_SCHEMES = ("weight_quant", "activation_quant")
_BIGGAN_OPTIM = ("G_lr", "D_lr", "G_B1", "D_B1", "G_B2", "D_B2", "adam_eps", "model_config")
_ADAM = ("adam_lr", "adam_weight_decay", "adam_betas1", "adam_betas2")

FULL_MODEL_NAME = "data.full_model_name"
PIPELINE = "model_pipeline.pipeline"

REMOVED = {
    FULL_MODEL_NAME: "model.name_or_path or model.extra say which model of transformers it is, with model.family = hf",
    "data.shuffle_buffer_size": "all samples of a pass are shuffled, or data.shuffle_window of them at a time",
    "diloco.min_refresh_period": _NO_REFRESH,
    "diloco.max_refresh_period": _NO_REFRESH,
    "diloco.default_refresh_period": _NO_REFRESH,
    "diloco.expected_drift_peers": _NO_REFRESH,
    "diloco.expected_drift_rate": _NO_REFRESH,
    "diloco.performance_ema_alpha": "throughput is measured, not smoothed by a setting",
    "diloco.metadata_expiration": "a closed connection, not an expiry, says that a peer is gone; see health.deadline_s",
    "diloco.verbose": "logs hold every state change as they are",
    "model_pipeline.pipeline.idx": "the position of a stage follows from the order of the list",
    **{f"diloco.{at}_optim.biggan_{name}": _ONLY_BIGGAN for at in ("inner", "outer") for name in _BIGGAN_OPTIM},
    **{f"diloco.outer_optim.{name}": "the outer optimizer is sgd" for name in _ADAM},
    **{f"quant.base.{scheme}.slice_bits": _NO_ACCUMULATOR for scheme in _SCHEMES},
    **{f"quant.base.{scheme}.params": "a quantiser has no further parameters" for scheme in _SCHEMES},
    "quant.base.accumulator_length": _NO_ACCUMULATOR,
    "quant.base.accumulator_bits": _NO_ACCUMULATOR,
    "quant.overrides": "write quant.rules, where patterns and schemes stand side by side, without a payload",
    "network.use_ipfs": "peers find each other over network.initial_peers",
    "network.client_mode": "every peer accepts connections",
    "network.identity_path": "identities are kept in ~/.config/shoal/identities",
    "network.hivemind_compression": "tensors do not travel over hivemind",
    "network.skip_load_from_peers": "a newcomer always takes the state of its stage, or the run would not stay one run",
    "network.client_port": _NO_PORTS,
    "network.trainer_base_port": _NO_PORTS,
    "network.server_base_hostport": _NO_PORTS,
    "network.server_base_hostport_announce": _NO_PORTS,
    "network.server_base_grpcport": _NO_PORTS,
    "network.server_base_grpc_announceport": _NO_PORTS,
    "max_expert_index": "the number of stages is not limited; see model_pipeline.stages",
    "world_size": "the number of peers is not fixed; see servers.num_servers",
    "data_server": "the data server shares memory with its trainers and has no settings; see data.num_workers",
    "biggan": _ONLY_BIGGAN,
    "path": "give the file with --config-path",
}
"""Keys of DistQat that have no meaning here, or another name that is no mere alias, with the reason."""

NEEDED = frozenset({"quant.overrides"})
"""Those of them that cannot be left out where they have a value: the file would train something else."""

FILES_ELSEWHERE = {
    "template_config": "configs/reference.yaml lists all keys",
}
"""Configurations of DistQat that have no counterpart of the same name here, with the reason."""


def is_of_distqat(values: Mapping[Any, Any]) -> bool:
    """Return whether a file's values have keys that only DistQat knows."""
    names = {f"{name}" for name in values}
    for section, inner in values.items():
        if isinstance(inner, Mapping):
            names |= {f"{section}.{name}" for name in cast(Mapping[object, object], inner)}
    return not names.isdisjoint(REMOVED)
