"""Who a process is: an Ed25519 key, the libp2p peer id that contains it, signatures; and the key of its swarm.

Peer ids follow https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md: base58btc over the identity multihash
of the protobuf-encoded public key. A peer id of this kind contains the public key, so a signature can be verified with
nothing but the id. Key files hold the protobuf-encoded private key, the form that libp2p's daemon reads as well.

Not every 32 bytes are a key that somebody owns. Of Ed25519's points eight are of small order: a signature under them
needs no private key, and one signature holds for every message. No peer id is made of them, or read as one of them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from shoal.errors import ConfigError, IdentityError, SignatureError
from shoal.ids import PeerId

_ALPHABET: Final = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 12
_NO_LINKS: Final = frozenset({errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
"""What link(2) says where a disk has none, as exFAT."""
# Identity multihash (00) of 36 bytes (24): protobuf PublicKey with type 1 = Ed25519 and 32 bytes of data.
_PEER_ID_PREFIX: Final = bytes.fromhex("002408011220")
# An id of ours has 52 characters; base58 takes quadratic time, so longer texts are refused before it.
_MAX_PEER_ID_CHARS: Final = 64
# Protobuf PrivateKey with type 1 = Ed25519 and 64 bytes of data: the seed, then the public key.
_PRIVATE_KEY_PREFIX: Final = bytes.fromhex("08011240")
_FIELD: Final = 2**255 - 19
"""Coordinates of points are numbers below it; a key is y, with the sign of x in the highest bit."""
_ORDER_8_Y: Final = int.from_bytes(
    bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"), "little"
)
_SMALL_ORDER_YS: Final = frozenset({1, _FIELD - 1, 0, _ORDER_8_Y, _FIELD - _ORDER_8_Y})
"""Of the points of order 1, 2, 4 and 8; with either sign of x they are all eight."""


class Identity:
    """An Ed25519 key pair.

    Attributes:
        peer_id: contains the pair's public key.
    """

    def __init__(self, private_bytes: bytes) -> None:
        """Use the key with this 32-byte seed.

        Raises:
            IdentityError: not 32 bytes.
        """
        if len(private_bytes) != KEY_BYTES:
            raise IdentityError(f"an Ed25519 private key has {KEY_BYTES} bytes, not {len(private_bytes)}")
        self._key = Ed25519PrivateKey.from_private_bytes(private_bytes)
        self._public_bytes = self._key.public_key().public_bytes_raw()
        self.peer_id = peer_id_of(self._public_bytes)

    @classmethod
    def generate(cls) -> Identity:
        """Return a new random identity."""
        return cls(Ed25519PrivateKey.generate().private_bytes_raw())

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Return the identity in a key file; make one, readable by the owner only, if there is no file.

        Raises:
            IdentityError: the file cannot be read or written, holds no Ed25519 key, or others may read it.
        """
        if not path.exists():
            with contextlib.suppress(FileExistsError):
                cls.generate().to_p2p_key_file(path)
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
            raw = path.read_bytes()
        except OSError as error:
            raise IdentityError(f"cannot read the key file {path}: {error.strerror}") from error
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise IdentityError(f"others may read the key file {path} (mode {mode:o}): run `chmod 600 {path}`")
        seed = raw[len(_PRIVATE_KEY_PREFIX) : len(_PRIVATE_KEY_PREFIX) + KEY_BYTES]
        if len(seed) != KEY_BYTES or cls(seed).p2p_key_bytes != raw:
            raise IdentityError(f"{path} holds no Ed25519 key in libp2p's form: move it away to have a new one made")
        return cls(seed)

    @property
    def private_bytes(self) -> bytes:
        """The seed of the private key, 32 bytes; keep it secret."""
        return self._key.private_bytes_raw()

    @property
    def p2p_key_bytes(self) -> bytes:
        """The private key as libp2p's key files hold it; keep it secret."""
        return _PRIVATE_KEY_PREFIX + self.private_bytes + self._public_bytes

    def to_p2p_key_file(self, path: Path) -> None:
        """Write the private key to a new file that only the owner may read.

        Raises:
            FileExistsError: there is a file already; it is left alone.
            IdentityError: the file cannot be written.
        """
        try:
            _write_secret(path, self.p2p_key_bytes)
        except FileExistsError:
            raise
        except OSError as error:
            raise IdentityError(f"cannot write the key file {path}: {error.strerror}") from error

    def sign(self, data: bytes) -> bytes:
        """Return the 64-byte Ed25519 signature over `data` (RFC 8032)."""
        return self._key.sign(data)

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"


