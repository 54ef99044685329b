"""Marks of tests that are about a call itself that only Linux has; whatever else is tested has to do without it."""

from __future__ import annotations

import pytest

from shoal.runtime.linux_calls import LinuxCall, has


def needs(call: LinuxCall, why: str) -> pytest.MarkDecorator:
    """Skip a test where there is no such call, or where the suite runs without it (SHOAL_PORTABLE=1)."""
    return pytest.mark.skipif(not has(call), reason=f"without {call.value} {why}")
