"""Prints docs/wrong.md from the catalogue of events: `python tools/wrong.py > docs/wrong.md`."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Iterator
from itertools import groupby

from shoal.cli.doctor.examine import CHECKS
from shoal.events.base import Event, catalogue, name_of
from shoal.events.described import described, texts
from shoal.events.incidents import CLOCK, DISK, DISK_COSTS, FILES, MEMORY

HEAD = """# When it goes wrong

Search this page for the words on your screen. It is made from `src/shoal/events/` by `tools/wrong.py`. A name in braces
stands for a value. The name at the end of an entry is the event's, which `shoal explain` takes.

```bash
shoal doctor                       # before a join, or after one that has failed: what is wrong with this host
shoal status                       # is the run well?
shoal events                       # what has happened to it, and what to do
shoal logs --level warning         # the same of every process, in order of time
shoal explain server.lost          # one event in words
```

A message that begins with `shoal: error:` says itself what to do. Exit code 2 means wrong input, or a swarm that cannot
be joined, 1 a failed run, 3 a machine that is too busy to measure.
"""
INCIDENTS = """## Troubles

What a peer has that is there. `incident.opened` says it, and `incident.closed` when it is over.
"""
CHECKED = """## What the doctor looks at

Each check of `shoal doctor` says what it has seen, and what to do.

| check | what has to be so |
|---|---|"""
IN_LOGS = """## In the logs alone

These lines of `logs/RUN/*.log` are a warning or worse, and no screen shows them.
"""


def page() -> str:
    """Return the whole page."""
    lines = [HEAD]
    seen = [kind for kind in catalogue().values() if _is_shown(kind)]
    for module, kinds in groupby(sorted(seen, key=lambda kind: kind.__module__), key=lambda kind: kind.__module__):
        about = (importlib.import_module(module).__doc__ or "").partition("\n")[0]
        lines += [f"## {module.rpartition('.')[2].capitalize()}", "", about, ""]
        for kind in kinds:
            lines += [*entry(kind), ""]
    lines += [INCIDENTS, *troubles(), IN_LOGS]
    lines += [f"- `{name_of(kind)}`: {described(kind).happened}{_remedy(kind)}" for kind in _logged()]
    lines += ["", CHECKED, *(f"| `{check.name}` | {check.title} |" for check in CHECKS)]
    return "\n".join(lines).rstrip() + "\n"


def entry(kind: type[Event]) -> Iterator[str]:
    """Yield what the page says of one kind."""
    said = described(kind)
    for text in texts(kind):
        yield f"**{_literal(text)}**"
        yield ""
    yield f"- What: {said.happened}"
    parts = dict(said.parts)
    if "Why" in parts:
        yield f"- Why: {_sentence(parts['Why'])}"
    if "Do" in parts:
        yield f"- Do: {_sentence(parts['Do'])}"
    yield f"- Event: `{name_of(kind)}`"


def troubles() -> Iterator[str]:
    """Yield what the page says of incidents that are no losses."""
    costs = ", ".join(f"{what}: {cost}" for what, cost in DISK_COSTS.items())
    for text, what in (
        (DISK, f"A disk is full, fails or does not answer. In brackets stands what is not written. It costs: {costs}."),
        (FILES, "The last ones that a process may open are kept for its files, so that no connection ends it."),
        (MEMORY, "The device of a server has no room for a microbatch. If smaller ones fit, steps take longer now."),
        (CLOCK, "Two hosts have different times. Nobody trains over a host whose records are not believed."),
    ):
        yield from (f"**{_literal(text)}**", "", f"- What: {what}", "")


def _is_shown(kind: type[Event]) -> bool:
    """Whether a person sees words of it that can be searched for, and may want to act on them."""
    words = re.sub(r"\{\w+\}", "", texts(kind)[0])
    return len(words.split()) > 1 and (kind.level >= logging.WARNING or bool(kind.why or kind.do))


def _logged() -> Iterator[type[Event]]:
    for kind in catalogue().values():
        if kind.level >= logging.WARNING and not texts(kind)[0]:
            yield kind


def _remedy(kind: type[Event]) -> str:
    return f" {_sentence(kind.do)}" if kind.do else ""


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def _literal(text: str) -> str:
    """A text as Markdown shows it word by word."""
    return re.sub(r"([*_<\\])", r"\\\1", text)


if __name__ == "__main__":
    print(page(), end="")