def peer_id_of(public_key: bytes) -> PeerId:
    """Return the peer id of a 32-byte Ed25519 public key.

    Raises:
        IdentityError: not 32 bytes, or a key that nobody can own.
    """
    if len(public_key) != KEY_BYTES:
        raise IdentityError(f"an Ed25519 public key has {KEY_BYTES} bytes, not {len(public_key)}")
    _require_owned(public_key)
    return PeerId(_base58_encode(_PEER_ID_PREFIX + public_key))


def public_key_of(peer_id: PeerId) -> bytes:
    """Return the 32-byte public key that an Ed25519 peer id contains.

    Raises:
        IdentityError: the text is no peer id, one of another kind of key, or of a key that nobody can own.
    """
    raw = _base58_decode(peer_id) if len(peer_id) <= _MAX_PEER_ID_CHARS else b""
    if len(raw) != len(_PEER_ID_PREFIX) + KEY_BYTES or not raw.startswith(_PEER_ID_PREFIX):
        raise IdentityError(f"{peer_id[:_MAX_PEER_ID_CHARS]!r} is not the peer id of an Ed25519 key")
    public_key = raw[len(_PEER_ID_PREFIX) :]
    _require_owned(public_key)
    return public_key


def _require_owned(public_key: bytes) -> None:
    """Check that a signature under this key proves something; every key of another peer passes here.

    Raises:
        IdentityError: the point is of small order, or is not written in the one way that RFC 8032 allows.
    """
    y = int.from_bytes(public_key, "little") & ((1 << 255) - 1)
    if y in _SMALL_ORDER_YS:
        raise IdentityError(f"{public_key.hex()} is a point of small order: anybody could sign for it")
    if y >= _FIELD:
        raise IdentityError(f"{public_key.hex()} is no public key: its number is larger than the curve's field")


def verify(peer_id: PeerId, data: bytes, signature: bytes) -> None:
    """Check that the owner of `peer_id` signed `data`.

    Raises:
        SignatureError: it did not, or the peer id contains no key.
    """
    try:
        Ed25519PublicKey.from_public_bytes(public_key_of(peer_id)).verify(signature, data)
    except (InvalidSignature, IdentityError) as error:
        raise SignatureError(f"no valid signature of {peer_id[:_MAX_PEER_ID_CHARS]} over {len(data)} bytes") from error


