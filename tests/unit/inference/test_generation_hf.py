"""What a model of transformers says after a prompt: as its own class does, with its own tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.unit.checkpoint.folders import make_config, write_model
from tests.unit.inference.trained_tokenizer import trained_tokenizer
from tests.unit.model.hf.families import EXACT, own_class, values_of

from shoal.checkpoint.exporting import export_model, import_model
from shoal.checkpoint.loading import open_model
from shoal.cli import main
from shoal.inference.generation import Continuation, TextRequest
from shoal.inference.text import ByteTokens, FileTokens, tokens_of
from shoal.model.hf.family import HfFamily
from shoal.model.hf.tokenizer import TOKENIZER_FILE, keep_tokenizer
from shoal.model.stage import build_stage

CONTEXT = 28
TIED = ("qwen3", "gemma3_text", "gpt2")
PROMPTS = ("import ", "x", "longer than a window is")


def run_model(path: Path, kind: str, num_stages: int = 2, **more: Any) -> Path:
    """A model as a run leaves it, of bytes."""
    values = values_of(kind, vocab_size=256, **more)
    model = {"family": "hf", "hf_config": values}
    pipeline = {"stages": num_stages, "microbatches": 1}
    return write_model(path, make_config(model=model, data={"seq_len": CONTEXT}, model_pipeline=pipeline))


def model_from_elsewhere(folder: Path, transformers: ModuleType, **more: Any) -> Path:
    """A llama with a tokenizer of its own, as transformers saves both."""
    tokenizer = trained_tokenizer(of_words=False)
    vocabulary = tokenizer.get_vocab_size()
    values = values_of("llama", vocab_size=vocabulary, **more)
    torch.manual_seed(5)
    model, _ = own_class(HfFamily(values, CONTEXT), torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.eval().save_pretrained(folder)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>")
    fast.save_pretrained(folder)
    return folder


def said(capsys: pytest.CaptureFixture[str], folder: Path, *argv: str) -> tuple[int, str, str]:
    code = main(["generate", str(folder), *argv])
    output = capsys.readouterr()
    return code, output.out, output.err


def loaded(transformers: ModuleType, folder: Path, dtype: torch.dtype) -> Any:
    """What transformers itself makes of a folder."""
    named = {"dtype": dtype, "experts_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **named).eval()


def generated(model: Any, ids: list[int], count: int) -> list[int]:
    """What a model of transformers says, greedily."""
    prompt = torch.tensor([ids])
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=count)
    return output[0, len(ids) :].tolist()


@pytest.mark.usual("llama", "mixtral", "falcon_h1", "qwen3-tied")
@pytest.mark.parametrize("kind", [*EXACT, *(f"{kind}-tied" for kind in TIED)])
def test_greedy_tokens_are_those_of_transformers_for_every_kind(kind: str) -> None:
    # That each kind is exported and loaded with all its bits is told by tests/unit/checkpoint/test_hf_folder.py.
    kind, _, tied = kind.partition("-")
    # No byte ends a text.
    values = values_of(kind, vocab_size=256, tie_word_embeddings=bool(tied), eos_token_id=None)
    family = HfFamily(values, CONTEXT)
    theirs, names = own_class(family, torch.float64)
    ours = build_stage(family, 0, 1, seed=7, dtype=torch.float64)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            moved = 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(moved)
            theirs.get_parameter(names[name]).add_(moved)
    ours.eval()
    theirs.eval()
    for prompt in PROMPTS:
        count = CONTEXT - len(prompt)
        expected = generated(theirs, list(prompt.encode()), count)
        generation = Continuation(ours, ByteTokens(), TextRequest(prompt, max_tokens=count))
        "".join(generation)
        assert generation.tokens == expected, prompt
        assert len(expected) == count


def test_no_byte_ends_a_text_of_a_model_that_was_trained_on_bytes(tmp_path: Path, transformers: ModuleType) -> None:
    source = open_model(run_model(tmp_path / "model", "llama", eos_token_id=2, bos_token_id=1))
    assert not tokens_of(source, source.whole()).ends
    export_model(source, tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generation_config.eos_token_id is None


def test_a_text_of_a_run_with_a_tokenizer_of_its_own_ends_as_its_documents_did(
    tmp_path: Path, transformers: ModuleType, user_caches: Path
) -> None:
    tokenizer = trained_tokenizer(of_words=False)
    kept = keep_tokenizer({TOKENIZER_FILE: tokenizer.to_str().encode()}, "own")
    assert kept.facts.end == 2
    values = values_of("llama", vocab_size=kept.facts.vocabulary, eos_token_id=5, bos_token_id=6)
    config = make_config(
        model={"family": "hf", "hf_config": values},
        data={"seq_len": CONTEXT, "tokenizer": "own", "tokenizer_hash": kept.hash},
    )
    folder = write_model(tmp_path / "model", config)
    for name, content in kept.files.items():
        (folder / "tokenizer").mkdir(exist_ok=True)
        (folder / "tokenizer" / name).write_bytes(content)
    source = open_model(folder)
    assert tokens_of(source, source.whole()).ends == {2}
    export_model(source, tmp_path / "out")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").eos_token_id == 2


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-tied", "mixtral"])
def test_every_form_of_a_model_says_the_same_on_the_command_line(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, _, tied = kind.partition("-")
    model = run_model(tmp_path / "model", kind, 1 if tied else 2, tie_word_embeddings=bool(tied))
    export_model(open_model(model), tmp_path / "out")
    export_model(open_model(model), tmp_path / "state", "safetensors")
    import_model(open_model(tmp_path / "out"), tmp_path / "back")
    greedy = ("--prompt", "def ", "--max-tokens", "12")
    drawn = (*greedy, "--temperature", "0.9", "--top-k", "20", "--seed", "3", "--json")
    expected = [said(capsys, model, *flags) for flags in (greedy, drawn)]
    assert [each[0] for each in expected] == [0, 0]
    assert json.loads(expected[1][1])["finish"] == "length"
    for form in ("out", "state", "back"):
        assert [said(capsys, tmp_path / form, *flags) for flags in (greedy, drawn)] == expected, form
    assert said(capsys, model, "--prompt", "a" * (CONTEXT - 2), "--json")[1].count('"finish": "context"') == 1
    assert f"the model takes {CONTEXT}: shorten it" in said(capsys, model, "--prompt", "a" * (CONTEXT + 1))[2]


def test_a_folder_of_transformers_speaks_by_its_own_tokenizer(
    tmp_path: Path, transformers: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_from_elsewhere(tmp_path / "llama", transformers, eos_token_id=None)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = "東京 swim"
    ids: list[int] = tokenizer(prompt)["input_ids"]
    tokens = generated(loaded(transformers, folder, torch.float32), ids, 30)
    expected = tokenizer.decode([*ids, *tokens], skip_special_tokens=True)
    assert expected.startswith(prompt)
    import_model(open_model(folder), tmp_path / "imported")
    export_model(open_model(tmp_path / "imported"), tmp_path / "again")
    for form in (folder, tmp_path / "imported", tmp_path / "again"):
        code, out, _ = said(capsys, form, "--prompt", prompt, "--max-tokens", "30", "--json")
        report = json.loads(out)
        assert (code, report["prompt_tokens"]) == (0, len(ids))
        assert report["tokens"] == tokens[: len(report["tokens"])]
        assert prompt + report["text"] == expected
        assert said(capsys, form, "--prompt", prompt, "--max-tokens", "30")[1] == report["text"]


def test_a_text_ends_where_the_folder_says_so(
    tmp_path: Path, transformers: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_from_elsewhere(tmp_path / "llama", transformers, eos_token_id=None)
    ids = FileTokens(folder).encode("def ")
    (folder / "generation_config.json").unlink()
    whole = generated(loaded(transformers, folder, torch.float32), ids, 12)
    first, second = list(dict.fromkeys(whole))[1:3]
    described = json.loads((folder / "config.json").read_text())
    for name, content in (
        ("config.json", {**described, "eos_token_id": first}),
        # What it says counts, and not what the config says.
        ("generation_config.json", {"eos_token_id": [319, second]}),
    ):
        (folder / name).write_text(json.dumps(content))
        ended = generated(loaded(transformers, folder, torch.float32), ids, 12)
        report = json.loads(said(capsys, folder, "--prompt", "def ", "--max-tokens", "12", "--json")[1])
        # Transformers gives the end itself as well.
        assert [*report["tokens"], ended[-1]] == ended
        assert report["finish"] == "stop"
    assert ended[-1] == second
    imported = tmp_path / "imported"
    import_model(open_model(folder), imported)
    assert json.loads(said(capsys, imported, "--prompt", "def ", "--json")[1])["tokens"] == ended[:-1]


def test_a_text_of_a_model_from_elsewhere_is_as_long_as_its_positions(
    tmp_path: Path, transformers: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_from_elsewhere(tmp_path / "llama", transformers, eos_token_id=None, max_position_embeddings=1100)
    import_model(open_model(folder), tmp_path / "imported")
    prompt = "東" * 350
    for form in (folder, tmp_path / "imported"):
        source = open_model(form)
        assert (source.config.data.seq_len, source.context) == (1024, 1100)
    assert len(FileTokens(folder).encode(prompt + "x" * 49)) <= 1100
    assert json.loads(said(capsys, folder, "--prompt", "x" * 1090, "--json")[1])["finish"] in ("context", "stop")
    assert "the model takes 1100: shorten it" in said(capsys, folder, "--prompt", "x" * 1101)[2]


@pytest.mark.parametrize("is_imported", [False, True], ids=["as it is", "imported"])
def test_what_the_tokenizer_cannot_do_is_said(
    is_imported: bool, tmp_path: Path, transformers: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_from_elsewhere(tmp_path / "llama", transformers)
    none = shutil.copytree(folder, tmp_path / "none", ignore=shutil.ignore_patterns("tokenizer*"))
    large = shutil.copytree(folder, tmp_path / "large")
    described = json.loads((large / "tokenizer.json").read_text())
    vocabulary: dict[str, int] = described["model"]["vocab"]
    described["model"]["vocab"] = {**vocabulary, **{f"more{i}": len(vocabulary) + i for i in range(9)}}
    (large / "tokenizer.json").write_text(json.dumps(described))
    for form, prompt, says in (
        (none, "a", "has no tokenizer.json, and its tokens are no bytes"),
        (large, "a", f"tokens, and the model knows {len(vocabulary)}: it is that of another model"),
        (folder, "a\udcff", "the prompt is no text in UTF-8"),
    ):
        if is_imported:
            import_model(open_model(form), tmp_path / "imported")
        code, out, err = said(capsys, tmp_path / "imported" if is_imported else form, "--prompt", prompt)
        assert (code, out) == (2, "")
        assert says in err
    assert main(["evaluate", str(none)]) == 2
    assert "has a tokenizer of its own" in capsys.readouterr().err
    export_model(open_model(none), tmp_path / "exported")
    assert not (tmp_path / "exported" / "tokenizer.json").exists()


def test_no_code_of_a_folder_is_run_for_its_tokenizer(
    tmp_path: Path, transformers: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_from_elsewhere(tmp_path / "llama", transformers)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    named = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, **named}))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert said(capsys, folder, "--prompt", "a", "--max-tokens", "2")[0] == 0
    assert not (tmp_path / "ran").exists()
