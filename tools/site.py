"""Lays the documents out for the site: `python tools/site.py` fills build/docs, of which zensical makes site/.

Pages of docs/ keep their places, those of the root and of examples/ get one. A link to a file that has no page, which
only a checkout can follow, becomes plain text. A word that docs/understand/words.md explains becomes a link to it.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tools.words import PLACE, with_anchors, with_words, words_of  # noqa: E402

DOCS = PurePosixPath("docs")
PAGES = {
    "ARCHITECTURE.md": "project/architecture.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "README.md": "index.md",
    "SECURITY.md": "project/security.md",
    "configs/reference.yaml": "reference/keys.md",
    "examples/own_data/README.md": "project/own_data.md",
    "examples/own_model/README.md": "project/own_model.md",
}
"""Where links to files outside docs/ lead; all but two of them are pages themselves."""
SHOWN = {
    "examples/own_data/README.md": ("shapes.py", "config.yaml"),
    "examples/own_model/README.md": ("residual_mlp.py", "config.yaml"),
}
"""Files beside a page that the site shows at its end: a reader of the site has no checkout at hand."""
NO_PAGES = ("README.md", "configs/reference.yaml")
"""What is said in docs/ as well."""
_LINK = re.compile(r"(!?)\[([^\]\n]*)\]\(([^)#\s]*)(#[^)\s]*)?\)")


def lay_out(target: Path, root: Path = ROOT) -> list[PurePosixPath]:
    """Write every page into an empty folder, and return their places there."""
    shutil.rmtree(target, ignore_errors=True)
    sources = [PurePosixPath(path.relative_to(root).as_posix()) for path in sorted((root / DOCS).rglob("*"))]
    sources += [PurePosixPath(name) for name in PAGES if name not in NO_PAGES]
    words = words_of((root / DOCS / PLACE).read_text())
    pages: list[PurePosixPath] = []
    for source in sources:
        place = site_path(source)
        if place is None or not (root / source).is_file():
            continue
        (target / place).parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".md":
            text = with_links(source, place, (root / source).read_text())
            text = with_anchors(text) if place == PLACE else with_words(place, text, words)
            files = [shown(root / source.parent / name) for name in SHOWN.get(str(source), ())]
            (target / place).write_text("".join((text, *files)))
            pages.append(place)
        else:
            shutil.copyfile(root / source, target / place)
    return pages


def site_path(source: PurePosixPath) -> PurePosixPath | None:
    """Return where a file of this project is in the site; None if it is not."""
    if str(source) in PAGES:
        return PurePosixPath(PAGES[str(source)])
    return source.relative_to(DOCS) if source.is_relative_to(DOCS) else None


def shown(path: Path) -> str:
    """Return a part of a page that has a whole file."""
    language = {".py": "python", ".yaml": "yaml"}[path.suffix]
    return f"\n## {path.name}\n\n```{language}\n{path.read_text()}```\n"


def with_links(source: PurePosixPath, place: PurePosixPath, text: str) -> str:
    """Return a page whose links lead to pages of the site.

    Args:
        source: the page's file in this project.
        place: the page's place in the site.
    """

    def led(link: re.Match[str]) -> str:
        mark, words, path, part = link[1], link[2], link[3], link[4] or ""
        if not path or "://" in path:
            return link[0]
        there = site_path(PurePosixPath(os.path.normpath(source.parent / path)))
        if there is None:
            return words
        return f"{mark}[{words}]({os.path.relpath(there, place.parent)}{part})"

    blocks = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(block if block.startswith("```") else _LINK.sub(led, block) for block in blocks)


if __name__ == "__main__":
    lay_out(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "docs")
