"""Finds a swarm on the local network by mDNS (RFC 6762, 6763), so that nobody has to say where it is.

client's host --announced: `_shoal._tcp.local.`, prefix and addresses sealed with the swarm's key-->
                                   <--browses, whoever has the key and knows no peer-- `find_on_lan`

Neither its name nor its text tells who lacks the key anything but that it is this swarm again. What is found is a hint,
and TLS decides: a text that somebody has recorded and repeats, where the swarm itself is not heard, costs a dial.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Annotated, Any, Final, TypeVar, cast

import anyio
import msgspec
from zeroconf import Error as ZeroconfError
from zeroconf import IPVersion, NonUniqueNameException, ServiceInfo, ServiceStateChange
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from shoal.errors import MALFORMED
from shoal.identity import derived_key, open_content, seal_content
from shoal.ids import PREFIX_PATTERN
from shoal.transport.tcp import own_hosts

SERVICE: Final = "_shoal._tcp.local."
MAX_PEERS: Final = 6
_TTL_S: Final = 60
_RESOLVE_MS: Final = 2000
_LABEL: Final = b"shoal lan 1"
_CHUNK_BYTES: Final = 200
_MAX_CHUNKS: Final = 8
_MAX_NAMES: Final = 64
_MAX_NAMES_IN_ALL: Final = 512
"""Services that are looked at, of those heard at once and in one search; strangers may announce any number."""
_MAX_TRIES: Final = 3
_MORE_S: Final = 0.5

_Read = TypeVar("_Read")


class FoundSwarm(msgspec.Struct, frozen=True, array_like=True):
    """A swarm of which this host has the key.

    Attributes:
        experiment_prefix: the user's name of the experiment.
        unix_s: when that was written, by the clock of who announces it.
    """

    experiment_prefix: Annotated[str, msgspec.Meta(pattern=PREFIX_PATTERN)]
    initial_peers: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=256)], ...], msgspec.Meta(min_length=1, max_length=MAX_PEERS)
    ]
    unix_s: Annotated[float, msgspec.Meta(ge=0, le=1e11)]


def mark_of(swarm_key: bytes) -> str:
    """Return how the names of a swarm's services begin; it cannot be guessed without the key."""
    return derived_key(swarm_key, b"shoal lan name 1")[:8].hex()


