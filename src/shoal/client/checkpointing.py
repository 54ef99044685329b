"""Says of which records checkpoints are wanted; mirrors write them."""

from __future__ import annotations

from shoal.clock import Clock
from shoal.config.schema import Config
from shoal.control.membership import Membership
from shoal.swarm.keep_rule import KeepRule
from shoal.wire.messages.round import Record


class Checkpointing:
    """The rule of one client, and what users ask for.

    Args:
        membership: lists the mirrors, which write them.
    """

    def __init__(self, config: Config, clock: Clock, membership: Membership) -> None:
        self._membership = membership
        self._clock = clock
        self._rule = KeepRule.of(config)

    @property
    def has_mirrors(self) -> bool:
        """Whether somebody is there who writes them."""
        return bool(self._membership.view.mirrors)

    @property
    def is_asked(self) -> bool:
        """Whether a user wants one of the next record."""
        return self._rule.is_asked

    def ask(self) -> None:
        """A user wants one of the next record, whatever the rule says."""
        self._rule.is_asked = True

    def is_due(self, round: int) -> bool:
        """Whether one is wanted of a round's record: then each replica copies what its inner optimizer knows."""
        return self.has_mirrors and self._rule.is_due(round, self._clock.now_s())

    def recorded(self, record: Record) -> None:
        """A record stands."""
        if record.keep:
            self._rule.begun(record.round, self._clock.now_s())
