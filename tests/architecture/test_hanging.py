"""A test that waits in vain ends by itself."""

from __future__ import annotations

from types import SimpleNamespace

import anyio
import pytest
from tests import hanging


async def waits_in_vain() -> None:
    await anyio.sleep_forever()


def test_a_coroutine_that_waits_for_ever_fails_before_the_limit_of_its_test() -> None:
    item = SimpleNamespace(obj=waits_in_vain, stash=pytest.Stash())
    item.stash[hanging._limit_s] = 0.01
    next(hanging.pytest_pyfunc_call(item))
    assert item.obj.__name__ == "waits_in_vain"
    with pytest.raises(TimeoutError):
        anyio.run(item.obj)
