"""What the fork server has imported when it forks servers of a model of transformers, in an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt2", "mixtral"])
def test_a_server_imports_nothing_of_transformers_that_the_fork_server_has_not(kind: str) -> None:
    code = (
        "import sys\n"
        "import torch\n"
        "from tests.unit.model.hf.families import TOKENS, family_of\n"
        "from shoal.model.hf.preloaded import preload\n"
        "from shoal.model.stage import build_stage\n"
        "from shoal.runtime.process_info import thread_names\n"
        f"preload({kind!r})\n"
        "assert len(thread_names()) == 1, thread_names()\n"
        "before = set(sys.modules)\n"
        f"stage = build_stage(family_of({kind!r}), 0, 1, seed=1)\n"
        "stage(torch.zeros(1, TOKENS, dtype=torch.int64))\n"
        "assert not (new := {name for name in set(sys.modules) - before if name.startswith('transformers.')}), new\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_what_is_no_kind_of_model_imports_nothing_and_is_left_to_the_roles() -> None:
    code = (
        "import sys\n"
        "from shoal.model.hf.preloaded import preload\n"
        "before = set(sys.modules)\n"
        "for kind in ('no_such', 'os', 'transformers.models.gpt2', 'clip'):\n"
        "    preload(kind)\n"
        "assert not (new := {name for name in set(sys.modules) - before if 'modeling' in name}), new\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
