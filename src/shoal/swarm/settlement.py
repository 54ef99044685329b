"""What the replicas of a path tell each other about a step that its trainer decides no more."""

from __future__ import annotations

from collections.abc import Collection

from shoal.ids import PeerId
from shoal.wire.messages.step import Outcome


class Settlement:
    """The answers of the other replicas, as one replica that has prepared the step knows them.

    The step is aborted when all others deny it. A denial counts only while no peer can still bring its sender the
    commit. A replica that was started again has forgotten whether its earlier generation committed the step, and whom
    that generation told. So a replica that hears that another has forgotten asks all that have not committed once more,
    and names the one that forgot. From then on they no longer believe late messages of the earlier generation. Each of
    them therefore answers either with the commit, or with a denial that stays true.

    Args:
        others: the peers of the path without this replica.
    """

    def __init__(self, others: Collection[PeerId]) -> None:
        self._others = others
        self._answers: dict[PeerId, Outcome] = {}

    @property
    def forgotten(self) -> tuple[PeerId, ...]:
        """Who has forgotten what was known of the step there."""
        return tuple(peer for peer in self._others if self._answers.get(peer) == Outcome.FORGOTTEN)

    def unanswered(self) -> list[PeerId]:
        """Who has not answered, or has to be asked once more."""
        return [peer for peer in self._others if peer not in self._answers]

    def learn(self, forgotten: Collection[PeerId]) -> bool:
        """These have forgotten the step. Returns whether that is news, so that the others are to be asked once more."""
        news = {peer for peer in self._others if peer in forgotten} - set(self.forgotten)
        if news:
            final = {peer: answer for peer, answer in self._answers.items() if answer != Outcome.NOT_COMMITTED}
            self._answers = final | dict.fromkeys(news, Outcome.FORGOTTEN)
        return bool(news)

    def hear(self, sender: PeerId, outcome: Outcome, forgotten: Collection[PeerId]) -> bool:
        """Take an answer, unless it is of an earlier generation, or its sender did not yet know which peers have
        forgotten.

        Args:
            outcome: how the step stands at the sender.
            forgotten: the peers of which the sender knew, when it answered, that they have forgotten the step.

        Returns:
            Whether the answer counts.
        """
        if sender in self.forgotten or sender not in self._others:
            return False
        if outcome == Outcome.NOT_COMMITTED and not set(self.forgotten) <= set(forgotten):
            return False
        self._answers[sender] = outcome
        return True
