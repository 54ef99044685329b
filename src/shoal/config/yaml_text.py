"""YAML from anywhere as plain values. Whatever is wrong with it is one error, and a small text stays small.

A text of a kilobyte can stand for gigabytes: an alias (`*name`) stands for all that its anchor has, whose aliases stand
for more. PyYAML shares what an alias stands for, but whoever goes through the values does not, and `<<` copies. So
what a text comes to with all aliases written out is counted before anything is made of it.
"""

from typing import Any, cast

import yaml

from shoal.errors import ConfigError

MAX_VALUES = 100_000
"""Keys and values in a text, with aliases written out: a configuration with all its keys has about a thousand."""
_SHOWN = 40


def parsed_yaml(text: str, origin: str) -> object:
    """Return what a text of YAML says.

    Args:
        origin: where it stands, in words.

    Raises:
        ConfigError: it is no YAML, has a key twice in one mapping, or comes to more than `MAX_VALUES` values.
    """
    try:
        return cast(object, _BoundedLoader(text).get_single_data())
    except yaml.YAMLError as error:
        said = " ".join(str(error).split()).replace('in "<unicode string>", ', "in ")
        raise ConfigError(f"{origin}: not valid YAML: {said}") from error
    except RecursionError as error:
        raise ConfigError(f"{origin}: not valid YAML: it is nested too deeply; take some levels out") from error


class _BoundedLoader(yaml.SafeLoader):
    """PyYAML's safe loader, which refuses a key that is given twice, and more values than it may have."""

    def construct_document(self, node: yaml.Node) -> Any:
        _count(node, {})
        return cast(Any, super()).construct_document(node)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return cast(Any, super()).construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:
            # PyYAML knows what a date or a tagged number looks like, and has Python find out whether it is one.
            raise _refusal(
                f"{str(node.value)[:_SHOWN]!r} is no {node.tag.rpartition(':')[2]} ({error})", node
            ) from error


def _count(node: yaml.Node, counts: dict[yaml.Node, int | None]) -> int:
    """Return how many values a node comes to, and keep it in `counts`, where None stands for those around it."""
    if node in counts:
        known = counts[node]
        if known is None:
            raise _refusal("it contains itself", node)
        return known
    counts[node] = None
    count = 1
    if isinstance(node, yaml.MappingNode):
        seen: set[object] = set()
        for key, value in cast("list[tuple[yaml.Node, yaml.Node]]", node.value):
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise _refusal(f"key {key.value!r} is given twice", key)
                seen.add(key.value)
            count += _count(key, counts) + _count(value, counts)
    elif isinstance(node, yaml.SequenceNode):
        count += sum(_count(item, counts) for item in cast("list[yaml.Node]", node.value))
    if count > MAX_VALUES:
        raise _refusal(f"with its aliases written out it has more than {MAX_VALUES:,} values; use fewer aliases", node)
    counts[node] = count
    return count


def _refusal(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
