"""A short code in place of a long invitation: who types it gets the invitation, once (SPAKE2, as python-spake2 has it).

    joins                              invites
      -- mark, own element ------------->
      <------------------ own element --
      -- MAC by the common key --------->     another one: a try is used up, and nothing is said
      <-- the invitation, sealed by it --     the right one: the code is used up

Both make one key of the code and the two elements. Who lacks the code learns from a connection whether one guess was
right, and nothing that it could try others on; after `MAX_WRONG` wrong ones, or `VALID_S`, the code is nobody's.
Abdalla and Pointcheval, "Simple Password-Based Encrypted Key Exchange Protocols" (2005).
"""

from __future__ import annotations

import hmac
import secrets
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, cast

import anyio
from anyio.abc import ByteStream, SocketAttribute
from anyio.streams.buffered import BufferedByteReceiveStream
from spake2 import SPAKE2_A, SPAKE2_B, SPAKEError  # pyright: ignore[reportMissingTypeStubs]
from spake2.ed25519_basic import NotOnCurve  # pyright: ignore[reportMissingTypeStubs]

from shoal.errors import ConfigError, ConnectionLost
from shoal.identity import derived_key, open_content, seal_content

VALID_S: Final = 600.0
MAX_WRONG: Final = 3
_DIGITS: Final = 6
_MARK: Final = b"shoal code 1\n"
_ELEMENT_BYTES: Final = 33
_MAC_BYTES: Final = 32
_SEAL: Final = b"shoal code seal 1"
_MAX_SEALED_BYTES: Final = 4096
_LENGTH_BYTES: Final = 2
_EXCHANGE_S: Final = 10.0
_MAX_AT_ONCE: Final = 16
_MAX_OF_ONE: Final = 4
"""Connections, and those of one address: who comes beyond is sent away at once."""
_JUNK: Final = (SPAKEError, NotOnCurve, ValueError, AssertionError)
"""What an element that is none makes the library raise."""
_GONE: Final = (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, OSError)


@dataclass(frozen=True)
class Code:
    """What is typed. The place tells offers apart on one network, and is no secret; the digits are."""

    place: int
    digits: str

    @staticmethod
    def new() -> Code:
        """Return a code that nobody can guess in three tries."""
        return Code(secrets.randbelow(99) + 1, f"{secrets.randbelow(10**_DIGITS):0{_DIGITS}d}")

    @staticmethod
    def parsed(text: str) -> Code | None:
        """Return what somebody has typed, with or without dashes and blanks between the digits; None: it is no code."""
        place, mark, digits = text.strip().partition("-")
        digits = "".join(digits.replace("-", " ").split())
        if not mark or not (place.isascii() and place.isdigit()) or not (digits.isascii() and digits.isdigit()):
            return None
        return Code(int(place), digits) if len(digits) == _DIGITS and len(place) <= 2 else None

    def __str__(self) -> str:
        return f"{self.place}-{self.digits[:3]}-{self.digits[3:]}"

    @property
    def secret(self) -> bytes:
        """What both sides make their key of."""
        return str(self).encode()


