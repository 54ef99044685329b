"""The pages that train a model on one machine: their commands run as they stand, in order (tests/site_commands.py has
which), and the model learns."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.documented import commands
from tests.e2e.launched import ROOT, run_shoal
from tests.site_commands import FIRST, IN_ORDER, PAGE, to_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RUNS = {
    "chat": ["chat", "chat_base", "chat_lora"],
    "images": ["resnet18_split"],
    "language_model": ["sandbox"],
    "made_images": ["biggan-cifar"],
    "own_model": ["own_model"],
    "speech": ["wav2vec2_split"],
    "transformers": ["qwen3_tiny", "mixtral_tiny_moe", "qwen3_tiny_lora"],
    "your_data": ["own_data", "sandbox"],
}
"""What each variant of the test of pages trains and learns last under a name, and the page on language models."""
FALLS_BY = {"own_model": 0.2, "own_data": 0.005, "biggan-cifar": -math.inf}
"""How far the loss falls at the least, in nats, if not a bit; of two players one loses what the other wins."""
WITH_PICTURES = [ROOT / "docs" / "tasks" / f"{name}.md" for name in ("chat", "images", "language_model", "speech")]
VARIANTS = [test.partition("[")[2].removesuffix("]") for test in IN_ORDER if test.startswith(PAGE)]
# What keeps a test short, and says nothing about the page.
SHORT = "--no-wandb --diloco.inner-steps=6 --diloco.outer-steps=2 --servers.replicas=1"
# Of random weights: after fewer steps, and outer ones over the mark, the model can be worse than at the beginning.
SHORT_FROM_NOTHING = "--diloco.inner-steps=15 --diloco.outer-steps=3 --servers.replicas=1"
SMALL_IMAGES = "--diloco.batch-size-per-step=4 --data.holdout-fraction=0.02"


START = ROOT / "docs" / "start" / "one_machine.md"
# The environment is active, and what make does beside the run has tests of its own; two minutes of faults are more of
# what fifteen seconds are, and all that is trained meanwhile is computed again.
AS_HERE = {
    "source .venv/bin/activate": "",
    "--for 2m": "--for 15s --emulated-device 100ms --diloco.inner-steps 10 --diloco.batch-size-per-step 8",
    "make test ": "true ",
}


def page_script(commands: list[str]) -> str:
    """The commands, with those short that train."""
    return "\n".join(
        f"{each} {SHORT}{f' {SMALL_IMAGES}' if './photos' in each or 'biggan' in each else ''}"
        if "run_local.py" in each and "--print-config" not in each
        else each
        for each in commands
    )


def _write_presupposed(directory: Path) -> None:
    """Write the folders of data that pages take for granted."""
    corpus = directory / "corpus"
    corpus.mkdir()
    for name in ("one", "two", "wiki.validation"):
        (corpus / f"{name}.txt").write_text(" ".join(f"{name} {number}" for number in range(5000)))
    random = np.random.default_rng(0)
    for label in range(5):
        folder = directory / "photos" / f"kind{label}"
        folder.mkdir(parents=True)
        for index in range(20):
            pixels = random.integers(0, 50 * (label + 1), (40, 30 + index, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{index}.jpg")


def _done(script: str, directory: Path) -> str:
    """Run commands where a reader of the documents is, with shoal's own in the way; return what they have said."""
    for name in ("run_local.py", "configs", "examples"):
        if not (directory / name).exists():
            (directory / name).symlink_to(ROOT / name)
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=directory,
        env={
            **os.environ,
            # The commands of this environment, as `source .venv/bin/activate` puts them there.
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "XDG_CACHE_HOME": str(directory / "cache"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _done_here(script: str, directory: Path, patch: pytest.MonkeyPatch) -> str:
    """Do the same, but run the commands of shoal in this process, which need not import everything for each of them."""
    patch.setenv("XDG_CACHE_HOME", str(directory / "cache"))
    said: list[str] = []
    for line in script.splitlines():
        if not line.startswith("shoal "):
            said.append(_done(line, directory))
            continue
        # What its arguments are, the shell says.
        asked = f'shoal() {{ printf "%s\\0" "$@"; }}\n{line}'
        told = subprocess.run(["bash", "-e", "-c", asked], stdout=subprocess.PIPE, text=True, check=True).stdout
        with contextlib.chdir(directory):
            said.append(run_shoal(*told.split("\0")[:-1]))
    return "".join(said)


def _has_learned(run: str, directory: Path) -> None:
    summary = json.loads((directory / "logs" / run / "summary.json").read_text())
    assert (summary["exit"], summary["duplicates"], summary["missing"]) == ("done", 0, 0), run
    assert summary["eval_loss_last"] < summary["eval_loss_first"] - FALLS_BY.get(run, 0.0), run
    assert (directory / "logs" / run / "curves.svg").is_file(), run


def test_the_commands_of_the_first_page_and_of_those_that_look_at_its_run_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both train the sandbox: it is trained once, by the line of the page on language models.
    [trains] = [each for each in to_run(FIRST) if "run_local.py --config-path configs/sandbox.yaml" in each]
    script = "\n".join(re.findall(r"```bash\n(.*?)```", START.read_text(), re.DOTALL))
    for written, here in {**AS_HERE, "make run ": f"{trains} {SHORT_FROM_NOTHING} "}.items():
        assert written in script
        script = script.replace(written, here)
    said = _done(script, tmp_path)
    for name in re.findall(r"^([a-z][a-z ,/()A-Z]+?)  +[\d,.]+(?: MiB)?$", START.read_text(), re.MULTILINE):
        assert f"\n{name} " in said, f"the page shows {name}"
    assert "chaos holds:" in said
    assert (tmp_path / "mine" / "config.json").is_file()
    # What the first page has exported is what another one imports: a GPT-2 of transformers.
    (tmp_path / "gpt2-folder").symlink_to("mine")
    has_run = [trains, *commands(str(START.relative_to(ROOT)))]
    said = _done_here("\n".join(each for each in to_run(FIRST) if each not in has_run), tmp_path, monkeypatch)
    assert "Fields: peer, who" in said, "shoal explain"
    assert "model.left" in said, "shoal events"
    assert said.count("bit for bit") >= 2, "shoal replay"
    _has_learned("sandbox", tmp_path)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_commands_of_a_page_run_one_after_the_other(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_presupposed(tmp_path)
    _done_here(page_script(to_run(f"{PAGE}[{variant}]")), tmp_path, monkeypatch)
    for run in RUNS[variant]:
        _has_learned(run, tmp_path)


@pytest.mark.parametrize("page", WITH_PICTURES, ids=lambda page: page.stem)
def test_the_picture_of_a_page_is_one_that_a_run_of_its_command_has_drawn(page: Path) -> None:
    picture = page.with_suffix(".svg").read_text()
    assert f"]({page.stem}.svg)" in page.read_text()
    last = re.search(r"held-out loss ([0-9.]+)", picture)
    assert last is not None
    assert f"{float(last[1]):.3f}" in page.read_text(), "the page says the loss that its picture ends with"
    assert any(f": {run}-2" in picture for run in RUNS[page.stem]), "the run has the name of one of the page's"
