"""How a fork server ends that does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from shoal.runtime import fork_server_keeper
from shoal.runtime.fork_server_keeper import ForkServerKeeper


@pytest.mark.parametrize("is_preloaded", [True, False])
async def test_one_that_does_not_end_in_time_is_killed_and_that_is_worth_a_line_unless_it_still_imports(
    is_preloaded: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fork_server_keeper, "_END_TIMEOUT_S", 0.01)
    done: list[str] = []
    servers = SimpleNamespace(
        cut_lifelines=lambda: done.append("cut"),
        current=SimpleNamespace(wait=anyio.sleep_forever),
        kill=lambda: done.append("killed"),
    )
    preloaded = anyio.Event()
    if is_preloaded:
        preloaded.set()
    keeper: Any = SimpleNamespace(
        _servers=servers, _preloaded=preloaded, failure=None, _fail_all=lambda error: done.append(str(error))
    )
    await ForkServerKeeper.end(keeper)
    assert done == ["cut", "killed", "the supervisor has ended"]
    assert caplog.messages == (["fork_server.killed"] if is_preloaded else [])
