"""Help fits what a reader looks for, and whoever mistypes a letter is told what was meant."""

from __future__ import annotations

import random
import re
import string
from difflib import SequenceMatcher
from itertools import pairwise

import pytest

from shoal.cli import main
from shoal.cli.app import app
from shoal.config.keys import keys

COMMANDS = sorted(name for name in app if not name.startswith("-"))
LONG = [name for name in COMMANDS if len(name) > 2]  # with a letter changed, `ps` is like anything
FLAGS = {
    "evaluate": ["device", "family", "dataset-name"],
    "generate": ["max-tokens", "temperature", "stop"],
    "replay": ["processes", "swarm-key-file", "dataset-name"],
    "events": ["follow", "log-dir"],
    "chaos": ["every", "kinds", "emulated-device", "goodput"],
    "benchmark": ["repeat", "ignore-busy"],
    "run-local": ["config-path", "baseline", "tiny", "print-config"],
}
NEEDED = {"evaluate": ["x"], "generate": ["x", "--prompt=y"], "replay": ["x"]}


def mistyped(word: str, draw: random.Random) -> str:
    """A word with one letter too many, too few, or in place of another; its first letter and its dots are right."""
    place = draw.choice([place for place, letter in enumerate(word) if place and letter.isalpha()])
    letter = draw.choice(string.ascii_lowercase.replace(word[place], ""))
    return word[:place] + draw.choice([letter, "", word[place] + letter]) + word[place + 1 :]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    return capsys.readouterr().err


def is_as_near(typed: str, command: str, said: str) -> bool:
    """Whether a command was suggested that what was typed is at least as like as this one: `irport` is `report` as
    well, and `checkpointw` rather `checkpoint` than `checkpoints`."""
    likeness = {each: SequenceMatcher(None, each, typed).ratio() for each in COMMANDS}
    return any(f'Did you mean "{each}"' in said and likeness[each] >= likeness[command] for each in COMMANDS)


def test_the_lines_of_a_paragraph_are_filled(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run-local", "--help"]) == 0
    said = capsys.readouterr().out
    width = max(map(len, said.split("\n")))  # that of the boxes
    _, summary, paragraph, *_ = said.split("\n\n")
    assert summary.rstrip() == "Train on a swarm of processes on this machine."
    lines = [line.rstrip() for line in paragraph.split("\n")]
    assert len(lines) > 1
    for line, following in pairwise(lines):
        assert len(f"{line} {following.split()[0]}") > width, paragraph


@pytest.mark.parametrize("seed", range(3))
def test_a_mistyped_letter_is_corrected(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(seed)
    not_corrected = [
        typed
        for command in LONG
        if (typed := mistyped(command, draw)) not in COMMANDS and not is_as_near(typed, command, refused(capsys, typed))
    ]
    for command, flags in FLAGS.items():
        for flag in flags:
            typed = mistyped(flag, draw)
            said = refused(capsys, command, *NEEDED.get(command, ()), f"--{typed}=1")
            if not re.search(rf"[Dd]id you mean [`\"]?--{flag}\b", said):
                not_corrected.append(f"{command} --{typed}: {said}")
    for key in draw.sample(sorted(keys()), 30):
        typed = mistyped(key, draw)
        said = refused(capsys, "run-local", f"--{typed}=1")
        if key.replace("_", "-") not in said.replace("_", "-"):
            not_corrected.append(f"--{typed}: {said}")
    assert not not_corrected, "\n".join(not_corrected)


def test_every_command_stands_under_a_title_and_says_in_a_sentence_what_it_does() -> None:
    for name in COMMANDS:
        command = app[name]
        assert [group.name for group in command.group if not isinstance(group, str)], name
        summary = command.help.partition("\n\n")[0]
        assert summary.endswith("."), name
        assert len(summary) <= 120, name
