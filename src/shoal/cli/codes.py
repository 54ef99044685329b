"""`shoal invite --code` and `shoal join --code`: an invitation for who says a short code, nearby or at an address."""

from __future__ import annotations

import sys
from typing import Final

import anyio
from anyio.abc import SocketAttribute
from zeroconf.asyncio import AsyncServiceInfo

from shoal.cli.exits import DONE, FAILED
from shoal.control.lan import service_announced, services
from shoal.control.pairing import MAX_WRONG, VALID_S, Code, CodeOffer, take
from shoal.errors import ConfigError, ConnectionLost
from shoal.transport.tcp import own_hosts

SERVICE: Final = "_shoal-code._tcp.local."
_LOOK_S: Final = 10.0


async def offer(text: str, *, on_lan: bool) -> int:
    """Wait for somebody who says the code, and give the invitation; return the exit code.

    Args:
        on_lan: whether it is announced on the local network.
    """
    wrong: list[str] = []
    code = Code.new()
    given = CodeOffer(code, text, wrong.append)
    async with await anyio.create_tcp_listener() as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, given.answer)
        port: int = listener.extra(SocketAttribute.local_port)
        if on_lan:
            tasks.start_soon(_announce, code, port)
        hosts = "` or `--at ".join(f"{host}:{port}" for host in own_hosts())
        nearby = "on another host of this network, `shoal join --code` asks for it\n" if on_lan else ""
        print(
            f"the code is  {code}\n{nearby}"
            f"from elsewhere, `shoal join --code --at {hosts}`\n"
            f"waiting for {VALID_S / 60:.0f} minutes; who says it gets the swarm's key",
            flush=True,
        )
        with anyio.move_on_after(VALID_S):
            await given.wait()
        tasks.cancel_scope.cancel()
    if given.taken_by:
        print(f"{given.taken_by} has the invitation; the code is used up", flush=True)
        return DONE
    if given.is_over:
        tried = ", ".join(dict.fromkeys(wrong))
        print(f"{MAX_WRONG} wrong codes were tried, from {tried}: nobody gets the invitation", file=sys.stderr)
    else:
        print("nobody has said the code; it is not valid any more", file=sys.stderr)
    return FAILED


async def _announce(code: Code, port: int) -> None:
    try:
        async with service_announced(SERVICE, _mark(code), port, {}):
            await anyio.Event().wait()
    except OSError as error:
        print(f"it cannot be announced on the local network ({error}): give the address with --at", flush=True)


async def invitation_for(typed: str, at: str | None, *, on_lan: bool) -> str:
    """Return the text of the invitation that this code stands for.

    Args:
        at: HOST:PORT; None: wherever on the local network it is offered.
        on_lan: whether it may be looked for there.

    Raises:
        ConfigError: it is no code, or not one that is taken there.
        ConnectionLost: nobody offers it, or cannot be reached.
    """
    code = Code.parsed(typed)
    if code is None:
        raise ConfigError(
            "a code looks like 7-482-913: type it as `shoal invite --code` has printed it on a host of the swarm"
        )
    if at is None and not on_lan:
        raise ConfigError("network.lan is false, so nothing is looked for on this network: give the address with --at")
    places = [_split(at)] if at is not None else await _offered(code)
    for host, port in places[:-1]:
        try:
            return await take(host, port, code)
        except (ConnectionLost, ConfigError):
            continue  # an interface that is not of this network, or another code with the same first number
    return await take(*places[-1], code)


async def _offered(code: Code) -> list[tuple[str, int]]:
    print("looking for who has made the code on this network", flush=True)

    def read(service: AsyncServiceInfo) -> list[tuple[str, int]] | None:
        return [(host, service.port or 0) for host in service.parsed_addresses()] or None

    try:
        found = await services(SERVICE, _mark(code), read, _LOOK_S)
    except OSError as error:
        raise ConnectionLost(f"the local network cannot be searched ({error}): give the address with --at") from error
    if not found:
        raise ConnectionLost(
            "nobody on this network has made that code, or it is not valid any more: from another network give the "
            "address that `shoal invite --code` prints, with --at"
        )
    return [place for places in found for place in places]


def _mark(code: Code) -> str:
    return f"code{code.place}"


def _split(at: str) -> tuple[str, int]:
    host, _, port = at.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"--at {at}: give an address and a port, as 192.0.2.7:40123")
    return host.strip("[]"), int(port)
