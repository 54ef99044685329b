"""Certificates and handshakes in memory: who gets in, who does not, and what the user is told."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from tests.unowned_keys import SMALL_ORDER

from shoal.control import initial_peers
from shoal.errors import HandshakeError, Offence
from shoal.identity import Identity, peer_id_of, public_key_of
from shoal.transport import tls
from shoal.transport.tls import TlsContexts, explained, peer_of, tls_contexts

KEY = b"k" * 32
ALICE, BOB = Identity(b"a" * 32), Identity(b"b" * 32)


def pair(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Shake hands in memory; whichever side fails raises."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(down, up, server_side=False), server.wrap_bio(up, down, server_side=True)]
    waiting = list(ends)
    for _ in range(10):
        for end in list(waiting):
            try:
                end.do_handshake()
                waiting.remove(end)
            except ssl.SSLWantReadError:
                pass
    assert not waiting
    return ends[1], ends[0]


def test_peers_of_one_swarm_prove_who_they_are_to_each_other_under_tls_1_3() -> None:
    server, client = pair(tls_contexts(ALICE, KEY).server, tls_contexts(BOB, KEY).client)
    assert peer_of(server.getpeercert(binary_form=True)) == BOB.peer_id
    assert peer_of(client.getpeercert(binary_form=True)) == ALICE.peer_id
    assert server.version() == client.version() == "TLSv1.3"


def test_certificates_hold_on_a_machine_whose_clock_begins_at_1970() -> None:
    [authority] = tls_contexts(ALICE, KEY).client.get_ca_certs()
    server, _ = pair(tls_contexts(ALICE, KEY).server, tls_contexts(BOB, KEY).client)
    own = server.getpeercert()
    assert own is not None
    for certificate in (authority, own):
        assert ssl.cert_time_to_seconds(str(certificate["notBefore"])) <= 0


def test_another_swarm_key_is_refused_and_the_user_told_how_to_compare() -> None:
    with pytest.raises(ssl.SSLCertVerificationError) as caught:
        pair(tls_contexts(ALICE, KEY).server, tls_contexts(BOB, b"x" * 32).client)
    assert "shoal key fingerprint" in str(explained(caught.value))


def test_a_client_that_checks_nothing_and_shows_a_foreign_certificate_is_refused() -> None:
    careless = tls_contexts(BOB, b"x" * 32).client
    careless.verify_mode = ssl.CERT_NONE
    with pytest.raises(ssl.SSLCertVerificationError):
        pair(tls_contexts(ALICE, KEY).server, careless)


def test_a_client_without_a_certificate_is_refused() -> None:
    nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nobody.check_hostname = False
    nobody.verify_mode = ssl.CERT_NONE
    with pytest.raises(ssl.SSLError, match="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
        pair(tls_contexts(ALICE, KEY).server, nobody)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_older_versions_of_tls_are_refused() -> None:
    old = tls_contexts(BOB, KEY).client
    old.minimum_version = ssl.TLSVersion.TLSv1_2
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match="PROTOCOL"):
        pair(tls_contexts(ALICE, KEY).server, old)


def test_a_certificate_cannot_issue_others() -> None:
    """The authority's key is not in any certificate, and a peer's certificate is none of an authority."""
    server, _ = pair(tls_contexts(ALICE, KEY).server, tls_contexts(BOB, KEY).client)
    raw = server.getpeercert(binary_form=True)
    assert raw is not None
    certificate = x509.load_der_x509_certificate(raw)
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert constraints.ca is False


def test_what_is_no_identity_certificate_names_nobody() -> None:
    for wrong in (None, b"garbage"):
        with pytest.raises(HandshakeError):
            peer_of(wrong)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, tls._NOT_BEFORE, tls._NOT_AFTER)
    with pytest.raises(HandshakeError, match="Ed25519"):
        peer_of(builder.sign(tls._authority_key(KEY), None).public_bytes(Encoding.DER))
    assert peer_id_of(public_key_of(ALICE.peer_id)) == ALICE.peer_id


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("a003020102", "a003020107", False),  # a version that there is none of
        ("2b6570", "2b6572", False),  # a kind of key that is not known here
        ("551d23", "551d0e", True),  # one extension twice, which nobody looks at whose authority is known
    ],
)
def test_a_certificate_in_which_a_stranger_has_written_what_there_is_not_names_nobody(
    old: str, new: str, names: bool
) -> None:
    public_key = Ed25519PublicKey.from_public_bytes(public_key_of(ALICE.peer_id))
    good = tls._certificate(ALICE.peer_id, public_key, tls._authority_key(KEY), is_authority=False)
    odd = good.public_bytes(Encoding.DER).replace(bytes.fromhex(old), bytes.fromhex(new))
    assert initial_peers._peer_of(odd) is None
    if names:
        assert peer_of(odd) == ALICE.peer_id
    else:
        with pytest.raises(HandshakeError, match="cannot be read"):
            peer_of(odd)


@pytest.mark.parametrize("key", SMALL_ORDER, ids=bytes.hex)
def test_an_insider_is_no_peer_by_a_certificate_for_a_key_that_anybody_could_use(key: bytes) -> None:
    public_key = Ed25519PublicKey.from_public_bytes(key)
    certificate = tls._certificate("evil", public_key, tls._authority_key(KEY), is_authority=False)
    with pytest.raises(HandshakeError, match="small order") as refused:
        peer_of(certificate.public_bytes(Encoding.DER))
    assert refused.value.offence is Offence.IDENTITY


@pytest.mark.parametrize("in_memory", [True, False])
def test_the_private_key_is_in_no_file_afterwards(
    in_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int]] = []
    monkeypatch.setattr(tls.tempfile, "tempdir", str(tmp_path))
    if not in_memory:
        monkeypatch.setattr(tls, "has_memfd", lambda: False)
    load = ssl.SSLContext.load_cert_chain

    def spy(self: ssl.SSLContext, path: str) -> None:
        seen.append((path, Path(path).stat().st_mode & 0o077))
        load(self, path)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", spy)
    contexts = tls_contexts(ALICE, KEY)
    assert isinstance(contexts, TlsContexts)
    assert len(seen) == 2
    assert not any(Path(path).exists() for path, _ in seen)
    assert list(tmp_path.iterdir()) == []
    if not in_memory:
        assert all(mode == 0 for _, mode in seen)
