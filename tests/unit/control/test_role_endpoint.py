"""A role's endpoint has what the configuration says of the network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.config import config_to_json, load_config
from shoal.control import role_start
from shoal.control.role_start import RoleStart
from shoal.identity import Identity
from shoal.swarm.liveness import Liveness


@pytest.mark.parametrize("max_upload_mbit", [None, 12.5])
def test_no_more_is_sent_to_other_hosts_than_configured(
    max_upload_mbit: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(role_start, "open_endpoint", lambda **options: given.append(options))
    config = load_config(None, {"network": {"max_upload_mbit": max_upload_mbit}}, {})
    start = RoleStart(
        run_id="run-1",
        role="server",
        index=0,
        config_json=config_to_json(config),
        identity_key=Identity.generate().private_bytes,
        swarm_key=bytes(32),
        socket_path=str(tmp_path / "socket"),
        log_dir=str(tmp_path),
        between_hosts=True,
    )
    role_start.open_role_endpoint(start)
    [options] = given
    assert options["max_upload_mbit"] == max_upload_mbit
    assert options["uplink_file"] == tmp_path / "uplink", "the same for all roles of a launcher"


@pytest.mark.parametrize(("role", "heartbeat_s"), [("server", 0.1), ("monitor", 0.75)])
def test_who_nobody_waits_for_says_that_it_is_there_as_seldom_as_it_may(
    role: str, heartbeat_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(role_start, "open_endpoint", lambda **options: given.append(options))
    config = load_config(None, {"health": {"heartbeat_s": 0.1, "deadline_s": 3.0}}, {})
    start = RoleStart(
        run_id="run-1",
        role=role,
        index=0,
        config_json=config_to_json(config),
        identity_key=Identity.generate().private_bytes,
        swarm_key=bytes(32),
        socket_path=str(tmp_path / "socket"),
        log_dir=str(tmp_path),
    )
    role_start.open_role_endpoint(start)
    [options] = given
    assert (options["limits"].heartbeat_s, options["limits"].deadline_s) == (heartbeat_s, 3.0)
    Liveness[str](heartbeat_s=heartbeat_s, deadline_s=3.0, now_s=0.0)
