"""The control plane's daemon and we name the same key alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.identity import Identity

# Warnings of hivemind and of what it imports are not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


async def test_the_libp2p_daemon_takes_our_key_file_and_shows_our_peer_id(tmp_path: Path) -> None:
    from hivemind.p2p import P2P

    identity = Identity.generate()
    path = tmp_path / "identity.key"
    identity.to_p2p_key_file(path)
    daemon = await P2P.create(
        identity_path=str(path),
        host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        check_if_identity_free=False,
        nat_port_map=False,
    )
    try:
        assert daemon.peer_id.to_base58() == identity.peer_id
    finally:
        await daemon.shutdown()
