"""Mutual TLS 1.3 between the hosts of a swarm: every peer's certificate is for its own identity key.

    swarm key --HKDF-SHA3-256--> key of the swarm's certificate authority --signs--> certificate of each identity key

Whoever has the swarm key can derive the authority's key, so every peer issues its own certificate and nothing has to be
handed out. Whoever lacks it can neither show a certificate that is accepted nor accept one. That a peer owns its
identity key is proven by the TLS handshake itself (RFC 8446, section 4.4.3); the public key in its certificate is its
peer id.
"""

from __future__ import annotations

import datetime as dt
import os
import ssl
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shoal.errors import HandshakeError, IdentityError, Offence
from shoal.identity import Identity, derived_key, peer_id_of
from shoal.ids import PeerId
from shoal.runtime.sealed_memory import has_memfd

_AUTHORITY_LABEL: Final = b"shoal certificate authority 1"
_AUTHORITY_NAME: Final = "shoal swarm"
# Clocks of strangers' machines may be far off, as of one that begins at 1970 where nothing keeps its time, and keys are
# changed with the swarm key: the dates bind nothing.
_NOT_BEFORE: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_NOT_AFTER: Final = dt.datetime(9999, 12, 31, tzinfo=dt.UTC)


UNREADABLE_CERTIFICATE: Final = (
    ValueError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.ExtensionNotFound,
    x509.UnsupportedGeneralNameType,
)
"""What `cryptography` raises for the certificate of a stranger who writes into it what they like."""


@dataclass(frozen=True, slots=True)
class TlsContexts:
    """What one peer needs to dial and to be dialled; both ask for the other end's certificate."""

    server: ssl.SSLContext
    client: ssl.SSLContext


def tls_contexts(identity: Identity, swarm_key: bytes) -> TlsContexts:
    """Return the contexts of the peer `identity` in the swarm with this key."""
    authority_key = _authority_key(swarm_key)
    authority = _certificate(_AUTHORITY_NAME, authority_key.public_key(), authority_key, is_authority=True)
    own_key = Ed25519PrivateKey.from_private_bytes(identity.private_bytes)
    own = _certificate(identity.peer_id, own_key.public_key(), authority_key, is_authority=False)
    key_pem = own_key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    authority_pem = authority.public_bytes(serialization.Encoding.PEM).decode()
    contexts: list[ssl.SSLContext] = []
    with _in_memory_file(own.public_bytes(serialization.Encoding.PEM) + key_pem) as path:
        for side in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
            context = ssl.SSLContext(side)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False  # certificates are for keys; `peer_of` tells whose
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cadata=authority_pem)
            context.load_cert_chain(path)
            contexts.append(context)
    server, client = contexts
    server.num_tickets = 0  # every connection proves anew who it is
    return TlsContexts(server, client)


def peer_of(certificate: bytes | None) -> PeerId:
    """Return the peer that a verified certificate (DER) is for.

    Raises:
        HandshakeError: there is none, or its key is no identity key.
    """
    if certificate is None:
        raise HandshakeError("TLS: the other side showed no certificate", Offence.TLS)
    try:
        key = x509.load_der_x509_certificate(certificate).public_key()
    except UNREADABLE_CERTIFICATE as error:
        raise HandshakeError(f"TLS: the certificate cannot be read: {error}", Offence.TLS) from error
    if not isinstance(key, Ed25519PublicKey):
        raise HandshakeError("TLS: the certificate is not for an Ed25519 key", Offence.IDENTITY)
    try:
        return peer_id_of(key.public_bytes_raw())
    except IdentityError as error:
        raise HandshakeError(f"TLS: the certificate is for no identity key: {error}", Offence.IDENTITY) from error


def explained(error: ssl.SSLError) -> HandshakeError:
    """Return what broken TLS means to the user."""
    reason = (error.reason or str(error)).lower().replace("_", " ")
    if isinstance(error, ssl.SSLCertVerificationError) or reason.endswith(("unknown ca", "decrypt error")):
        return HandshakeError(
            f"TLS: {reason}: the other side has another swarm key (compare `shoal key fingerprint` on both hosts)",
            Offence.SWARM_KEY,
        )
    return HandshakeError(f"TLS: {reason}", Offence.TLS)


def _authority_key(swarm_key: bytes) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(derived_key(swarm_key, _AUTHORITY_LABEL))


def _certificate(
    subject: str, public_key: Ed25519PublicKey, authority_key: Ed25519PrivateKey, *, is_authority: bool
) -> x509.Certificate:
    """Return a certificate for `public_key`, as RFC 5280 wants it (strict verifiers check)."""
    usage = x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(_AUTHORITY_NAME))
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
    )
    if not is_authority:
        both_ends = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = builder.add_extension(both_ends, critical=False)
    return builder.sign(authority_key, algorithm=None)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


@contextmanager
def _in_memory_file(content: bytes) -> Generator[str]:
    """Yield the path of a file that nobody else can open and that is gone afterwards.

    `load_cert_chain` takes a private key from a path only. Where there is no memory file, a temporary one of mode 0600
    is used.
    """
    if has_memfd():
        with open(os.memfd_create("shoal-tls"), "wb") as file:
            file.write(content)
            file.flush()
            yield f"/proc/self/fd/{file.fileno()}"
    else:
        with tempfile.NamedTemporaryFile(prefix="shoal-tls-") as file:
            file.write(content)
            file.flush()
            yield file.name
