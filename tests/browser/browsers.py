"""Chromium without a screen, as tests use it."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_AXE = Path(__file__).parent / "axe" / "axe.min.js"
_VIOLATIONS = """async () => (await axe.run()).violations.map(
  (each) => `${each.id}: ${each.nodes.map((node) => node.html + " " + node.failureSummary).slice(0, 3).join(" | ")}`
)"""
CHROMIUM = Path("/usr/bin/chromium")
TABS = ("now", "learning", "traffic", "rounds", "incidents", "peer")
PHONE, SCREEN = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


def why_impossible() -> str | None:
    """Return why there is no browser here, or None."""
    if importlib.util.find_spec("playwright") is None:
        return "the package playwright is not installed"
    return None if CHROMIUM.exists() else f"Debian's package chromium is not installed: no {CHROMIUM}"


@dataclass
class Seen:
    """A page, what it has complained of, and whom it has asked."""

    page: Any
    complaints: list[str] = field(default_factory=list[str])
    hosts: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.hosts.add(urlsplit(request.url).hostname or ""))

    async def show(self, tab: str) -> None:
        """Choose a part of the page."""
        await self.page.click(f"nav a[href='#{tab}']")
        await self.page.wait_for_selector(f"#{tab}:not([hidden])")

    async def says(self, selector: str, text: str) -> None:
        """Wait until a part of the page has this text."""
        await self.page.locator(selector).filter(has_text=text).first.wait_for()


async def violations(seen: Seen) -> list[str]:
    """Return what axe finds amiss in what is shown."""
    await seen.page.evaluate(_AXE.read_text())
    return await seen.page.evaluate(_VIOLATIONS)


@asynccontextmanager
async def browser() -> AsyncGenerator[Any]:
    """A browser."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        found = await playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        try:
            yield found
        finally:
            await found.close()


async def opened(found: Any, url: str, **options: Any) -> Seen:
    """Open an address in a context of its own, which knows nothing of others."""
    context = await found.new_context(**options)
    context.set_default_timeout(120_000)
    seen = Seen(await context.new_page())
    await seen.page.goto(url)
    return seen
