"""Who may look at a dashboard: only a browser that was given a token once, and only under a name of this host.

    printed URL, with a token --once--> cookie, HttpOnly and SameSite=Strict --> page, files, events

Whoever reaches a loopback port may be any user of the host, or a page of the web in the user's own browser. So nothing
is answered without the cookie, and nothing at all under a name that is not loopback's, or to a page of another origin.

The page of a run only shows. That of an operator (`hosts`) takes orders as well: each with the cookie, from a page that
says that it is of this origin, and with a token that only such a page can have read.

In the run's folder, for its owner alone: `dashboard.key`, of which cookies are made, `dashboard.url`, the address with
the token that is next to be used, and `metrics.token`, which Prometheus sends each time. A monitor that is started
again goes on with all three, so that pages stay open.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, urlsplit

from shoal.file_thread import FileThread
from shoal.runtime.durable_files import put_whole

KEY_FILE, URL_FILE, TOKEN_FILE = "dashboard.key", "dashboard.url", "metrics.token"
_KEY_BYTES = 32
_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})

HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Connection": "close",
}
"""What every answer says."""


def problem_of(method: str, headers: Mapping[str, str], *, takes_orders: bool = False) -> tuple[int, str] | None:
    """Return the status and the reason for which a request is refused whoever sends it, or None.

    Args:
        headers: by their names in small letters.
        takes_orders: whether something can be done here, by POST.
    """
    is_order = takes_orders and method == "POST"
    if method != "GET" and not is_order:
        return 405, "this page only shows: GET"
    host = headers.get("host", "")
    if _hostname(host) not in _LOOPBACK:
        return 421, "this page is at 127.0.0.1, localhost or [::1]; from elsewhere: ssh -L 8787:127.0.0.1:8787 HOST"
    # An address of another scheme, port or name is another origin, and so is `null`.
    if headers.get("origin", "" if is_order else f"http://{host}") != f"http://{host}":
        return 403, "pages of another origin are told nothing"
    return None


def _hostname(host: str) -> str:
    """Return the name in `name:port`, "" if it is none. Any port: a tunnel has its own at its other end."""
    name, colon, port = host.rpartition(":") if not host.endswith("]") else (host, "", "")
    if not colon:
        return host.lower()
    return name.lower() if port.isascii() and port.isdigit() else ""


class Access:
    """The token and the cookie of one run."""

    def __init__(self, log_dir: Path, run_id: str, told_in: str = "the run's folder") -> None:
        """Take over what an earlier start of the monitor has left in the run's folder, or begin.

        Args:
            told_in: how the folder is called to who has no token.

        Raises:
            OSError: the folder cannot be read or written.
        """
        self.told_in = told_in
        self._url_path, self._token_path = log_dir / URL_FILE, log_dir / TOKEN_FILE
        self._disk = FileThread("access", path=self._url_path)
        self._key = _key(log_dir / KEY_FILE)
        # A cookie is sent to all ports of a host: two runs must not take each other's.
        self.cookie_name = f"shoal-{hashlib.sha256(run_id.encode()).hexdigest()[:12]}"
        self._token, self.earlier_port = self._left()
        self._port = 0

    @property
    def cookie(self) -> str:
        """What a browser that may look sends, under `cookie_name`."""
        return hmac.digest(self._key, b"cookie", "sha256").hex()

    @property
    def url(self) -> str:
        """The address at which the next browser is let in."""
        return f"http://127.0.0.1:{self._port}/?token={self._token}"

    @property
    def reader_token(self) -> str:
        """What a program that reads numbers sends, as `Authorization: Bearer ...`."""
        return hmac.digest(self._key, b"metrics", "sha256").hex()

    @property
    def order_token(self) -> str:
        """What an order has to bring along, beside the cookie: no page but ours can have read it."""
        return hmac.digest(self._key, b"orders", "sha256").hex()

    def lets_order(self, token: str) -> bool:
        """Whether an order that brings this comes from a page of ours."""
        return hmac.compare_digest(token.encode(), self.order_token.encode())

    def lets_read(self, authorization: str) -> bool:
        """Whether this header is of a program that may read numbers."""
        return hmac.compare_digest(authorization.encode(), f"Bearer {self.reader_token}".encode())

    def serves(self, port: int) -> None:
        """The page is at this port; raises OSError if that cannot be written down, or not now."""
        self._port = port
        written = self._disk.do(self._write_down)
        if not written.done():
            raise OSError(errno.ETIMEDOUT, "the disk does not answer", str(self._url_path))
        written.result()

    def admits(self, cookies: Mapping[str, str]) -> bool:
        """Whether these cookies are of a browser that was let in."""
        return hmac.compare_digest(cookies.get(self.cookie_name, "").encode(), self.cookie.encode())

    def redeem(self, token: str) -> bool:
        """Whether this is the token, which is then used up; raises OSError if the next one cannot be written down."""
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            return False
        self._token = secrets.token_urlsafe(_KEY_BYTES)
        try:
            self.serves(self._port)
        except OSError:
            self._token = token  # nobody was let in, and the next one is written nowhere
            raise
        return True

    def _write_down(self) -> None:
        put_whole(self._token_path, self.reader_token.encode(), lasting=False, private=True)
        put_whole(self._url_path, f"{self.url}\n".encode(), lasting=False, private=True)

    def _left(self) -> tuple[str, int]:
        """Return the token that is not used yet, and the port of an earlier start; a new one and 0 at the first."""
        try:
            url = urlsplit(self._url_path.read_text().strip())
            token, port = parse_qs(url.query)["token"][0], url.port or 0
        except (FileNotFoundError, ValueError, KeyError):
            return secrets.token_urlsafe(_KEY_BYTES), 0
        return token, port


def _key(path: Path) -> bytes:
    try:
        key = bytes.fromhex(path.read_text())
    except (FileNotFoundError, ValueError):
        key = b""
    if len(key) != _KEY_BYTES:
        key = secrets.token_bytes(_KEY_BYTES)
        put_whole(path, key.hex().encode(), lasting=False, private=True)
    return key
