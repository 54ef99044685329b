"""What the tests of the data server's role share: its spec."""

from __future__ import annotations

import secrets
from pathlib import Path

import msgspec

from shoal.config import Config, config_to_json
from shoal.control.role_start import DataServerSpec
from shoal.identity import Identity
from shoal.ids import PeerId, RunId
from shoal.wire.messages.base import Hop

RUN = RunId("test-run")


def spec(directory: Path, client: PeerId | None, config: Config) -> bytes:
    """Return the spec of a data server whose socket and logs are in a directory."""
    start = DataServerSpec(
        run_id=RUN,
        role="data_server",
        index=0,
        config_json=config_to_json(config),
        identity_key=Identity.generate().private_bytes,
        swarm_key=secrets.token_bytes(32),
        socket_path=str(directory / "d.sock"),
        log_dir=str(directory / "logs"),
        client=client,
    )
    return msgspec.msgpack.encode(start)


def hop_of(start: bytes) -> Hop:
    """Return where the data server of this spec is."""
    told = msgspec.msgpack.decode(start, type=DataServerSpec)
    return Hop(Identity(told.identity_key).peer_id, (f"unix:{told.socket_path}",))
