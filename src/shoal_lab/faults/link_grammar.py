"""How users write a link: `20mbit,150ms,jitter=20ms,loss=1%,seed=3`.

    part          meaning
    20mbit        rate of each direction: kbit, mbit or gbit per second, of 1000 bits and so on
    150ms         round trip, as `ping` shows it: each direction has half; us, ms or s
    jitter=20ms   up to so much more on a round trip: each direction has half
    loss=1%       share of packets lost in each direction
    seed=3        of what is random, 0 unless given

All parts may be left out except that there must be one; none may come twice.
"""

from __future__ import annotations

import re
from typing import Final

from shoal.errors import ConfigError
from shoal_lab.faults.link import Link, LinkConditions

_UNITS: Final = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "%": 0.01, "": 1.0}
_FIELDS: Final = {
    "rate": ("rate_bytes_per_s", 8),
    "delay": ("delay_s", 2),
    "jitter": ("jitter_s", 2),
    "loss": ("loss", 1),
}
"""Field of `LinkConditions`, and what the amount is divided by: bits to bytes, round trip to one way."""
_FORMS: Final = {
    "rate": r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)",
    "delay": r"(\d+(?:\.\d+)?)(us|ms|s)",
    "jitter": r"jitter=(\d+(?:\.\d+)?)(us|ms|s)",
    "loss": r"loss=(\d+(?:\.\d+)?)(%)",
    "seed": r"seed=(\d+)()",
}
_EXAMPLE: Final = "write for example 20mbit,150ms,jitter=20ms,loss=1%,seed=3"


def parse_link(text: str) -> Link:
    """Return the link that a text says, the same in both directions.

    Raises:
        ConfigError: the text says none.
    """
    found: dict[str, tuple[float, str]] = {}
    for part in text.lower().split(","):
        name, amount, unit = _parse_part(part.strip(), text)
        if name in found:
            raise ConfigError(f"link {text!r}: the {name} is given twice")
        found[name] = (amount, unit)
    amount = {name: value * _UNITS[unit] for name, (value, unit) in found.items()}
    values = {field: amount[name] / share for name, (field, share) in _FIELDS.items() if name in amount}
    try:
        conditions = LinkConditions(**values)
    except ConfigError as error:
        raise ConfigError(f"link {text!r}: {error}") from error
    return Link(conditions, conditions, int(amount.get("seed", 0)))


def _parse_part(part: str, text: str) -> tuple[str, float, str]:
    for name, form in _FORMS.items():
        match = re.fullmatch(form, part)
        if match is not None:
            return name, float(match[1]), match[2]
    raise ConfigError(f"link {text!r}: {part!r} is no rate, no time, and no jitter, loss or seed; {_EXAMPLE}")
