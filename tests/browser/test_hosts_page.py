"""The page of an operator in a real browser: hosts beside the run, and orders by mouse and keyboard."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.browser.browsers import PHONE, SCREEN, TABS, browser, opened, violations, why_impossible
from tests.browser.made_runs import MadeRun, going_on
from tests.integration.test_operator_page import Page, served
from tests.stand_in_hosts import PREFIX, StandInHosts

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(why_impossible() is not None, reason=why_impossible() or ""),
]


@asynccontextmanager
async def _shown(folder: Path) -> AsyncGenerator[tuple[Page, MadeRun, str]]:
    """A page of two hosts with a run; gives also the address that lets a browser in."""
    hosts = StandInHosts(folder)
    async with served(hosts) as page, going_on(hosts.client_logs() / "made-run", 60, 8) as run:
        yield page, run, await page.next_address()


async def test_hosts_stand_beside_the_run_and_orders_are_given_by_keyboard_alone(tmp_path: Path) -> None:
    async with _shown(tmp_path) as (page, run, address), browser() as found:
        seen = await opened(found, address, viewport=SCREEN)
        await seen.says(".tiles", f"{run.row_step:,}")
        for tab in TABS:
            await seen.show(tab)
        await seen.show("hosts")
        box = seen.page.locator(".machines > li").filter(has_text="ssh box")
        await box.locator("text=does not run").wait_for()
        # Whose client invites it.
        await page.order("desk", "up")
        await page.until(lambda hosts: not hosts["desk"]["busy"])
        await box.get_by_role("button", name="up box").press("Enter")
        await box.locator(".units").filter(has_text=f"{PREFIX}-servers runs since").wait_for()
        await seen.says(".course", f"box: {PREFIX}-servers started")
        await page.until(lambda hosts: not hosts["box"]["busy"])
        await box.get_by_role("button", name="logs box").press("Enter")
        await seen.says("pre", "server 0 serves stage 0")

        # What takes something away is asked for; who thinks again has done nothing.
        await box.locator("text=runs").first.wait_for()
        await box.get_by_role("button", name="down box").press("Enter")
        await box.locator("text=Its servers leave the run.").wait_for()
        assert await seen.page.evaluate("document.activeElement.textContent") == "no"
        for key in ("Enter", "Escape"):
            await seen.page.keyboard.press(key)
            assert await seen.page.evaluate("document.activeElement.textContent") == "down"
            await seen.page.keyboard.press("Enter")
        await seen.page.keyboard.press("Shift+Tab")
        assert await seen.page.evaluate("document.activeElement.textContent") == "yes, down box"
        await seen.page.keyboard.press("Enter")
        await seen.says(".course", f"box: {PREFIX}-servers has ended")
        await box.locator("text=does not run").wait_for()
        lines = await seen.page.locator(".course li").all_inner_texts()
        assert sum(line.endswith("shoal hosts down box") for line in lines) == 1
        assert seen.complaints == []
        assert seen.hosts == {"127.0.0.1"}
        assert "token" not in seen.page.url


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_screen_readers_find_nothing_amiss_and_a_phone_shows_all_of_it(tmp_path: Path, scheme: str) -> None:
    async with _shown(tmp_path) as (page, _, address), browser() as found:
        await page.order("desk", "up")
        await page.until(lambda hosts: any(unit["isRunning"] for unit in hosts["desk"]["units"]))
        seen = await opened(found, address, color_scheme=scheme, viewport=PHONE)
        await seen.show("hosts")
        await seen.says(".machines", f"{PREFIX}-client runs since")
        box = seen.page.locator(".machines > li").filter(has_text="ssh box")
        await box.get_by_role("button", name="logs box").click()
        await box.get_by_role("button", name="restart box").click()
        await box.locator("text=join it again").wait_for()
        assert await violations(seen) == []
        assert await seen.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        assert await seen.page.locator("main img, main b").count() == 0
        assert seen.complaints == []


async def test_an_order_that_is_not_taken_is_answered_where_it_was_given(tmp_path: Path) -> None:
    hosts = StandInHosts(tmp_path)
    hosts.write(box="servers: 0")
    hosts.leaves("box")
    async with served(hosts) as page, browser() as found:
        seen = await opened(found, await page.next_address(), viewport=SCREEN)
        await seen.show("hosts")
        box = seen.page.locator(".machines > li").filter(has_text="ssh box")
        await box.locator("text=nothing listens there").wait_for()
        # As if another page had been first, and this one did not know it yet.
        await seen.page.route("**/hosts/box/up", lambda route: route.fulfill(status=409, body="box: `up` is under way"))
        await box.get_by_role("button", name="up box").press("Enter")
        await box.get_by_role("alert").filter(has_text="box: `up` is under way").wait_for()
        assert await box.locator("text=nothing listens there").count() == 1, "and the host is as it was"
        (tmp_path / "box.away").unlink()
        await box.locator("text=reached; the file has nothing run there").wait_for()


async def test_the_page_goes_on_with_the_run_that_follows(tmp_path: Path) -> None:
    hosts = StandInHosts(tmp_path)
    async with served(hosts) as page, browser() as found:
        seen = await opened(found, await page.next_address())
        for name, ticks in (("first", 60), ("next", 20)):
            async with going_on(hosts.client_logs() / name, ticks, 4) as run:
                await seen.says(".tiles", f"{run.row_step:,}")
                await seen.says("#link", "live")
            await seen.says("#link", "the run has ended")


async def test_a_page_whose_process_has_ended_says_so(tmp_path: Path) -> None:
    async with browser() as found:
        async with _shown(tmp_path) as (_, _, address):
            seen = await opened(found, address)
            await seen.show("hosts")
            await seen.says(".machines", "ssh box")
        await seen.says("#hosts", "does `shoal up --ui` still run?")
