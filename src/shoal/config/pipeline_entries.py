"""DistQat's `model_pipeline.pipeline` list, translated into `model.*`, `model_pipeline.stages` and `.cut`.

`n_layers` of an entry are the blocks of that stage: the list is a cut by hand. The first stage holds the embedding as
well and the last one the head, as in DistQat. Works on the raw mapping before validation, so that what the list says
and what is said elsewhere can be compared: two different values for one thing are an error, never a silent choice.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from pydantic import ValidationError

from shoal.config.model import NATIVE_FAMILIES, SIZED, PipelineEntry, split_counts

Raw = Mapping[str, Any]

_MLP_WIDTH = 200


def apply_pipeline(raw: Raw) -> Raw:
    """Return `raw` with `model` and `model_pipeline.*` filled in from `model_pipeline.pipeline`, if it is there.

    Args:
        raw: the whole configuration as nested mappings, not validated yet.

    Raises:
        ValueError: the entries do not make a model, or contradict `model.*` or `model_pipeline.stages`.
    """
    section = raw.get("model_pipeline")
    if not isinstance(section, Mapping):
        return raw
    pipeline = cast(Raw, section)
    items = pipeline.get("pipeline")
    if not isinstance(items, Sequence) or isinstance(items, str) or not items:
        return raw  # absent, or of a type that the schema refuses
    try:
        entries = [PipelineEntry.model_validate(item) for item in cast(Sequence[object], items)]
    except ValidationError:
        return raw  # the schema names the entry and its key
    family = family_of(entries, NATIVE_FAMILIES)
    if family == "mlp":
        entries = _with_sizes_of_mlp(entries, raw.get("model"))
    found: dict[str, Any] = {"family": family}
    found |= sizes_of(entries, family)
    model = _merged("model", raw.get("model"), found)
    # The list has been said in canonical names now; one that stayed would contradict later changes of them.
    rest = {key: value for key, value in pipeline.items() if key != "pipeline"}
    flow = flow_of(entries)
    if "cut" in flow:
        if rest.get("cut") is None:
            rest.pop("cut", None)
        else:
            rest["cut"] = _counts(split_counts(rest["cut"]))
    return {**raw, "model": model, "model_pipeline": _merged("model_pipeline", rest, flow)}


def _counts(value: object) -> object:
    """Return counts that are text as numbers, so that they can be compared."""
    parts = [str(part) for part in cast(Sequence[object], value)] if isinstance(value, list | tuple) else [""]
    return [int(part) for part in parts] if all(map(str.isdecimal, parts)) else cast(object, value)


def flow_of(entries: Sequence[PipelineEntry]) -> dict[str, Any]:
    """Return the keys of `model_pipeline` that the entries set."""
    blocks = [entry.n_layers for entry in entries if entry.n_layers is not None]
    if not blocks or len(entries) == 1:
        return {"stages": len(entries)}
    return {"stages": len(entries), "cut": [blocks[0] + 1, *blocks[1:-1], blocks[-1] + 1]}


def family_of(entries: Sequence[PipelineEntry], supported: Sequence[str]) -> str:
    """Return the one family that the entries name, after checking that their parts are in order.

    Raises:
        ValueError: It is none of those that are supported, or the parts are not those of a model.
    """
    names = [entry.model_name for entry in entries]
    families = [name.rpartition(".")[0] for name in names]
    parts = [name.rpartition(".")[2] for name in names]
    wanted = ["full"] if len(entries) == 1 else ["head", *["body"] * (len(entries) - 2), "tail"]
    if len(set(families)) != 1 or families[0] not in supported:
        raise ValueError(
            f"model_pipeline.pipeline: model names {names} do not name one supported family; "
            f"supported: {', '.join(supported)}"
        )
    if parts != wanted:
        expected = [f"{families[0]}.{part}" for part in wanted]
        raise ValueError(f"model_pipeline.pipeline: {len(entries)} stages must be {expected}, not {names}")
    return families[0]


def _with_sizes_of_mlp(entries: list[PipelineEntry], model: object) -> list[PipelineEntry]:
    """Return the entries with the sizes that DistQat's mlp always has, where nothing says others.

    Its "mlp.full" has three layers; "mlp.head" and "mlp.tail" have two each.
    """
    said: set[str] = {*cast(Raw, model)} if isinstance(model, Mapping) else set()
    sizes: dict[str, int] = {}
    if "num_layers" not in said and all(entry.n_layers is None for entry in entries):
        sizes["n_layers"] = 1
    if "hidden_size" not in said and all(entry.hid_dim is None for entry in entries):
        sizes["hid_dim"] = _MLP_WIDTH
    return [entry.model_copy(update=sizes) for entry in entries]


def sizes_of(entries: Sequence[PipelineEntry], family: str) -> dict[str, Any]:
    """Return the keys of `model` that the entries set.

    Raises:
        ValueError: They contradict each other, or the family has no such sizes.
    """
    found: dict[str, Any] = {}
    layers = [entry.n_layers for entry in entries if entry.n_layers is not None]
    widths = {entry.hid_dim for entry in entries if entry.hid_dim is not None}
    classes = {entry.num_classes for entry in entries if entry.num_classes is not None}
    if family not in SIZED and (layers or widths):
        raise ValueError(f"model_pipeline.pipeline: {family} has a fixed size; remove hid_dim and n_layers")
    if family == "gpt" and classes:
        raise ValueError("model_pipeline.pipeline: gpt has no num_classes; remove it")
    if layers:
        if len(layers) != len(entries):
            raise ValueError(
                f"model_pipeline.pipeline: n_layers {layers} must be given for each of {len(entries)} stages, as "
                "their cut by hand, or for none: then set model.num_layers, and the cut is balanced by cost"
            )
        found["num_layers"] = sum(layers)
    for key, values in (("hidden_size", widths), ("num_classes", classes)):
        if len(values) > 1:
            raise ValueError(f"model_pipeline.pipeline: the entries disagree about model.{key}: {sorted(values)}")
        if values:
            found[key] = values.pop()
    extra: dict[str, Any] = {}
    for entry in entries:
        for key, value in entry.extra.items():
            if extra.setdefault(key, value) != value:
                raise ValueError(f"model_pipeline.pipeline: the entries disagree about extra.{key}")
    if extra:
        found["extra"] = extra
    return found


def _merged(name: str, given: object, found: Raw) -> object:
    """Return `given` with the keys of `found` added; both may name a key only with the same value."""
    if given is None:
        return dict(found)
    if not isinstance(given, Mapping):
        return given  # of a type that the schema refuses
    section = cast(Raw, given)
    for key, value in found.items():
        # Text compares too: flags and the environment give numbers as text.
        if key in section and str(section[key]) != str(value):
            raise ValueError(
                f"{name}.{key} = {section[key]!r} contradicts model_pipeline.pipeline, which says {value!r}: remove one"
            )
    return {**section, **found}
