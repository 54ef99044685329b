"""Command-line flags: every key of the configuration is one.

`--diloco.inner-steps 50`, `--diloco-inner-steps=50` and `--diloco_inner_steps 50` are the same flag. Keys that are true
or false need no value and have a `--no-` form, lists of addresses may be given several times.
"""

from collections.abc import Iterable, Sequence

from shoal.config.keys import REMOVED, Key, flag_names, keys, nearest, plain, section_of, unknown_key
from shoal.config.sources import Layer, from_text, from_value
from shoal.errors import ConfigError

_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})


def flag_of(name: str) -> str:
    """Return the way in which a flag for a dotted key is written in messages."""
    return "--" + name.replace("_", "-")


def from_flags(tokens: Sequence[str], other_flags: Iterable[str] = ()) -> Layer:
    """Read flags.

    Args:
        tokens: the arguments that no command declares itself.
        other_flags: names of the flags that the command does declare, as suggestions for wrong ones.

    Raises:
        ConfigError: an unknown flag, a missing value, or an argument that is no flag.
    """
    layer = Layer()
    lists: dict[str, list[str]] = {}
    position = 0
    while position < len(tokens):
        token = tokens[position]
        position += 1
        if not token.startswith("--") or token == "--":
            raise ConfigError(f"unexpected argument {token!r}; values follow a flag, as in --config-path FILE")
        flag, equals, text = token.partition("=")
        key, negated = _key_of(flag, other_flags)
        following = tokens[position] if position < len(tokens) else None
        if negated:
            if equals:
                raise ConfigError(f"{flag} takes no value; write {flag} alone")
            layer.merge(from_value(key, False if key.is_bool else None, flag))
            continue
        if not equals:
            if key.is_bool and (following is None or following.lower() not in _TRUE | _FALSE):
                text = "true"
            elif following is None or following.startswith("--"):
                raise ConfigError(f"{flag} needs a value; `shoal config keys` shows which")
            else:
                text = following
                position += 1
        if key.is_word_list:
            lists.setdefault(key.name, []).append(text)
            layer.merge(from_value(key, lists[key.name], flag))
        else:
            layer.merge(from_text(key, text, flag))
    return layer


def _key_of(flag: str, other_flags: Iterable[str]) -> tuple[Key, bool]:
    """Return the key of a flag, and whether the flag is a `--no-` form."""
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
    for removed in REMOVED:
        if plain(removed) == wanted:
            raise unknown_key(removed, flag, ())
    candidates = [flag_of(name)[2:] for name in keys()] + [
        f"no-{flag_of(k.name)[2:]}" for k in keys().values() if k.is_bool
    ]
    suggestion = nearest(flag.removeprefix("--"), [*candidates, *other_flags])
    advice = f"did you mean --{suggestion}?" if suggestion else "`shoal config keys` lists all flags."
    raise ConfigError(f"unknown flag {flag}; {advice}")