@dataclass
class CodeOffer:
    """One invitation, for whoever says the code first.

    Attributes:
        refused: is told of each wrong try, with the address that it came from.
        num_wrong: tries that were wrong.
        taken_by: the address that has it; empty: nobody has yet.
    """

    code: Code
    text: str
    refused: Callable[[str], None] = lambda _: None
    num_wrong: int = 0
    taken_by: str = ""
    _over: anyio.Event = field(default_factory=anyio.Event)
    _served: Counter[str] = field(default_factory=Counter[str])

    @property
    def is_over(self) -> bool:
        """Whether nobody gets it any more."""
        return bool(self.taken_by) or self.num_wrong >= MAX_WRONG

    async def wait(self) -> None:
        """Return when somebody has it, or too many were wrong."""
        await self._over.wait()

    async def answer(self, stream: ByteStream) -> None:
        """Serve one connection; it is closed at once when it is not what it has to be."""
        peer = _peer_of(stream)
        with suppress(*_JUNK, *_GONE), anyio.move_on_after(_EXCHANGE_S):
            async with stream:
                if self._served.total() < _MAX_AT_ONCE and self._served[peer] < _MAX_OF_ONE:
                    self._served[peer] += 1
                    try:
                        await self._exchange(stream, peer)
                    finally:
                        self._served[peer] -= 1
                        if not self._served[peer]:
                            del self._served[peer]  # of addresses there is no end

    async def _exchange(self, stream: ByteStream, peer: str) -> None:
        received = BufferedByteReceiveStream(stream)
        if await received.receive_exactly(len(_MARK)) != _MARK:
            return
        element = await received.receive_exactly(_ELEMENT_BYTES)
        own = cast(Any, SPAKE2_B(self.code.secret, idA=b"joins", idB=b"invites"))
        await stream.send(own.start())
        key: bytes = own.finish(element)
        mac = await received.receive_exactly(_MAC_BYTES)
        # Nothing is awaited from here to where the try counts: of many connections at once each is one.
        if self.is_over:
            return
        if not hmac.compare_digest(mac, _mac(key)):
            self.num_wrong += 1
            self.refused(peer)
        else:
            self.taken_by = peer
        if self.is_over:
            self._over.set()
        if self.taken_by:
            sealed = seal_content(key, _SEAL, self.text.encode())
            await stream.send(len(sealed).to_bytes(_LENGTH_BYTES, "big") + sealed)


async def take(host: str, port: int, code: Code) -> str:
    """Return the text of the invitation that is offered there.

    Raises:
        ConnectionLost: nobody answers there as who has made a code does, and nobody has had a guess at this one.
        ConfigError: this code is not taken there; somebody who guesses has had one guess at it.
    """
    where = f"{host}:{port}"
    try:
        with anyio.fail_after(_EXCHANGE_S):
            stream = await anyio.connect_tcp(host, port)
    except (OSError, UnicodeError) as error:
        reason = str(error) or "no answer"
        raise ConnectionLost(f"{where} cannot be reached ({reason}): does `shoal invite` still wait there?") from error
    shown = False
    try:
        with anyio.fail_after(_EXCHANGE_S):
            async with stream:
                received = BufferedByteReceiveStream(stream)
                own = cast(Any, SPAKE2_A(code.secret, idA=b"joins", idB=b"invites"))
                await stream.send(_MARK + own.start())
                key: bytes = own.finish(await received.receive_exactly(_ELEMENT_BYTES))
                # From here on the other side may have what it can try one guess on, whatever becomes of it.
                shown = True
                await stream.send(_mac(key))
                return await _sealed_text(received, key)
    except TimeoutError as error:
        reason = f"{where} has not answered within {_EXCHANGE_S:.0f} s"
        if not shown:
            raise ConnectionLost(f"{reason}: try again") from error
        raise ConfigError(
            f"{reason}, and may have used the code up: `shoal invite --code` says so, and makes another"
        ) from error
    except _GONE as error:
        if not shown:
            raise ConnectionLost(f"{where} is busy, or is not where a code was made: try again") from error
        raise ConfigError(
            f"{where} does not take this code: it is wrong, used up or too old; `shoal invite --code` makes another"
        ) from error
    except _JUNK as error:
        if not shown:
            raise ConnectionLost(f"{where} is not where a code was made") from error
        raise ConfigError(f"{where} is not where this code was made") from error


async def _sealed_text(received: BufferedByteReceiveStream, key: bytes) -> str:
    length = int.from_bytes(await received.receive_exactly(_LENGTH_BYTES), "big")
    if length > _MAX_SEALED_BYTES:
        raise ValueError(f"{length} bytes")
    text = open_content(key, _SEAL, await received.receive_exactly(length))
    if text is None:
        raise ValueError("sealed by another key")
    return text.decode()


def _mac(key: bytes) -> bytes:
    return hmac.digest(derived_key(key, b"shoal code mac 1"), _MARK, "sha256")


def _peer_of(stream: ByteStream) -> str:
    try:
        address: tuple[str, int] | str = stream.extra(SocketAttribute.remote_address, "")
    except AttributeError:
        return ""  # anyio asks for the socket, which one that was reset meanwhile has no more under uvloop
    # An address of IPv4, as a socket for both kinds has it.
    return address[0].removeprefix("::ffff:") if isinstance(address, tuple) else address
