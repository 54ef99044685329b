"""Durations as people write them on a command line."""

from __future__ import annotations

import re

from shoal.errors import ConfigError

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_duration_s(text: str, flag: str) -> float:
    """Return the seconds that a text such as 30ms, 15s, 1.5m or 2h says.

    Raises:
        ConfigError: it says none; the message names the flag.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h)", text.strip())
    if found is None:
        raise ConfigError(f"{flag} {text}: not a duration; write 30ms, 15s, 10m or 1h")
    return float(found[1]) * _UNITS_S[found[2]]
