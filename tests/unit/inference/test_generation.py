"""What a model says after a prompt."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from tests.unit.checkpoint.folders import GPT, make_config, write_model

import shoal
from shoal.checkpoint.exporting import export_model, import_model
from shoal.checkpoint.loading import open_model
from shoal.cli import main
from shoal.config.training import DataConfig
from shoal.data.builtin import open_digits, open_pydoc_topics
from shoal.inference.generation import Continuation, TextRequest
from shoal.inference.sampling import Sampling
from shoal.inference.text import ByteTokens, FileTokens
from shoal.model.biggan import BigganUnit

CONTEXT = 96


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    return write_model(folder / "model", make_config(data={"seq_len": CONTEXT}))


@pytest.fixture(scope="module")
def exported(model: Path) -> Path:
    export_model(open_model(model), model.parent / "out")
    return model.parent / "out"


def text_of(request: TextRequest, model: Path) -> tuple[str, Continuation]:
    generation = Continuation(shoal.load_model(model), ByteTokens(), request)
    return "".join(generation), generation


@pytest.mark.slow
def test_greedy_tokens_are_those_of_transformers_over_64_prompts(
    model: Path, exported: Path, transformers: ModuleType
) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float64).eval()
    ours = shoal.load_model(model).double()
    text = open_pydoc_topics(DataConfig(seq_len=CONTEXT)).train
    for number in range(64):
        prompt = bytes(text.sample(37 * number)[0][: 3 + number % 70].tolist()).decode("ascii", "replace")
        ids = torch.tensor([list(prompt.encode())])
        expected = theirs.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20)
        generation = Continuation(ours, ByteTokens(), TextRequest(prompt, max_tokens=20))
        "".join(generation)
        assert generation.tokens == expected[0, ids.shape[1] :].tolist(), prompt
        assert generation.finish == "length"


def test_a_text_ends_when_the_context_is_full_and_a_prompt_may_fill_it(model: Path) -> None:
    for prompt_tokens, new in ((CONTEXT - 10, 11), (CONTEXT, 1)):
        _, generation = text_of(TextRequest("a" * prompt_tokens), model)
        assert (len(generation.tokens), generation.finish) == (new, "context")


def test_a_seed_gives_the_same_text_and_a_stop_string_a_beginning_of_it(model: Path) -> None:
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=5)
    text, whole = text_of(TextRequest("import ", sampling, 40), model)
    assert text_of(TextRequest("import ", sampling, 40), model)[0] == text
    assert text_of(TextRequest("import ", Sampling(temperature=1.0, top_p=0.9, seed=6), 40), model)[0] != text
    stopped, generation = text_of(TextRequest("import ", sampling, 40, (text[4:6],)), model)
    assert (stopped, generation.finish) == (text[: text.index(text[4:6])], "stop")
    assert generation.tokens == whole.tokens[: len(generation.tokens)]


def test_the_end_that_a_tokenizer_names_ends_a_text_and_is_no_part_of_it(model: Path, exported: Path) -> None:
    _, whole = text_of(TextRequest("import ", max_tokens=20), model)
    tokens = FileTokens(exported)
    tokens.ends = frozenset({whole.tokens[3]})
    generation = Continuation(shoal.load_model(model), tokens, TextRequest("import ", max_tokens=20))
    "".join(generation)
    assert generation.tokens == whole.tokens[: whole.tokens.index(whole.tokens[3])]
    assert generation.finish == "stop"


def said(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> tuple[int, str, str]:
    code = main([str(each) for each in argv])
    output = capsys.readouterr()
    return code, output.out, output.err


def test_every_form_of_a_model_says_the_same_on_the_command_line(
    model: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import_model(open_model(exported), tmp_path / "back")
    export_model(open_model(model), tmp_path / "state", "safetensors")
    expected, generation = text_of(TextRequest("def ", max_tokens=12), model)
    for folder in (model, exported, tmp_path / "back", tmp_path / "state"):
        code, out, err = said(capsys, "generate", folder, "--prompt", "def ", "--max-tokens", "12")
        assert (code, out, err) == (0, expected, "")
    flags = ("--prompt", "def ", "--max-tokens", "12", "--temperature", "0.5", "--json", "--dtype", "float64")
    drawn = json.loads(said(capsys, "generate", model, *flags)[1])
    assert set(drawn) == {"text", "tokens", "prompt_tokens", "finish", "seed"}
    again = json.loads(said(capsys, "generate", model, *flags, "--seed", str(drawn["seed"]))[1])
    assert again == drawn
    assert generation.finish == "length"


def test_on_a_terminal_a_model_moves_no_cursor(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Continuation, "__iter__", lambda self: iter(["a\x1b[2J", "\r\tb\n\x9b"]))
    assert said(capsys, "generate", model, "--prompt", "a")[1] == "a\x1b[2J\r\tb\n\x9b", "a file has what was said"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert said(capsys, "generate", model, "--prompt", "a")[1] == "a\ufffd[2J\ufffd\tb\n\ufffd\n"


def test_what_makes_no_sense_is_named_together_before_a_model_is_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--prompt", "", "--max-tokens", "0", "--temperature", "-1", "--top-p", "7", "--stop", "")
    code, out, err = said(capsys, "generate", tmp_path / "nowhere", *flags)
    assert (code, out) == (2, "")
    for part in ("the prompt is empty", "max-tokens 0", "temperature -1", "top-p 7", "stop: an empty text"):
        assert part in err


@pytest.mark.parametrize(
    ("argv", "code", "part"),
    [
        (("generate", "{tmp}/nowhere", "--prompt", "a"), 2, "config.json does not exist: give the folder `model`"),
        (("generate", "{model}/config.json", "--prompt", "a"), 2, "does not exist: give the folder `model`"),
        (("generate", "{model}", "--prompt", "x" * 97), 2, "has 97 tokens, the model takes 96: shorten it"),
        (("generate", "{model}", "--prompt", "a", "--device", "cuda:77"), 2, "use --device auto or --device cpu"),
        (("generate", "{model}", "--prompt", "a", "--device", "tpu"), 2, "use auto, cpu, mps, cuda or cuda:<index>"),
        (("generate", "{images}", "--prompt", "a"), 2, "is of a family that generates no text"),
        (("export", "{model}", "--to", "{tmp}/file"), 2, "there is something that is no folder"),
        (("export", "{model}", "--to", "{tmp}"), 2, "holds no model, and is not replaced"),
        (("export", "{model}", "--to", "{tmp}", "--force"), 2, "holds no model, and is not replaced"),
        (("export", "{model}", "--to", "{exported}"), 2, "--force replaces it"),
        (("export", "{model}", "--to", "{model}", "--force"), 2, "choose another place"),
        (("export", "{images}", "--to", "{tmp}/new", "--format", "hf"), 2, "use --format safetensors"),
        (("import", "{model}", "--to", "{tmp}/new"), 2, "is a model of shoal already"),
        (("evaluate", "{tmp}", "--json"), 2, "config.json does not exist"),
        (("evaluate", "{other}"), 2, "has a tokenizer of its own"),
    ],
)
def test_bad_input_is_one_message_and_writes_nothing(
    argv: tuple[str, ...],
    code: int,
    part: str,
    model: Path,
    exported: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    images = tmp_path / "images"
    if any("{images}" in each for each in argv):
        data = {"dataset_name": "digits", "task_type": "cv", "num_channels": 1, "img_size": 8}
        write_model(images, make_config(model={"family": "resnet18"}, data=data))
    other = shutil.copytree(exported, tmp_path / "other")
    (other / "tokenizer.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    argv = tuple(each.format(tmp=tmp_path, model=model, exported=exported, images=images, other=other) for each in argv)
    found, out, err = said(capsys, *argv)
    assert (found, out) == (code, "")
    assert part in err
    assert sorted(tmp_path.rglob("*")) == before


def test_an_export_on_the_command_line_replaces_another_only_by_force_and_says_how_to_load_it(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_model(tmp_path / "run" / "model", make_config(model={**GPT, "num_layers": 2}))
    to = tmp_path / "out"
    code, out, _ = said(capsys, "export", tmp_path / "run", "--to", to)
    assert code == 0
    assert f'AutoModelForCausalLM.from_pretrained("{to}")' in out
    assert open_model(to).config.model.num_layers == open_model(other).config.model.num_layers == 2
    code, out, _ = said(capsys, "export", model, "--to", to, "--force", "--format", "safetensors")
    assert code == 0
    assert "safetensors.torch.load_file" in out
    assert sorted(path.name for path in to.iterdir()) == ["config.yaml", "model.safetensors"]
    code, out, _ = said(capsys, "import", model.parent / "out", "--to", tmp_path / "back")
    assert code == 0
    assert (tmp_path / "back" / "config.json").is_file()


def test_evaluate_says_of_images_how_many_it_names_rightly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = {"dataset_name": "digits", "task_type": "cv", "num_channels": 1, "img_size": 8}
    sizes = {"family": "mlp", "num_layers": 2, "hidden_size": 32}
    write_model(tmp_path / "images", make_config(model=sizes, data=data))
    report = json.loads(said(capsys, "evaluate", tmp_path / "images", "--json")[1])
    module = shoal.load_model(tmp_path / "images")
    holdout = open_digits(open_model(tmp_path / "images").config.data).holdout
    inputs, labels = (torch.from_numpy(array) for array in holdout.read(np.arange(holdout.num_samples)).everything)
    with torch.no_grad():
        right = (module(inputs).argmax(1) == labels).sum().item()
    assert 0 < right < holdout.num_samples
    assert report["accuracy"] == right / holdout.num_samples
    shown = said(capsys, "evaluate", tmp_path / "images")[1]
    assert f", accuracy {100 * right / holdout.num_samples:.2f} %, over {holdout.num_samples} samples" in shown


GAN_DATA = {"dataset_name": "digits", "task_type": "image_gen", "num_channels": 1, "img_size": 8}
GAN_SIZES = {"generator_channels": 2, "discriminator_channels": 2, "latent_size": 8}


@pytest.fixture(scope="module")
def gan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = make_config(model={"family": "biggan", "extra": GAN_SIZES}, data=GAN_DATA, model_pipeline={"stages": 1})
    return write_model(tmp_path_factory.mktemp("gans") / "gan", config)


def test_evaluate_says_of_a_gan_what_both_players_have_come_to(
    gan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = json.loads(said(capsys, "evaluate", gan, "--json")[1])
    assert report["eval_loss"] == pytest.approx(report["loss/discriminator"] + report["loss/generator"], abs=1e-5)
    assert 0 <= report["accuracy/discriminator"] <= 1
    assert "accuracy" not in report
    assert ", loss/generator " in said(capsys, "evaluate", gan)[1]
    assert said(capsys, "export", gan, "--to", tmp_path / "out", "--format", "safetensors")[0] == 0
    assert json.loads(said(capsys, "evaluate", tmp_path / "out", "--json")[1]) == report


def test_images_are_written_as_a_grid_of_classes_and_samples(
    gan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = pytest.importorskip("PIL.Image")
    to = tmp_path / "grid.png"
    how = ("--rows", "3", "--first-class", "2", "--classes", "4", "--scale", "2")
    code, out, _ = said(capsys, "images", gan, "--to", to, *how)
    assert (code, out) == (0, f"wrote {to}: 3 images of each class from 2 to 5\n")
    pixels = np.asarray(image.open(to))
    assert pixels.shape == (3 * 18, 4 * 18)
    module = shoal.load_model(gan)
    unit = module.units["gan"]
    assert isinstance(unit, BigganUnit)
    latent, _ = unit.drawn(3, 0, torch.zeros(1))
    with torch.no_grad():
        made = unit.generator(latent[1:2], torch.tensor([5]))[0, 0]
    expected = ((made + 1) * 127.5).round().to(torch.uint8).numpy().repeat(2, 0).repeat(2, 1)
    assert np.array_equal(pixels[18 + 2 : 36, 3 * 18 + 2 :], expected)
    before = to.read_bytes()
    assert said(capsys, "images", gan, "--to", to, *how)[0] == 2
    assert said(capsys, "images", gan, "--to", to, *how, "--force")[0] == 0
    assert to.read_bytes() == before
    assert said(capsys, "images", gan, "--to", to, *how, "--force", "--seed", "1")[0] == 0
    assert to.read_bytes() != before


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (("{model}",), "this model makes no images"),
        (("{gan}", "--rows", "0", "--scale", "-1"), "rows 0, scale -1: give 1 at least"),
        (("{gan}", "--first-class", "8", "--classes", "3"), "classes 8 to 10: the model knows 0 to 9"),
        (("{gan}", "--first-class", "10"), "classes 10 to 9: the model knows 0 to 9"),
    ],
)
def test_images_that_cannot_be_made_are_refused_and_nothing_is_written(
    argv: tuple[str, ...], part: str, model: Path, gan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("PIL.Image")
    named = tuple(each.format(model=model, gan=gan) for each in argv)
    code, _, err = said(capsys, "images", *named, "--to", tmp_path / "grid.png")
    assert (code, part in err) == (2, True), err
    assert not (tmp_path / "grid.png").exists()


def test_evaluate_says_the_held_out_loss_of_the_data_of_the_model(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = json.loads(said(capsys, "evaluate", model, "--json")[1])
    holdout = open_pydoc_topics(open_model(model).config.data).holdout
    module = shoal.load_model(model)
    losses: list[float] = []
    with torch.no_grad():
        for index in range(holdout.num_samples):
            inputs, labels = (torch.from_numpy(array)[None] for array in holdout.sample(index).everything)
            losses.append(module.loss(module(inputs), labels).item())
    assert report["eval_loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-6)
    assert (report["samples"], report["dataset"]) == (len(losses), "pydoc-topics")
    assert f"eval loss {report['eval_loss']:.6f} over {len(losses)} samples" in said(capsys, "evaluate", model)[1]


def test_evaluate_measures_on_a_file_in_place_of_what_the_run_held_out(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = open_model(model).config
    length = config.data.seq_len
    text = "to be or not to be, that is the question. " * 40
    (tmp_path / "other.txt").write_text(text)
    report = json.loads(said(capsys, "evaluate", model, "--eval-split", "./other.txt", "--json")[1])
    samples = (len(text) - 1) // length
    tokens = torch.tensor(list(text.encode()))[: samples * length + 1]
    module = shoal.load_model(model)
    with torch.no_grad():
        inputs, labels = tokens[:-1].reshape(samples, length), tokens[1:].reshape(samples, length)
        expected = module.loss(module(inputs), labels).item()
    assert report["samples"] == samples
    assert report["eval_loss"] == pytest.approx(expected, abs=1e-5)
    assert (report["dataset"], report["eval_split"]) == ("pydoc-topics", "./other.txt")
    code, _, err = said(capsys, "evaluate", model, "--eval-split", "other.txt")
    assert code == 2
    assert "has no splits; give a file, or leave it out; the file or folder of that name is ./other.txt" in err
