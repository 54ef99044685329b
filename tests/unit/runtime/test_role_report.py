"""What the process of a role leaves of the error with which it ends: a line of its log, and a word to its launcher."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.errors import ConfigError, RemoteError
from shoal.runtime.launcher_messages import RoleFailed
from shoal.runtime.role import EXIT_FAILED, EXIT_USER_ERROR, _report


@pytest.mark.parametrize(
    ("errors", "event", "code"),
    [
        ([ConfigError("no such device")], "role.failed", EXIT_USER_ERROR),
        ([RemoteError("it said no"), ConfigError("b")], "role.failed", EXIT_FAILED),
        ([ZeroDivisionError("a bug"), ConfigError("b")], "role.crashed", EXIT_FAILED),
    ],
)
def test_an_error_of_ours_is_named_and_a_bug_has_its_traceback(
    errors: list[Exception], event: str, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[object] = []
    control: Any = SimpleNamespace(tell=told.append)
    assert _report(ExceptionGroup("several", errors), control) == code
    assert told == [RoleFailed(str(errors[0]), type(errors[0]).__name__)]
    assert caplog.messages == [event]
    assert (caplog.records[0].exc_info is not None) == (event == "role.crashed")
