"""What the stages of a run need of a server, for a launcher: it loads no torch, and asks a process of its own."""

from __future__ import annotations

import msgspec

from shoal.config.dump import config_to_json
from shoal.config.schema import Config
from shoal.runtime.child import ask
from shoal.swarm.assignment import StageNeed


class StagesAsked(msgspec.Struct, frozen=True):
    """The question.

    Attributes:
        config_json: With its secrets.
    """

    config_json: bytes


class StagesNeed(msgspec.Struct, frozen=True, tag=True):
    """The answer, by stage."""

    needs: tuple[StageNeed, ...]


def asked_stage_needs(config: Config, within_s: float) -> tuple[StageNeed, ...]:
    """Have another process compute `server.memory.stage_needs`. Raises as `ask`."""
    return ask("shoal.server.memory", StagesAsked(config_to_json(config)), StagesNeed, within_s=within_s).needs
