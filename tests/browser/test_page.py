"""The page in a real browser: live, after the monitor's death, as a report; for phones, keyboards, screen readers."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from tests.browser.browsers import PHONE, SCREEN, TABS, Seen, browser, opened, violations, why_impossible
from tests.browser.made_runs import CONFIG, MARKUP, RUN_ID, MadeRun, event, going_on, make_run, serving

from shoal.clock import SystemClock
from shoal.monitor.page.curve import Curve
from shoal.report.page import write_page

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(why_impossible() is not None, reason=why_impossible() or ""),
]

TICKS, PEERS = 300, 24
STARTED = "2026-11-30 00:53:20 UTC"


async def _text(seen: Seen, tab: str) -> str:
    await seen.show(tab)
    return await seen.page.inner_text(f"#{tab}")


async def test_a_run_is_seen_live_without_a_complaint_and_without_a_word_to_anybody_else(tmp_path: Path) -> None:
    async with going_on(tmp_path, TICKS, PEERS) as run, browser() as found:
        seen = await opened(found, run.url)
        await seen.says(".tiles", f"{run.row_step:,}")
        for tab in TABS:
            await seen.show(tab)
        await seen.show("now")
        for _ in range(3):
            run.step()
        await seen.says(".tiles", f"{run.row_step:,}")
        # Of 40 rounds of 59 s, 35 are to come, and one of them goes on.
        assert re.search(r"^began .* UTC, \d+ min ago; about 3[34] min left$", await seen.page.inner_text(".when"))
        # Behind the last round one begins that nobody trains.
        more = {"steps": 60, "pipelines": 4, "trainers": 4, "replicas": 16}
        run.happens(event("round.begun", SystemClock().unix_s(), round=CONFIG.diloco.outer_steps + 1, **more))
        lost = event("server.lost", SystemClock().unix_s(), "WARNING", says="server 3@box0 (stage 3) is gone")
        run.happens(lost)
        await seen.says(".latest", "server 3@box0 (stage 3) is gone")
        await seen.says(".latest .do", "Nothing, if it comes back: its launcher starts a process again that has ended.")
        rounds = await _text(seen, "rounds")
        assert "\n5\t" in rounds
        assert "\n41\t" not in rounds
        assert seen.complaints == []
        assert seen.hosts == {"127.0.0.1"}
        assert "token" not in seen.page.url


async def test_what_a_peer_calls_itself_is_text_everywhere(tmp_path: Path) -> None:
    async with going_on(tmp_path, TICKS, PEERS) as run, browser() as found:
        seen = await opened(found, run.url)
        await seen.says(".cards", MARKUP)
        for tab in TABS:
            await seen.show(tab)
            assert await seen.page.locator("main img, main b").count() == 0
        await seen.show("now")
        await seen.page.click(f".cards a:text-is('{MARKUP}')")
        await seen.says("#peer table", "step.committed")
        for number in (STARTED, "2.5 s"):
            await seen.says("#peer table", number)
        assert await seen.page.input_value("#choose-peer") == MARKUP
        assert seen.complaints == []


async def test_after_the_monitor_s_death_an_open_page_goes_on_by_itself_and_lacks_nothing(tmp_path: Path) -> None:
    async with browser() as found:
        async with going_on(tmp_path, TICKS, PEERS) as run:
            seen = await opened(found, run.url)
            await seen.says(".tiles", f"{run.row_step:,}")
            # As a death: the page is told nothing.
            run.dashboard._shown[1].end = lambda: None  # pyright: ignore[reportOptionalSubscript, reportAttributeAccessIssue]
        await seen.says("#link", "again")
        meanwhile = event("server.lost", SystemClock().unix_s(), "WARNING", says="what happened meanwhile")
        with (tmp_path / "events.jsonl").open("ab") as file:
            file.write(meanwhile + b"\n")
        async with serving(tmp_path, run.tick + 5, run.names) as again:
            await seen.says("#link", "live")
            await seen.says(".latest", "what happened meanwhile")
            await seen.says(".tiles", f"{again.row_step:,}")
            assert again.notices == []
            last = event("run.stopped", SystemClock().unix_s(), says="and what happened then")
            again.happens(last)
            await seen.says(".latest", "and what happened then")
            await anyio.to_thread.run_sync(again.dashboard.close, 1.0)
        await seen.says(".state", "the run has ended")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_screen_readers_find_nothing_amiss_and_contrast_is_enough(tmp_path: Path, scheme: str) -> None:
    async with going_on(tmp_path, TICKS, PEERS) as run, browser() as found:
        seen = await opened(found, run.url, color_scheme=scheme, viewport=SCREEN)
        await seen.says(".tiles", f"{run.row_step:,}")
        for tab in TABS:
            await seen.show(tab)
            assert await violations(seen) == [], tab


async def test_on_a_phone_nothing_is_wider_than_the_screen(tmp_path: Path) -> None:
    async with going_on(tmp_path, TICKS, PEERS) as run, browser() as found:
        seen = await opened(found, run.url, viewport=PHONE)
        await seen.says(".tiles", f"{run.row_step:,}")
        for tab in TABS:
            await seen.show(tab)
            assert await seen.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], tab


async def test_everything_is_reached_by_the_keyboard(tmp_path: Path) -> None:
    async with going_on(tmp_path, TICKS, PEERS) as run, browser() as found:
        seen = await opened(found, run.url)
        await seen.says(".tiles", f"{run.row_step:,}")
        await seen.page.keyboard.press("Tab")
        assert await _focused(seen) == "to the numbers"
        for _ in TABS:
            await seen.page.keyboard.press("Tab")
        assert await _focused(seen) == "Peers"
        await seen.page.keyboard.press("Shift+Tab")
        await seen.page.keyboard.press("Shift+Tab")
        await seen.page.keyboard.press("Shift+Tab")
        await seen.page.keyboard.press("Shift+Tab")
        await seen.page.keyboard.press("Enter")
        await seen.says("#learning figcaption", "Loss, nats per token")
        await seen.page.focus("#over-samples")
        await seen.page.keyboard.press("ArrowRight")
        assert await seen.page.is_checked("#over-time")


async def _focused(seen: Seen) -> str:
    return await seen.page.evaluate("document.activeElement.textContent.trim()")


async def test_a_report_opens_from_the_disk_and_shows_what_the_page_has_shown(tmp_path: Path) -> None:
    end_s = SystemClock().unix_s()
    await anyio.to_thread.run_sync(lambda: make_run(tmp_path, TICKS, PEERS, end_s=end_s))
    async with going_on(tmp_path, TICKS, PEERS) as run, browser() as found:
        seen = await opened(found, run.url)
        await seen.says(".tiles", f"{run.row_step:,}")
        run.step()
        await seen.says(".tiles", f"{run.row_step:,}")
        path = write_page(tmp_path, CONFIG, RUN_ID)
        assert path is not None
        report = await opened(found, path.as_uri(), color_scheme="dark")
        await report.says(".state", "the run has ended")
        assert re.search("^began .* UTC, last heard .* UTC$", await report.page.inner_text(".when"))
        for tab in ("learning", "rounds", "incidents"):
            assert await _text(report, tab) == await _text(seen, tab), tab
        assert await _tiles(report) == await _tiles(seen)
        assert report.complaints == []
        assert report.hosts <= {""}
        for tab in TABS:
            await report.show(tab)
            assert await violations(report) == [], tab


async def _tiles(seen: Seen) -> list[str]:
    await seen.show("now")
    found: Any = await seen.page.locator(".tiles dd:not(.age)").all_inner_texts()
    return found


_NOTES_ROWS = """() => {
  window.rows = [];
  window.noted = () => {};
  new PerformanceObserver((list) => {
    window.rows.push(...list.getEntries().map((each) => each.detail.made));
    window.noted();
  }).observe({ type: "measure" });
}"""
_IS_DRAWN_AGAIN = """() => new Promise((done) => {
  window.noted = done;
})"""


async def test_a_picture_says_of_which_row_it_is_and_one_that_only_makes_ages_grow_says_of_none(tmp_path: Path) -> None:
    async with going_on(tmp_path, TICKS, PEERS) as run, browser() as found:
        seen = await opened(found, run.url)
        await seen.says(".tiles", f"{run.row_step:,}")
        await seen.page.evaluate(_NOTES_ROWS)
        # The page is drawn once a second by itself, and when the server says that it is there.
        made = []
        for _ in range(2):
            made.append(run.step().time.timestamp())
            await seen.says(".tiles", f"{run.row_step:,}")
            await seen.page.evaluate(_IS_DRAWN_AGAIN)
        assert [each for each in await seen.page.evaluate("window.rows") if each is not None] == made


_GOES_ON = """async ([form, points]) => {
  const { Curve } = await import("/static/curve.js");
  const curve = new Curve(form, 2);
  for (const point of points) curve.add(point);
  return [curve.stride, curve.count, curve.buckets];
}"""


async def test_a_curve_goes_on_in_the_browser_as_it_would_at_the_server(tmp_path: Path) -> None:
    draw = random.Random(7)
    points = [(float(at), draw.random()) for at in range(1000)]
    async with going_on(tmp_path, TICKS, PEERS) as run, browser() as found:
        seen = await opened(found, run.url)
        for begun in (0, 5, 8, 37, 400):
            first, whole = Curve(8), Curve(8)
            for point in points[:begun]:
                first.add(point)
            for point in points:
                whole.add(point)
            form = whole.form()
            got = await seen.page.evaluate(_GOES_ON, [first.form(), points[begun:]])
            assert got == [form["stride"], form["count"], form["buckets"]]


async def test_a_browser_that_is_not_let_in_learns_nothing(tmp_path: Path) -> None:
    async with going_on(tmp_path, TICKS, PEERS) as run, browser() as found:
        url = run.url
        await opened(found, url)
        seen = await opened(found, url)
        text = await seen.page.inner_text("body")
        assert "dashboard.url" in text
        assert not await _is_let_in(seen, run)


async def _is_let_in(seen: Seen, run: MadeRun) -> bool:
    answer = await seen.page.goto(run.url.partition("?")[0] + "events")
    return answer.status == 200
