"""Compressor: tensors into bytes and back, for programs that are no swarm."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from shoal.codec import Compressor
from shoal.codec.registry import CODEC_NAMES, CodecSettings, codec_of
from shoal.errors import ConfigError, LocalProtocolError, RemoteProtocolError

PAGE = Path(__file__).parents[3] / "docs/tasks/compress.md"
GATHERED = ("int8", "int4", "int4_e3m0", "2bit", "sparse")
every_name = pytest.mark.parametrize("name", CODEC_NAMES)


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_the_page_about_it_says_what_works_and_how_small_it_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = PAGE.read_text()
    torch.manual_seed(1)
    (tmp_path / "page.py").write_text(page.split("```python\n")[1].split("```")[0])
    runpy.run_path(str(tmp_path / "page.py"))
    assert capsys.readouterr().out == "204 times smaller\n"
    for name in CODEC_NAMES:
        assert f"`{name}`" in page


@every_name
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (40, 30, 5)])
def test_what_is_decompressed_is_what_the_codec_rounds_to(name: str, shape: tuple[int, ...]) -> None:
    tensor = normal(*shape)
    found = Compressor(name).decompress(Compressor(name).compress(tensor), shape)
    assert found.shape == tensor.shape
    assert torch.equal(found.reshape(-1), codec_of(CodecSettings(name)).rounded(tensor.reshape(-1)))


@pytest.mark.parametrize("name", GATHERED)
def test_what_is_left_out_is_kept_and_comes_later(name: str) -> None:
    sender, receiver, target = Compressor(name, feedback=1.0), Compressor(name), normal(100, 50)
    assert sender.residual is None
    total = torch.zeros(100, 50)
    for _ in range(60):
        total += receiver.decompress(sender.compress(target), (100, 50))
    once = receiver.decompress(Compressor(name).compress(target), (100, 50))
    error, error_of_one = (total / 60 - target).norm(), (once - target).norm()
    assert error < 0.2 * error_of_one + 1e-3
    assert sender.residual is not None
    assert torch.allclose(total + sender.residual.reshape(100, 50), 60 * target, atol=1e-3)


@pytest.mark.parametrize("name", GATHERED)
def test_a_residual_that_is_saved_and_set_goes_on_where_it_was(name: str) -> None:
    first = Compressor(name, feedback=0.95)
    first.compress(normal(5000))
    saved = first.residual
    assert saved is not None
    kept = saved.clone()
    later = first.compress(normal(5000, seed=2))
    assert torch.equal(saved, kept), "what was saved must not change"
    second = Compressor(name, feedback=0.95)
    second.residual = saved
    assert second.compress(normal(5000, seed=2)) == later
    second.residual = None
    assert second.compress(normal(5000)) == Compressor(name).compress(normal(5000))


def test_other_floating_dtypes_count_as_float32_and_integers_are_refused() -> None:
    tensor = normal(300).bfloat16()
    assert Compressor("int4").compress(tensor) == Compressor("int4").compress(tensor.float())
    with pytest.raises(LocalProtocolError, match="int64"):
        Compressor("int4").compress(torch.arange(3))


def test_what_cannot_be_compressed_leaves_the_residual_as_it_was() -> None:
    sender = Compressor("sparse", feedback=1.0)
    sender.compress(normal(500))
    before = sender.residual
    with pytest.raises(LocalProtocolError, match="NaN"):
        sender.compress(torch.full((500,), float("nan")))
    with pytest.raises(LocalProtocolError, match="500 elements is not that of 501"):
        sender.compress(normal(501))
    assert sender.residual is before


@every_name
def test_bytes_of_another_shape_are_refused(name: str) -> None:
    data = Compressor(name).compress(normal(500))
    for wrong in ((499,), (501,), (0,)):
        with pytest.raises(RemoteProtocolError):
            Compressor(name).decompress(data, wrong)
    with pytest.raises(RemoteProtocolError):
        Compressor(name).decompress(b"", (500,))


def test_both_ends_must_have_the_same_density() -> None:
    data = Compressor("sparse", density=1 / 64).compress(normal(5000))
    assert len(data) < 220
    with pytest.raises(RemoteProtocolError, match="has the header"):
        Compressor("sparse").decompress(data, (5000,))


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (CodecSettings("int5"), "no codec 'int5'; use one of none, bf16, fp16, int8"),
        (CodecSettings("int8", feedback=-0.1), "feedback -0.1 of the codec int8: from 0 to 1"),
        (CodecSettings("int8", feedback=float("nan")), "feedback nan"),
        (CodecSettings("bf16", feedback=0.5), "element-wise codec has none"),
        (CodecSettings("sparse", density=0.0), "density 0.0: more than 0"),
        (CodecSettings("sparse", density=1.5), "density 1.5"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: CodecSettings, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        codec_of(settings)
