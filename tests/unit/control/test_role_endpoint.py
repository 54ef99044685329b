"""A role's endpoint has what the configuration says of the network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.config import config_to_json, load_config
from shoal.control import role_start
from shoal.control.role_start import RoleStart
from shoal.identity import Identity


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
