"""Identities: peer ids, key files, signatures, namespaces."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from tests.unowned_keys import NON_CANONICAL, SIGNATURE, SMALL_ORDER, P, peer_id

from shoal.errors import ConfigError, IdentityError, SignatureError
from shoal.identity import (
    Identity,
    create_swarm_key,
    derived_key,
    load_swarm_key,
    namespace,
    peer_id_of,
    public_key_of,
    verify,
)
from shoal.ids import PeerId

SEED = bytes(range(32))


def test_keys_are_encoded_as_in_the_test_vectors_of_libp2p() -> None:
    # https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md, "Test vectors", Ed25519.
    seed = bytes.fromhex("7e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d")
    public = bytes.fromhex("1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e")
    identity = Identity(seed)
    assert public_key_of(identity.peer_id) == public
    assert identity.p2p_key_bytes == bytes.fromhex("08011240") + seed + public
    assert identity.peer_id.startswith("12D3KooW")
    assert len(identity.peer_id) == 52


@given(seed=st.binary(min_size=32, max_size=32))
def test_a_peer_id_contains_its_public_key(seed: bytes) -> None:
    key = Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()
    assert Identity(seed).peer_id == peer_id_of(key)
    assert public_key_of(peer_id_of(key)) == key


@pytest.mark.parametrize("key", SMALL_ORDER + NON_CANONICAL, ids=bytes.hex)
def test_a_key_that_nobody_owns_is_no_peer_and_signs_nothing(key: bytes) -> None:
    for use in (lambda: peer_id_of(key), lambda: public_key_of(peer_id(key))):
        with pytest.raises(IdentityError, match=r"small order|larger than the curve's field"):
            use()
    for number in range(32):
        with pytest.raises(SignatureError):
            verify(peer_id(key), b"record %d" % number, SIGNATURE)


def test_without_that_check_a_constant_signature_would_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack is real, so that the test above can fail."""
    monkeypatch.setattr("shoal.identity._require_owned", lambda _: None)
    assert len(set(SMALL_ORDER)) == 8
    for key in SMALL_ORDER:
        held = 0
        for number in range(200):
            with contextlib.suppress(SignatureError):
                verify(peer_id(key), b"record %d" % number, SIGNATURE)
                held += 1
        assert held >= 5, key.hex()


def test_numbers_beside_those_of_small_order_are_keys() -> None:
    for y in (2, 3, P - 2, P - 3):
        key = y.to_bytes(32, "little")
        assert public_key_of(peer_id_of(key)) == key


def test_a_derived_key_depends_on_secret_and_purpose() -> None:
    keys = {derived_key(SEED, b"one"), derived_key(SEED, b"two"), derived_key(SEED[::-1], b"one")}
    assert len(keys) == 3
    assert all(len(key) == 32 for key in keys)


@pytest.mark.parametrize("text", ["", "alice", "12D3KooW", "0OIl" * 13, "Qm" + "a" * 44, "1" * 10_000, "ü" * 52])
def test_what_is_no_ed25519_peer_id_is_refused(text: str) -> None:
    with pytest.raises(IdentityError):
        public_key_of(PeerId(text))


def test_a_signature_holds_for_its_signer_and_bytes_only() -> None:
    alice, bob = Identity.generate(), Identity.generate()
    signature = alice.sign(b"record")
    verify(alice.peer_id, b"record", signature)
    for peer, data, sig in [
        (bob.peer_id, b"record", signature),
        (alice.peer_id, b"recorD", signature),
        (alice.peer_id, b"record", signature[:-1] + bytes([signature[-1] ^ 1])),
        (alice.peer_id, b"record", b""),
        (PeerId("nobody"), b"record", signature),
    ]:
        with pytest.raises(SignatureError):
            verify(peer, data, sig)


def test_a_key_file_is_made_once_for_the_owner_only_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "server.key"
    made = Identity.load_or_create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]
    assert Identity.load_or_create(path).peer_id == made.peer_id
    assert Identity.generate().peer_id != made.peer_id
    with pytest.raises(FileExistsError):
        Identity.generate().to_p2p_key_file(path)
    assert Identity.load_or_create(path).private_bytes == made.private_bytes


def test_keys_are_made_on_a_disk_that_knows_no_links_and_never_in_place_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(_source: Path, _target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")  # as exFAT says it

    monkeypatch.setattr(os, "link", link)
    key = create_swarm_key(tmp_path / "swarm.key")
    assert load_swarm_key(tmp_path / "swarm.key") == key
    with pytest.raises(ConfigError, match="exists already and is left alone"):
        create_swarm_key(tmp_path / "swarm.key")
    assert (
        Identity.load_or_create(tmp_path / "peer.key").peer_id == Identity.load_or_create(tmp_path / "peer.key").peer_id
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["peer.key", "swarm.key"]


def test_a_key_file_that_others_may_read_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "key"
    Identity.load_or_create(path)
    path.chmod(0o640)
    with pytest.raises(IdentityError, match="chmod 600"):
        Identity.load_or_create(path)


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x08\x01\x12\x40" + bytes(63), b"\x08\x01\x12\x40" + bytes(64)])
def test_a_broken_key_file_is_left_alone_and_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(IdentityError, match=str(path)):
        Identity.load_or_create(path)
    assert path.read_bytes() == content


def test_a_key_never_shows_in_a_representation() -> None:
    assert repr(Identity(SEED)) == f"Identity({Identity(SEED).peer_id})"
    with pytest.raises(IdentityError):
        Identity(b"short")


def test_a_namespace_depends_on_key_and_prefix_and_reveals_neither() -> None:
    names = {namespace(SEED, "resnet"), namespace(SEED, "resnet2"), namespace(SEED[:31], "resnet"), namespace(b"", "")}
    assert len(names) == 4
    assert namespace(b"k", "ab") != namespace(b"ka", "b")
    assert all(len(name) == 64 for name in names)
    assert namespace(SEED, "resnet") != hashlib.sha3_256(b"resnet").hexdigest()
