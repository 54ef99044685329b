"""The documents in a browser, from a disk: they are found by a word, and ask nobody."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.browser.browsers import browser, opened, why_impossible
from tests.built_site import build_site

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_impossible() is not None, reason=why_impossible() or ""),
]


async def test_a_page_from_a_disk_is_found_by_a_word_and_asks_nobody(tmp_path: Path) -> None:
    site = build_site(tmp_path)
    async with browser() as found:
        seen = await opened(found, (site / "start" / "one_machine.html").as_uri())
        await seen.page.keyboard.press("/")
        await seen.page.keyboard.type("invitation")
        await seen.page.locator("a").filter(has_text="By hand, without an invitation").first.click()
        await seen.page.wait_for_url("**/three_machines.html*")
        errors = [said for said in seen.complaints if not said.startswith("info")]
        assert (errors, seen.hosts) == ([], {""})
