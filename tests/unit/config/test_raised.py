"""What code of the user's own has raised is said with its line, however long the text is."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

from shoal.config.own_class import raised, raises_itself


def _error(text: str) -> Exception:
    try:
        raise TypeError(text)
    except TypeError as error:
        return error


def test_the_line_is_said_behind_the_text() -> None:
    assert re.fullmatch(r"TypeError: no such shape \(\S+test_raised\.py line \d+\)", raised(_error("no such shape")))


@pytest.mark.parametrize("max_chars", [10, 200])
def test_a_long_text_is_cut_and_the_line_is_not(max_chars: int) -> None:
    said = raised(_error("long " * 100), max_chars=max_chars)
    assert len(said) == max_chars
    assert max_chars < 100 or re.fullmatch(r"TypeError: long .*\(\S+test_raised\.py line \d+\)", said)


def test_what_none_of_the_users_code_has_raised_has_no_line() -> None:
    assert raised(ValueError("here")) == "ValueError: here"


@pytest.mark.parametrize(
    "file", ["pip_installed_package/net.py", "pip_installed_module.py"], ids=["a package", "a module"]
)
def test_code_that_pip_has_installed_is_the_users_own_where_the_configuration_names_it(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "site-packages"
    (installed / file).parent.mkdir(parents=True)
    (installed / file).write_text("def forward():\n    raise ValueError('odd')\n")
    monkeypatch.syspath_prepend(installed)
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    module = file.removesuffix(".py").replace("/", ".")
    with pytest.raises(ValueError, match="odd") as caught:
        importlib.import_module(module).forward()
    error = caught.value.with_traceback(caught.tb.tb_next)
    assert raised(error, f"{module}:Net") == f"ValueError: odd ({installed / file} line 2)"
    assert raises_itself(error, f"{module}:Net")
    # Of what somebody else has installed no line is to be mended.
    assert raised(error, "another.module:Net") == "ValueError: odd"
    assert not raises_itself(error, "another.module:Net")
