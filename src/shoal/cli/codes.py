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
from shoal.transport.tcp import join_host_port, own_hosts

SERVICE: Final = "_shoal-code._tcp.local."
_LOOK_S: Final = 10.0
_MAX_SERVICES: Final = 8
_MAX_ADDRESSES: Final = 32
"""Services that are asked, and addresses of each; strangers may announce any number."""
_MAX_GUESSES: Final = 3
"""Services that do not take the code: each of them may be somebody who guesses it, and has had one guess."""


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
        hosts = "` or `--at ".join(join_host_port(host, port) for host in own_hosts())
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
        ConfigError: it is no code, or not one that is taken there, or `_MAX_GUESSES` of them do not take it.
        ConnectionLost: nobody offers it, or cannot be reached.
    """
    code = Code.parsed(typed)
    if code is None:
        raise ConfigError(
            "a code looks like 7-482-913: type it as `shoal invite --code` has printed it on a host of the swarm"
        )
    if at is None and not on_lan:
        raise ConfigError("network.lan is false, so nothing is looked for on this network: give the address with --at")
    if at is not None:
        return await take(*_split(at), code)
    return await _first_taken(code, await _offered(code))


async def _first_taken(code: Code, services: list[list[tuple[str, int]]]) -> str:
    """Return what the first of these services gives for the code; raises as `invitation_for` does."""
    refused: list[ConfigError] = []
    lost: list[ConnectionLost] = []
    for places in services:
        for host, port in places:
            try:
                return await take(host, port, code)
            except ConnectionLost as error:
                lost.append(error)  # an interface that is not of this network, or nobody who asks for a code
            except ConfigError as error:
                refused.append(error)  # another code with the same first number, a slip, or somebody who guesses
                break
        if len(refused) == _MAX_GUESSES:
            raise ConfigError(
                f"{_MAX_GUESSES} hosts of this network say that they have made a code {code.place}-..., and none takes "
                f"this one: {'; '.join(map(str, refused))}. If it was typed as printed, somebody here passes for the "
                "host that has made it, and guesses: make a new code with `shoal invite --code`, and give the address "
                "that it prints with --at"
            )
    raise (refused or lost)[-1]


async def _offered(code: Code) -> list[list[tuple[str, int]]]:
    """Return the addresses of each service that may have made the code; raises ConnectionLost where there is none."""
    print("looking for who has made the code on this network", flush=True)

    def read(service: AsyncServiceInfo) -> list[tuple[str, int]] | None:
        return [(host, service.port or 0) for host in service.parsed_addresses()[:_MAX_ADDRESSES]] or None

    try:
        found = await services(SERVICE, _mark(code), read, _LOOK_S)
    except OSError as error:
        raise ConnectionLost(f"the local network cannot be searched ({error}): give the address with --at") from error
    if not found:
        raise ConnectionLost(
            "nobody on this network has made that code, or it is not valid any more: from another network give the "
            "address that `shoal invite --code` prints, with --at"
        )
    return found[:_MAX_SERVICES]


def _mark(code: Code) -> str:
    return f"code{code.place}"


def _split(at: str) -> tuple[str, int]:
    host, _, port = at.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"--at {at}: give an address and a port, as 192.0.2.7:40123")
    return host.strip("[]"), int(port)
