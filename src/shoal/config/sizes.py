"""Amounts of memory as people write and read them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(value: object) -> object:
    """Return the number of bytes that a text such as 4GiB, 1.5 GB or 800MB says; what is no text is returned as it is.

    Raises:
        ValueError: the text says none.
    """
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?", value.strip().lower())
    if found is None:
        raise ValueError("not a size; write 4GiB, 800MB or a number of bytes")
    return int(float(found[1]) * _UNITS[found[2]])


def format_bytes(num_bytes: int) -> str:
    """Return a number of bytes for people, such as 1.5 GiB."""
    amount, unit = float(num_bytes), "bytes"
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{num_bytes} bytes" if unit == "bytes" else f"{amount:.1f} {unit}"
