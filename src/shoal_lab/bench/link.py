"""Puts a port of this host behind an emulated link, for benchmarks with `--link`."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from anyio.from_thread import start_blocking_portal

from shoal_lab.faults.link_grammar import parse_link
from shoal_lab.faults.link_proxy import LinkProxy


@contextmanager
def linked_port(link: str | None, port: int) -> Generator[int, None, None]:
    """Give the port to dial instead of `port` while this context lasts: over the link, or the same without one.

    The proxy runs in a thread of this process, which is fast enough for links that are worth emulating.
    """
    if link is None:
        yield port
        return
    with start_blocking_portal(backend_options={"use_uvloop": True}) as portal:
        proxy = portal.call(LinkProxy, ("127.0.0.1", port), parse_link(link))
        with portal.wrap_async_context_manager(proxy):
            yield proxy.port
