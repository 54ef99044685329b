"""The documents as a site: it builds without a warning, its generated pages are those of the code, and Start and Tasks
are easy to read."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from tests.built_site import build_site
from tools import pages, site, words

ROOT = Path(__file__).parents[2]
CONFIG = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
MOST_WORDS, MEAN_WORDS, CELL_WORDS, SCREEN_LINES = 30, 18, 25, 60


def _places(entries: list[Any]) -> Iterator[str]:
    """Yield the pages below these entries of the navigation."""
    for entry in entries:
        [value] = entry.values()
        if isinstance(value, str):
            yield value
        else:
            yield from _places(value)


def _section(title: str) -> list[str]:
    """The files of docs/ that a section of the navigation has."""
    [entries] = [entry[title] for entry in CONFIG["nav"] if title in entry]
    return [f"docs/{place}" for place in _places(entries) if (ROOT / "docs" / place).is_file()]


EASY = (*_section("Start"), *_section("Tasks"))


# ---- the whole site --------------------------------------------------------------------------------------------------


class _Page(HTMLParser):
    """What a page has of places to jump to, of links, and of what is loaded with it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.add(value or "")
            elif tag == "a" and name == "href":
                self.links.append(value or "")
            elif name == "src" or (tag == "link" and name == "href"):
                self.loaded.append(value or "")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as `make site` makes it."""
    return build_site(tmp_path_factory.mktemp("site"))


def test_every_page_is_in_the_navigation_once_and_has_a_title(tmp_path: Path) -> None:
    laid_out = [str(place) for place in site.lay_out(tmp_path / "docs")]
    assert sorted(_places(CONFIG["nav"])) == sorted(laid_out)
    for place in laid_out:
        assert (tmp_path / "docs" / place).read_text().startswith("# "), place


def test_links_lead_to_pages_and_headings_that_exist(built: Path) -> None:
    parsed = {path: _Page(path.read_text()) for path in built.rglob("*.html") if path.name != "404.html"}
    assert len(parsed) == len(list(_places(CONFIG["nav"])))
    for path, page in parsed.items():
        for link in page.links:
            target, _, part = link.partition("#")
            if "://" in target or link in ("", "#", ".", "./") or target.startswith("mailto:"):
                continue
            there = (path.parent / target).resolve() if target else path
            there = there / "index.html" if there.is_dir() else there
            assert there.is_file(), f"{path.name} links to {link}"
            assert not part or there not in parsed or part in parsed[there].ids, f"{path.name} links to {link}"


def test_pages_load_nothing_from_elsewhere_and_can_be_searched_from_a_disk(built: Path) -> None:
    for path in built.rglob("*.html"):
        assert [name for name in _Page(path.read_text()).loaded if "//" in name] == [], path.name
    assert (built / "search.js").is_file() or (built / "search.json").is_file()


def test_the_site_shows_the_files_of_an_example_whose_page_it_has(tmp_path: Path) -> None:
    site.lay_out(tmp_path / "docs")
    for source, names in site.SHOWN.items():
        page = (tmp_path / "docs" / site.PAGES[source]).read_text()
        for name in names:
            assert f"\n## {name}\n" in page
            assert (ROOT / source).with_name(name).read_text() in page


def test_a_link_to_a_file_without_a_page_becomes_text() -> None:
    text = "See [a](../configs/sandbox.yaml), [b](../SECURITY.md#promises), [c](x.md).\n```\n[d](../LICENSE)\n```\n"
    source, place = site.PurePosixPath("docs/y.md"), site.PurePosixPath("y.md")
    assert site.with_links(source, place, text) == (
        "See a, [b](project/security.md#promises), [c](x.md).\n```\n[d](../LICENSE)\n```\n"
    )


def test_a_page_that_explains_links_each_word_where_it_first_has_it() -> None:
    known = words.words_of(
        "| word | what it is |\n|---|---|\n| data server | has the data |\n| server | *has* a stage |\n"
    )
    assert list(known) == ["data server", "server"]
    text = "# A server\n`server` and [a server](x.md): Servers, one data\nserver, a server.\n```\nserver\n```\n"
    place = site.PurePosixPath("tasks/y.md")
    there = "../understand/words.md#word"
    assert words.with_words(place, text, known) == (
        f'# A server\n`server` and [a server](x.md): [Servers]({there}-server "has a stage"), '
        f'one [data\nserver]({there}-data-server "has the data"), a server.\n```\nserver\n```\n'
    )
    assert words.with_words(site.PurePosixPath("events.md"), text, known) == text


def test_start_explains_its_words_and_every_word_has_its_place(tmp_path: Path) -> None:
    site.lay_out(tmp_path / "docs")
    for place in ("start/one_machine.md", "start/three_machines.md", "tasks/servers.md"):
        assert "words.md#word-" in (tmp_path / "docs" / place).read_text(), place
    page = (tmp_path / "docs" / words.PLACE).read_text()
    known = words.words_of((ROOT / "docs" / words.PLACE).read_text())
    assert known.keys() >= {"swarm", "data server", "microbatch", "dht", "inner optimizer", "outer optimizer"}
    assert known.keys() >= words.ORDINARY
    assert [word for word in known.values() if f'<span id="{word.anchor}">' not in page] == []


@pytest.mark.parametrize("name", pages.PAGES)
def test_a_generated_page_is_what_its_tool_says(name: str) -> None:
    assert (ROOT / name).read_text() == pages.PAGES[name](), "write it anew: make pages"


# ---- how Start and Tasks read --------------------------------------------------------------------------------------


def _blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "\n", text, flags=re.DOTALL | re.MULTILINE)


def _sentences(text: str) -> list[str]:
    """The sentences of a page: of paragraphs and items, without code, tables, headings and pictures."""
    found: list[str] = []
    lines = [line for line in _blocks(text).splitlines() if not re.match(r"\||#|!\[", line)]
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:-|\d+\.) )", "\n".join(lines)):
        found += re.split(r"(?<=[.!?])\s+(?=[A-Z`*\[])", _plain(block).strip())
    return [sentence for sentence in found if sentence]


def _plain(text: str) -> str:
    """A text as it is read: a link is its words, code is one word."""
    return re.sub(r"`[^`]+`", "Code", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text))


@pytest.mark.parametrize("name", EASY)
def test_sentences_are_short(name: str) -> None:
    sentences = _sentences((ROOT / name).read_text())
    lengths = [len(sentence.split()) for sentence in sentences]
    assert [sentence for sentence, length in zip(sentences, lengths, strict=True) if length > MOST_WORDS] == []
    assert mean(lengths) <= MEAN_WORDS


@pytest.mark.parametrize("name", EASY)
def test_cells_of_tables_are_short(name: str) -> None:
    rows = [line for line in _blocks((ROOT / name).read_text()).splitlines() if line.startswith("|")]
    cells = [cell.strip() for row in rows for cell in _plain(row).split("|")]
    assert [cell for cell in cells if len(cell.split()) > CELL_WORDS] == []


@pytest.mark.parametrize("name", EASY)
def test_each_screen_has_a_command_or_a_picture(name: str) -> None:
    lines = (ROOT / name).read_text().splitlines()
    shown = [0, *(at for at, line in enumerate(lines) if line.startswith(("```", "![")))]
    gaps = [after - before for before, after in zip(shown, [*shown[1:], len(lines)], strict=True)]
    assert max(gaps) <= SCREEN_LINES
