"""The pages that train a model on one machine: their commands that need no network run as they stand, in order, and the
model learns."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.documented import commands
from tests.e2e.launched import ROOT, run_shoal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RUNS = {
    "chat": ["chat", "chat_base", "chat_lora"],
    "images": ["resnet18_split"],
    "language_model": ["sandbox"],
    "speech": ["wav2vec2_split"],
}
# What looks at a run that has ended; the pages are of docs/.
LOOKS = ("start/what_you_see", "monitoring", "wrong", "reference/files", "reference/keys", "tasks/use_model")
# A run that goes on, another host, or a model that this run does not leave; `shoal doctor` has a test of its own.
NOT_HERE = re.compile(
    r"shoal (status|doctor|import)|ssh |exec mail|python start_trainer_client|shoal export logs/(resnet18_lsq|sandbox)"
)
PAGES = [ROOT / "docs" / "tasks" / f"{name}.md" for name in RUNS]
LANGUAGE_MODEL = ROOT / "docs" / "tasks" / "language_model.md"
# What keeps a test short, and says nothing about the page.
SHORT = "--diloco.inner-steps=6 --diloco.outer-steps=2 --servers.replicas=1"
# Of random weights: after fewer steps, and outer ones over the mark, the model can be worse than at the beginning.
SHORT_FROM_NOTHING = "--diloco.inner-steps=15 --diloco.outer-steps=3 --servers.replicas=1"


START = ROOT / "docs" / "start" / "one_machine.md"
# The environment is active, and what make does beside the run has tests of its own; two minutes of faults are more of
# what fifteen seconds are, and all that is trained meanwhile is computed again.
AS_HERE = {
    "source .venv/bin/activate": "",
    "--for 2m": "--for 15s --emulated-device 100ms --diloco.inner-steps 10 --diloco.batch-size-per-step 8",
    "make test ": "true ",
}


def page_script(page: Path) -> str:
    """The commands in the blocks for bash; those for sh need a network, or files of a reader's own."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
    lines = "".join(blocks).splitlines()
    short = SHORT_FROM_NOTHING if page.stem == "language_model" else SHORT
    return "\n".join(f"{line} {short}" if "run_local.py" in line else line for line in lines)


def _looks() -> list[str]:
    """The commands that look at a run of a language model; some are on several pages."""
    found = [command for name in LOOKS for command in commands(f"docs/{name}.md")]
    return [command for command in found if not NOT_HERE.match(command)]


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
    assert summary["eval_loss_last"] < summary["eval_loss_first"], run
    assert (directory / "logs" / run / "curves.svg").is_file(), run


def test_the_commands_of_the_first_page_and_of_that_on_language_models_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both train the sandbox: it is trained once, by the line of the second page.
    trains, *others = page_script(LANGUAGE_MODEL).splitlines()
    script = "\n".join(re.findall(r"```bash\n(.*?)```", START.read_text(), re.DOTALL))
    for written, here in {**AS_HERE, "make run ": f"{trains} "}.items():
        assert written in script
        script = script.replace(written, here)
    said = _done(script, tmp_path)
    for name in re.findall(r"^([a-z][a-z ,/()A-Z]+?)  +[\d,.]+(?: MiB)?$", START.read_text(), re.MULTILINE):
        assert f"\n{name} " in said, f"the page shows {name}"
    assert "chaos holds:" in said
    assert (tmp_path / "mine" / "config.json").is_file()
    has_run = commands(str(START.relative_to(ROOT)))
    left = [line for line in dict.fromkeys([*others, *_looks()]) if line not in has_run]
    said = _done_here("\n".join(left), tmp_path, monkeypatch)
    assert "Fields: peer, who" in said, "shoal explain"
    assert "model.left" in said, "shoal events"
    _has_learned("sandbox", tmp_path)


@pytest.mark.parametrize("page", [page for page in PAGES if page != LANGUAGE_MODEL], ids=lambda page: page.stem)
def test_the_commands_of_a_page_run_one_after_the_other(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _done_here(page_script(page), tmp_path, monkeypatch)
    for run in RUNS[page.stem]:
        _has_learned(run, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_picture_of_a_page_is_one_that_a_run_of_its_command_has_drawn(page: Path) -> None:
    picture = page.with_suffix(".svg").read_text()
    assert f"]({page.stem}.svg)" in page.read_text()
    last = re.search(r"held-out loss ([0-9.]+)", picture)
    assert last is not None
    assert f"{float(last[1]):.3f}" in page.read_text(), "the page says the loss that its picture ends with"
    assert any(f": {run}-2" in picture for run in RUNS[page.stem]), "the run has the name of one of the page's"
