"""Something that happens when a certain message is about to be delivered: a fault at (peer, step)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from shoal.ids import PeerId
from shoal.wire.messages import CollectiveMessage, Message
from shoal.wire.messages.round import QuorumTag


@dataclass
class _Trigger:
    kinds: tuple[type, ...]
    action: Callable[[], None]
    sender: PeerId | None
    receiver: PeerId | None
    number: int | None
    fields: Mapping[str, object]
    left: int

    def matches(self, sender: PeerId, receiver: PeerId, message: Message) -> bool:
        wanted = (self.sender, self.receiver, self.number)
        actual = (sender, receiver, getattr(getattr(message, "key", None), "number", None))
        return (
            isinstance(message, self.kinds)
            and all(want is None or want == is_ for want, is_ in zip(wanted, actual, strict=True))
            and all(_field(message, name) == value for name, value in self.fields.items())
        )


def _field(message: Message, name: str) -> object:
    """What a message says; one of a collective says of what round, ballot, epoch and stage it is in its tag."""
    said = QuorumTag.decoded(message.tag) if isinstance(message, CollectiveMessage) else message
    return getattr(said, name, getattr(message, name, None))


def _field_names(kind: type) -> tuple[str, ...]:
    names = cast(tuple[str, ...], getattr(kind, "__struct_fields__", ()))
    return names + QuorumTag.__struct_fields__ if issubclass(kind, CollectiveMessage) else names


class Faults:
    """Watches all deliveries of a network; use `deliver` as its `before_delivery`."""

    def __init__(self) -> None:
        self._triggers: list[_Trigger] = []

    def when(
        self,
        *kinds: type,
        action: Callable[[], None],
        sender: PeerId | None = None,
        receiver: PeerId | None = None,
        number: int | None = None,
        after: int = 0,
        **fields: object,
    ) -> None:
        """Do something once, right before a message is delivered. Killing its sender or receiver loses the message.

        Args:
            kinds: types of messages (`shoal.wire.messages`).
            action: must not wait.
            sender: only messages of this peer.
            receiver: only messages to this peer.
            number: only messages of this step (counted from 0 over the whole run).
            after: how many such messages pass before.
            fields: only messages with these values, such as `round=2`.

        Raises:
            ValueError: No such message has one of the fields, so this would never happen.
        """
        has = {name for kind in kinds for name in _field_names(kind)}
        if unknown := fields.keys() - has:
            raise ValueError(f"no {' or '.join(kind.__name__ for kind in kinds)} has {', '.join(sorted(unknown))}")
        self._triggers.append(_Trigger(kinds, action, sender, receiver, number, fields, after))

    def deliver(self, sender: PeerId, receiver: PeerId, message: Message) -> None:
        """Look at a message; called by the network."""
        for trigger in [each for each in self._triggers if each.matches(sender, receiver, message)]:
            trigger.left -= 1
            if trigger.left < 0:
                self._triggers.remove(trigger)
                trigger.action()
