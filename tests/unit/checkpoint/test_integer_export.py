"""A model that was trained with quantisation, as integers and scales, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.unit.checkpoint.folders import assert_same, make_config, write_model

import shoal
from shoal.checkpoint import integer_file
from shoal.checkpoint.exporting import export_model, import_model
from shoal.checkpoint.loading import open_model
from shoal.cli.arguments import Wording
from shoal.cli.trained import generate
from shoal.config import Config
from shoal.errors import ConfigError, StateMismatch

TOKENS = torch.randint(256, (3, 32), generator=torch.Generator().manual_seed(1))


def quantised(bits: int = 4, *, signed: bool = True, inputs: Any = "off", **more: Any) -> dict[str, Any]:
    scheme = {"num_bits": bits, "signed": signed, **more}
    embeddings = {"name_patterns": ["embedding.token"], "weight_quant": {"num_bits": 8, "per_channel": True}}
    return {"base": {"weight_quant": scheme, "activation_quant": inputs}, "rules": [embeddings]}


def exported(tmp_path: Path, config: Config) -> tuple[Path, Path]:
    model, to = write_model(tmp_path / "model", config), tmp_path / "out"
    assert export_model(open_model(model), to, "integers") == "integers"
    return model, to


@pytest.mark.parametrize(
    ("quant", "dtype", "low", "high"),
    [
        (quantised(2), torch.int8, -2, 1),
        (quantised(8, inputs={"num_bits": 8}), torch.int8, -128, 127),
        (quantised(8, signed=False, per_channel=True), torch.uint8, 0, 255),
        (quantised(12, per_channel=True), torch.int16, -2048, 2047),
        (quantised(16, signed=False), torch.int32, 0, 65535),
    ],
    ids=["2 bits", "8 bits, inputs too", "8 bits unsigned", "12 bits", "16 bits unsigned"],
)
def test_integers_and_scales_reload_to_equal_outputs(
    tmp_path: Path, quant: dict[str, Any], dtype: torch.dtype, low: int, high: int
) -> None:
    model, to = exported(tmp_path, make_config(quant=quant))
    trained, loaded = shoal.load_model(model), shoal.load_model(to)
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS), trained(TOKENS))
    tensors = safetensors.torch.load_file(to / "model.safetensors")
    (name,) = (key.removesuffix(".integers") for key in tensors if key.endswith("block_1.mlp.up.weight.integers"))
    integers, scale = tensors[f"{name}.integers"], tensors[f"{name}.scale"]
    assert integers.dtype == dtype
    assert low <= int(integers.min()) < int(integers.max()) <= high
    assert torch.equal(integers * scale, loaded.get_parameter(name))
    assert tensors["units.embedding.token.weight.integers"].dtype == torch.int8
    assert tensors["units.embedding.token.weight.scale"].shape == (256, 1)
    assert "units.embedding.position.weight" in tensors, "it is not quantised"
    assert not {key for key in tensors if key.removesuffix(".integers") in tensors and key.endswith(".integers")}
    plain = tmp_path / "plain"
    export_model(open_model(model), plain, "safetensors")
    assert_same(shoal.load_model(plain), loaded)


def test_a_weight_of_eight_bits_takes_a_byte(tmp_path: Path) -> None:
    model, to = exported(tmp_path, make_config(quant=quantised(8)))
    export_model(open_model(model), tmp_path / "plain", "safetensors")
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (to, tmp_path / "plain")]
    tensors = safetensors.torch.load_file(to / "model.safetensors")
    saved = sum(3 * each.numel() for name, each in tensors.items() if name.endswith(".integers"))
    scales = sum(each.nbytes for name, each in tensors.items() if name.endswith(".scale"))
    # Headers differ by names.
    assert sizes[1] - sizes[0] == pytest.approx(saved - scales, abs=2500)
    assert saved > 2 * sizes[0] / 3


def test_an_export_of_integers_is_imported_and_generates_as_the_model_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, to = exported(tmp_path, make_config(quant=quantised(4, inputs={"num_bits": 8})))
    import_model(open_model(to), tmp_path / "back")
    texts: list[str] = []
    for folder in (model, to, tmp_path / "back"):
        generate(
            folder,
            "a",
            wording=Wording(max_tokens=8, temperature=1.0, seed=3),
            stops=(),
            family=None,
            device="cpu",
            dtype="float32",
            as_json=True,
        )
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2]


def test_a_step_size_that_fell_to_zero_is_written_as_what_it_stands_for(tmp_path: Path) -> None:
    config = make_config(quant=quantised(4))
    source = open_model(write_model(tmp_path / "model", config))
    read = source.read

    def zero(name: str) -> torch.Tensor:
        return torch.zeros_like(read(name)) if name.endswith(".step") else read(name)

    for field, value in (("read", zero), ("hashes", lambda _stage: None)):
        object.__setattr__(source, field, value)
    export_model(source, tmp_path / "out", "integers")
    with torch.no_grad():
        assert torch.equal(shoal.load_model(tmp_path / "out")(TOKENS), source.whole()(TOKENS))


def test_a_model_without_integers_is_refused(tmp_path: Path) -> None:
    inputs_only = {"base": {"weight_quant": "off", "activation_quant": {"num_bits": 8}}}
    for number, config in enumerate((make_config(), make_config(quant=inputs_only))):
        model = write_model(tmp_path / f"model{number}", config)
        with pytest.raises(ConfigError, match=r"--format integers: no weight of .* use --format safetensors"):
            export_model(open_model(model), tmp_path / "out", "integers")
    assert not (tmp_path / "out").exists()


def test_an_integer_that_is_read_back_as_another_is_not_put_into_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model", make_config(quant=quantised(4)))
    written = integer_file.WeightScale.integers
    monkeypatch.setattr(integer_file.WeightScale, "integers", lambda self, weight: written(self, weight).clamp(max=6))
    with pytest.raises(StateMismatch, match="is read back as something else"):
        export_model(open_model(model), tmp_path / "out", "integers")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1), (72, 24)])
def test_a_scale_of_another_weight_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    _, to = exported(tmp_path, make_config(quant=quantised(4)))
    path = to / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    name = next(key for key in tensors if key.endswith(".scale") and "block_0" in key)
    tensors[name] = torch.ones(shape)
    safetensors.torch.save_file(tensors, path)
    expected = tensors[name.removesuffix(".scale") + ".integers"].shape
    if shape == tuple(expected):
        shoal.load_model(to)
        return
    with pytest.raises(StateMismatch, match="are not the integers and scale of one weight"):
        shoal.load_model(to)
