"""What the classes of images are called: asked where a run begins, so that its model can name what it sees.

    launcher -- NameClasses --> `python -m shoal.data.class_names`
             <- ClassesNamed --

The package that knows them is large, and reads files of strangers: a process of its own loads it, and ends.
"""

from __future__ import annotations

from math import inf
from typing import Final

import msgspec

from shoal.config.dump import config_to_json
from shoal.config.load import config_from_json
from shoal.config.schema import Config
from shoal.data.builtin import BUILTINS
from shoal.data.catalog import wanted_of_hub
from shoal.data.text_corpus import Say
from shoal.errors import ChildDied, ConfigError, RemoteError
from shoal.events.data import ClassesAsked
from shoal.runtime.child import Parent, ask
from shoal.runtime.own_limits import within_free_memory
from shoal.runtime.process_control import set_process_title

_MODULE: Final = "shoal.data.class_names"
_MOST_CHARACTERS: Final = 64 << 10
"""Of all names together, which each message with the configuration holds: a thousand long ones, and more short ones."""


class NameClasses(msgspec.Struct, frozen=True):
    """The question.

    Attributes:
        config_json: With its secrets.
    """

    config_json: bytes


class ClassesNamed(msgspec.Struct, frozen=True, tag=True):
    """The answer, in the order of their numbers."""

    classes: tuple[str, ...]


def with_classes(config: Config, say: Say) -> Config:
    """Return the configuration with what the classes of its images are called, where the data says that.

    Args:
        say: told that the data are looked at, or asked for on the hub.

    Raises:
        ConfigError: There are no such images, or the model knows fewer classes.
        RemoteError: The process that looks was killed.
    """
    data = config.data
    is_known = data.classes is not None or data.is_own or data.dataset_name in BUILTINS
    if is_known or data.task_type not in ("cv", "image_gen"):
        return config
    say(wanted_of_hub(data) or ClassesAsked(data.dataset_name))
    # It may download what is trained on: nothing says how long that takes.
    try:
        classes = ask(_MODULE, NameClasses(config_to_json(config)), ClassesNamed, within_s=inf).classes
    except ChildDied as died:
        raise RemoteError(f"{died}; is the memory enough?") from died
    if (known := config.model.num_classes) < len(classes):
        raise ConfigError(
            f"model.num_classes = {known} is too small for data.dataset_name = {data.dataset_name}: it has "
            f"{len(classes)} classes; set model.num_classes to at least {len(classes)}"
        )
    if sum(map(len, classes)) > _MOST_CHARACTERS or len(set(classes)) < len(classes):
        return config
    return config.model_copy(update={"data": data.model_copy(update={"classes": classes})})


def main() -> None:
    """Answer one question."""
    from shoal.data.huggingface import class_names

    set_process_title("classes")
    with Parent[NameClasses](NameClasses) as launcher, within_free_memory():
        for question in launcher.orders:
            launcher.say(ClassesNamed(class_names(config_from_json(question.config_json).data)))


if __name__ == "__main__":
    main()
