"""Command-line flags: every key of the configuration is one.

`--diloco.inner-steps 50`, `--diloco-inner-steps=50` and `--diloco_inner_steps 50` are the same flag. Keys that are true
or false need no value and have a `--no-` form, lists of addresses may be given several times.
"""

from collections.abc import Iterable, Sequence

from shoal.config.distqat_names import REMOVED
from shoal.config.keys import (
    ALIASES,
    SECRETS,
    Key,
    flag_names,
    keys,
    nearest,
    plain,
    section_of,
    unknown_key,
    within_mapping,
)
from shoal.config.sources import Layer, from_text, from_value

_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})


def flag_of(name: str) -> str:
    """Return the way in which a flag for a dotted key is written in messages."""
    return "--" + name.replace("_", "-")


def from_flags(tokens: Sequence[str], other_flags: Iterable[str] = ()) -> Layer:
    """Read flags.

    Args:
        tokens: the arguments that no command declares itself.
        other_flags: names of the flags that the command declares, as suggestions for wrong ones.
    """
    layer = Layer()
    lists: dict[str, list[str]] = {}
    position = 0
    while position < len(tokens):
        token = tokens[position]
        position += 1
        if not _is_flag(token):
            layer.problems.append(f"unexpected argument {token!r}; values follow a flag, as in --config-path FILE")
            continue
        flag, equals, text = token.partition("=")
        following = tokens[position] if position < len(tokens) else None
        found = _key_of(flag)
        if found is None:
            layer.problems.append(_unknown_flag(flag, other_flags))
            if not equals and following is not None and not _is_flag(following):
                position += 1  # its value, which is no mistake of its own
            continue
        key, negated = found
        if key.name in SECRETS:
            layer.problems.append(
                f"{flag}: a command line can be read by every user of this host, and stays in the shell's history: "
                f"set {SECRETS[key.name]}, or {key.name} in a file that is yours alone"
            )
            position += not equals and following is not None and not _is_flag(following)
            continue
        if negated:
            if equals:
                layer.problems.append(f"{flag} takes no value; write {flag} alone")
            else:
                layer.merge(from_value(key, False if key.is_bool else None, flag))
            continue
        if not equals:
            if key.is_bool and (following is None or following.startswith("--")):
                text = "true"
            elif key.is_bool and following is not None and following.lower() not in _TRUE | _FALSE:
                layer.problems.append(f"{flag} takes true or false, not {following!r}")
                position += 1
                continue
            elif following is None or following.startswith("--"):
                layer.problems.append(f"{flag} needs a value; `shoal config keys` shows which")
                continue
            else:
                text = following
                position += 1
        if key.is_word_list:
            lists.setdefault(key.name, []).append(text)
            layer.merge(from_value(key, lists[key.name], flag))
        else:
            layer.merge(from_text(key, text, flag))
    return layer


def _is_flag(token: str) -> bool:
    return token.startswith("--") and token != "--"


def _key_of(flag: str) -> tuple[Key, bool] | None:
    """Return the key of a flag, and whether the flag is a `--no-` form; None if no key has it."""
    table = flag_names()
    wanted = plain(flag.removeprefix("--"))
    if wanted in table:
        return keys()[table[wanted]], False
    if wanted == "disable-quant":
        return keys()["quant"], True
    if wanted.startswith("no-") and wanted[3:] in table:
        key = keys()[table[wanted[3:]]]
        if key.is_bool or (key.accepts_none and section_of(key.info) is not None):
            return key, True
    return None


def _unknown_flag(flag: str, other_flags: Iterable[str]) -> str:
    """Return what is wrong with a flag that no key has, and what to do."""
    for removed in REMOVED:
        if plain(removed) == plain(flag.removeprefix("--")):
            return unknown_key(removed, flag, ())
    if flag.removeprefix("--") in other_flags:
        return f"{flag} is a flag of other commands, and means nothing to this one; remove it"
    if advice := within_mapping(flag.removeprefix("--")):
        return f"unknown flag {flag}; {advice}"
    candidates = [flag_of(name)[2:] for name in keys()] + [
        f"no-{flag_of(k.name)[2:]}" for k in keys().values() if k.is_bool
    ]
    short = [alias.replace("_", "-") for alias in ALIASES]
    suggestion = nearest(flag.removeprefix("--"), [*candidates, *short, *other_flags])
    advice = (
        f"did you mean --{suggestion}?"
        if suggestion
        else "--help lists the command's flags, `shoal config keys` those of all keys"
    )
    return f"unknown flag {flag}; {advice}"
