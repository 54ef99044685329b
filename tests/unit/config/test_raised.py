"""What code of the user's own has raised is said with its line, however long the text is."""

from __future__ import annotations

import re

import pytest

from shoal.config.own_class import raised


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