def create_swarm_key(path: Path, swarm_key: bytes | None = None) -> bytes:
    """Write a swarm key to a new file that only the owner may read; return it.

    Args:
        swarm_key: None: a new one, 32 random bytes.

    Raises:
        ConfigError: there is a file already (it is left alone), or it cannot be written.
    """
    swarm_key = swarm_key or secrets.token_bytes(KEY_BYTES)
    path = path.expanduser()
    try:
        _write_secret(path, swarm_key)
    except FileExistsError:
        raise ConfigError(
            f"{path} exists already and is left alone: hosts that use it would lose their swarm. Name another file, or "
            "move it away"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot write the swarm key {path}: {error.strerror}") from error
    return swarm_key


def load_swarm_key(path: Path) -> bytes:
    """Return the swarm key, 32 bytes, in a file.

    Raises:
        ConfigError: there is no file (the message says how to make one), others may read it, or it holds no key.
    """
    path = path.expanduser()
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            swarm_key = file.read(KEY_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(
            f"there is no swarm key {path}: copy it from a host of the swarm you want to join, or make a new one with "
            f"`shoal key new --swarm-key-file {path}`"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot read the swarm key {path}: {error.strerror}") from error
    if mode & 0o077:
        raise ConfigError(f"others may read the swarm key {path}: run `chmod 600 {path}`")
    if len(swarm_key) != KEY_BYTES:
        raise ConfigError(f"{path} is no swarm key: it must hold exactly {KEY_BYTES} bytes (copy the file as it is)")
    return swarm_key


def swarm_key_fingerprint(swarm_key: bytes) -> str:
    """Return a name for the key by which people can compare two, and which does not tell the key."""
    digest = hashlib.sha3_256(b"shoal fingerprint 1\0" + swarm_key).hexdigest()
    return "-".join(digest[i : i + 4] for i in range(0, 16, 4))


def namespace(swarm_key: bytes, experiment_prefix: str) -> str:
    """Return the name (hex) under which a swarm's records are kept. It cannot be guessed without the key.

    Args:
        experiment_prefix: the user's name of the experiment.
    """
    digest = hashlib.sha3_256(b"shoal namespace 1\0")
    digest.update(len(swarm_key).to_bytes(8, "big"))
    digest.update(swarm_key)
    digest.update(experiment_prefix.encode())
    return digest.hexdigest()


def derived_key(secret: bytes, label: bytes) -> bytes:
    """Return a key of 32 bytes for one purpose alone: HKDF-SHA3-256 of a secret.

    Args:
        secret: 32 random bytes, or bytes derived from them.
        label: names the purpose.
    """
    return HKDF(algorithm=hashes.SHA3_256(), length=KEY_BYTES, salt=None, info=label).derive(secret)


def seal_content(secret: bytes, label: bytes, content: bytes, bound_to: bytes = b"") -> bytes:
    """Return content that only who has the secret can read, or write: a nonce, then ChaCha20-Poly1305.

    Args:
        bound_to: what it is opened with again; it is not in the result.
    """
    nonce = os.urandom(_NONCE_BYTES)
    return nonce + ChaCha20Poly1305(derived_key(secret, label)).encrypt(nonce, content, bound_to)


def open_content(secret: bytes, label: bytes, sealed: bytes, bound_to: bytes = b"") -> bytes | None:
    """Return what `seal_content` was given; None if it was not made with the same secret, label and `bound_to`."""
    nonce, content = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
    try:
        return ChaCha20Poly1305(derived_key(secret, label)).decrypt(nonce, content, bound_to)
    except (InvalidTag, ValueError):  # a nonce that is too short
        return None


def swarm_authority(swarm_key: bytes) -> Identity:
    """Return the key pair that all who have the swarm key share: what it has signed, one of them has signed."""
    return Identity(derived_key(swarm_key, b"shoal record authority 1"))


def _write_secret(path: Path, content: bytes) -> None:
    """Write a new file of mode 0600 that outlives a loss of power.

    Another process that reads the same path sees the whole content or no file: it is written aside, then linked. On a
    disk without links, as most memory sticks are, it may see a part of it, which is no key.

    Raises:
        OSError: it cannot be written; FileExistsError if it exists.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        _write_new(aside, content)
        try:
            os.link(aside, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            _write_new(path, content)
    finally:
        aside.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file servers know no such request
            os.fsync(directory)
    finally:
        os.close(directory)


def _write_new(path: Path, content: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _base58_encode(raw: bytes) -> str:
    number = int.from_bytes(raw, "big")
    digits = ""
    while number:
        number, digit = divmod(number, 58)
        digits = _ALPHABET[digit] + digits
    return "1" * (len(raw) - len(raw.lstrip(b"\0"))) + digits


def _base58_decode(text: str) -> bytes:
    """Return the bytes, or none at all if the text is not base58."""
    number = 0
    for character in text:
        digit = _ALPHABET.find(character)
        if digit < 0:
            return b""
        number = number * 58 + digit
    return b"\0" * (len(text) - len(text.lstrip("1"))) + number.to_bytes((number.bit_length() + 7) // 8, "big")