def sealed(swarm_key: bytes, swarm: FoundSwarm) -> dict[str, bytes]:
    """Return the text of a service."""
    content = seal_content(swarm_key, _LABEL, msgspec.msgpack.encode(swarm))
    return {str(at // _CHUNK_BYTES): content[at : at + _CHUNK_BYTES] for at in range(0, len(content), _CHUNK_BYTES)}


def opened(swarm_key: bytes, text: Mapping[bytes, bytes | None]) -> FoundSwarm | None:
    """Return what the text of a service says; None if nobody with this key has written it."""
    content = b"".join(text.get(str(number).encode()) or b"" for number in range(_MAX_CHUNKS))
    plain = open_content(swarm_key, _LABEL, content)
    try:
        return None if plain is None else msgspec.msgpack.decode(plain, type=FoundSwarm)
    except MALFORMED:
        return None


@asynccontextmanager
async def announced(swarm_key: bytes, swarm: FoundSwarm) -> AsyncGenerator[None]:
    """Announce a swarm on all networks of this host while the context is open.

    Raises:
        OSError: there is no network on which that is possible.
    """
    port = _port_of(swarm.initial_peers)
    async with service_announced(SERVICE, mark_of(swarm_key), port, sealed(swarm_key, swarm)):
        yield


async def find_on_lan(swarm_key: bytes, experiment_prefix: str | None, within_s: float) -> FoundSwarm | None:
    """Return the swarm of this key that a local network knows, of several the newest; None: none answers in time.

    Args:
        experiment_prefix: that it has to have; None: any.

    Raises:
        OSError: there is no network on which it could be looked for.
    """

    def read(service: AsyncServiceInfo) -> FoundSwarm | None:
        swarm = opened(swarm_key, service.properties)
        return swarm if swarm is not None and experiment_prefix in (None, swarm.experiment_prefix) else None

    # What somebody has recorded, and repeats, is older.
    found = await services(SERVICE, mark_of(swarm_key), read, within_s)
    return max(found, key=lambda swarm: swarm.unix_s, default=None)


async def hears_itself(within_s: float) -> bool:
    """Return whether an announcement of this host comes back to it, as one of another host of the network would come;
    raises as `find_on_lan`."""
    mark = os.urandom(8).hex()
    async with service_announced(SERVICE, mark, 0, {}):
        return bool(await services(SERVICE, mark, lambda service: service.name, within_s))


@asynccontextmanager
async def service_announced(kind: str, mark: str, port: int, text: Mapping[str, bytes]) -> AsyncGenerator[None]:
    """Announce a service of this host whose name begins with a mark; raises as `announced` does."""
    with _told_as_os_errors():
        own = _opened()
    try:
        with _told_as_os_errors():
            await _register(own, kind, mark, port, text)
        yield
    finally:
        # Says goodbye, so that nobody dials who is gone; where that does not work, it is forgotten after a while.
        with anyio.CancelScope(shield=True), suppress(OSError), _told_as_os_errors():
            await own.async_unregister_all_services()
            await own.async_close()


def _opened() -> AsyncZeroconf:
    """Take part in mDNS: by IPv6 where this host has nothing else."""
    return AsyncZeroconf(ip_version=IPVersion.V6Only if ":" in own_hosts()[0] else None)


async def _register(own: AsyncZeroconf, kind: str, mark: str, port: int, text: Mapping[str, bytes]) -> None:
    for tries_left in reversed(range(_MAX_TRIES)):
        name = f"{mark}-{os.urandom(4).hex()}"
        info = ServiceInfo(
            kind,
            f"{name}.{kind}",
            port=port,
            properties=dict(text),
            server=f"{name}.local.",
            parsed_addresses=list(own_hosts()),
            host_ttl=_TTL_S,
            other_ttl=_TTL_S,
        )
        try:
            await cast(Any, own).async_register_service(info)
        except NonUniqueNameException:
            # Of eight random digits: somebody claims whatever is asked for.
            if not tries_left:
                raise
        else:
            return


async def services(
    kind: str, mark: str, read: Callable[[AsyncServiceInfo], _Read | None], within_s: float
) -> list[_Read]:
    """Return what is read of the services with such a name: of those that answer within `_MORE_S` after the first one
    of which something can be; raises as `find_on_lan`."""
    names, asked = anyio.create_memory_object_stream[str](_MAX_NAMES)
    found: list[_Read] = []

    def changed(name: str, state_change: ServiceStateChange, **_: Any) -> None:
        is_one = name.startswith(f"{mark}-") and name.endswith(f".{kind}")
        if state_change is not ServiceStateChange.Removed and is_one:
            # Of a flood, by somebody who has seen the mark, the first ones are looked at.
            with suppress(anyio.WouldBlock):
                names.send_nowait(name)

    async def resolve(name: str) -> None:
        try:
            info = AsyncServiceInfo(kind, name)
            is_resolved = await info.async_request(own.zeroconf, _RESOLVE_MS)
        except ZeroconfError:
            return  # a name that is none
        if is_resolved and (said := read(info)) is not None:
            found.append(said)
            timer.deadline = min(timer.deadline, anyio.current_time() + _MORE_S)

    with _told_as_os_errors():
        own = _opened()
        browser = AsyncServiceBrowser(own.zeroconf, kind, handlers=[changed])
    try:
        with anyio.move_on_after(within_s) as timer:
            async with anyio.create_task_group() as tasks:
                for _ in range(_MAX_NAMES_IN_ALL):
                    tasks.start_soon(resolve, await asked.receive())
        return found
    finally:
        with anyio.CancelScope(shield=True), suppress(OSError), _told_as_os_errors():
            await browser.async_cancel()
            await own.async_close()
        names.close()
        asked.close()


@contextmanager
def _told_as_os_errors() -> Generator[None]:
    """Strangers can make zeroconf raise errors of its own, and so can a host without interfaces: like any other of a
    network."""
    try:
        yield
    except (ZeroconfError, RuntimeError) as error:
        raise OSError(f"{type(error).__name__} {error}".strip()) from error


def _port_of(maddrs: Sequence[str]) -> int:
    """Return a port for mDNS's own record; here nobody reads it."""
    parts = (maddr.split("/") for maddr in maddrs)
    return next((int(each[4]) for each in parts if len(each) > 4 and each[3] == "tcp"), 0)
