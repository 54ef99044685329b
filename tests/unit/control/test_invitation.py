"""The text by which another host joins a swarm."""

from __future__ import annotations

import base64
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.control.invitation import MARK, Invitation, read, written
from shoal.errors import ConfigError

PEER = "12D3KooWFrCUuswLZqfWycRGiHa1uWQcgJac2rbagi2VKoe6XbJ4"
PEERS = tuple(f"/ip4/203.0.113.{number}/tcp/50000/p2p/{PEER}" for number in (7, 8, 9, 10, 11))
NOW_S = 1_800_000_000
INVITATION = Invitation("sandbox", bytes(range(32)), PEERS, NOW_S + 3600)


def _refused(text: str) -> str:
    with pytest.raises(ConfigError) as raised:
        read(text, NOW_S)
    # It is a secret.
    assert text[len(MARK) : len(MARK) + 12] not in str(raised.value) or len(text) < len(MARK) + 12
    return str(raised.value)


def test_what_is_written_is_read_also_where_a_line_was_broken() -> None:
    text = written(INVITATION)
    assert len(text) < 420
    assert read(f"  {text[:80]}\r\n{text[80:]}\n", NOW_S) == INVITATION


def test_five_addresses_of_any_peers_are_enough() -> None:
    other = "/dns4/box.example/tcp/1/p2p/12D3KooWother"
    text = written(Invitation("x", bytes(32), (other, *PEERS), NOW_S))
    assert read(text, NOW_S).initial_peers == (other, *PEERS[:4])


def test_an_address_without_a_peer_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not say which peer"):
        written(Invitation("x", bytes(32), ("/ip4/203.0.113.7/tcp/1",), NOW_S))


@given(st.integers(0), st.sampled_from("abcdefghijklmnopqrstuvwxyz234567"))
def test_a_letter_that_is_missing_or_another_one_is_noticed(place: int, letter: str) -> None:
    text = written(INVITATION)
    at = len(MARK) + place % (len(text) - len(MARK))
    assert "is not whole" in _refused(text[:at] + text[at + 1 :])
    changed = text[:at] + letter + text[at + 1 :]
    if base64.b32decode(_padded(changed)) != base64.b32decode(_padded(text)):
        assert "is not whole" in _refused(changed)


def _padded(text: str) -> str:
    encoded = text.removeprefix(MARK).upper()
    return encoded + "=" * (-len(encoded) % 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "this is no invitation: it begins with shoal1:"),
        ("/ip4/203.0.113.7/tcp/50000", "this is no invitation"),
        ("shoal2:abcdefgh", "another version of shoal"),
        (MARK, "is not whole"),
        (MARK + "1!", "is not whole"),
        (MARK + "a" * 2000, "too long"),
        (MARK + base64.b32encode(b"\x94\x00" * 20).decode().rstrip("="), "is not whole"),
    ],
)
def test_what_is_no_invitation_is_refused(text: str, message: str) -> None:
    assert message in _refused(text)


def test_one_that_is_nested_too_deeply_is_refused() -> None:
    body = b"\x91" * 1100 + b"\x00"
    assert "is not whole" in _refused(MARK + base64.b32encode(body + hashlib.sha256(body).digest()[:5]).decode())


@pytest.mark.parametrize(
    ("prefix", "where", "peer"),
    [
        ("sandbox", "@/dev/zero,/ip4/1.2.3.4/tcp/1", PEER),
        ("sandbox", "/ip4/1.2.3.4/tcp/1,@/etc/passwd", PEER),
        ("sandbox", "/ip4/1.2.3.4/tcp/1", "x,@/etc/passwd"),
        ("../../up", "/ip4/1.2.3.4/tcp/1", PEER),
        ("sandbox\n", "/ip4/1.2.3.4/tcp/1", PEER),
        ("sandbox", "/ip4/1.2.3.4/tcp/1\n", PEER),
        ("sandbox", "/ip4/1.2.3.4/tcp/1", f"{PEER}\n"),
    ],
)
def test_one_that_would_mean_more_than_it_says_is_refused(prefix: str, where: str, peer: str) -> None:
    text = written(Invitation(prefix, bytes(32), (f"{where}/p2p/{peer}",), NOW_S + 3600))
    assert "not whole" in _refused(text)


def test_one_that_has_expired_is_refused() -> None:
    text = written(INVITATION)
    assert read(text, NOW_S + 3600) == INVITATION
    with pytest.raises(ConfigError, match="has expired at 2027-01-15 09:00 UTC"):
        read(text, NOW_S + 3601)
