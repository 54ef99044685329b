"""Every message of the data plane, by protocol.

`base` holds what all share, `step` the training step (prepare and commit), `round` the outer round, `mirror` what
mirrors hold of it, `collective` what the members of a group exchange, `transfer` how peers get states and snapshots
from each other, `snapshot` what servers keep of each other, `inner` what checkpoints have of inner optimizers, `feed`
the data server's leases, `control` what the client says to its trainers and they to it. `Message` is a tagged union: a
frame carries exactly one of these types, and bytes that fit none are refused by the decoder.
"""

from __future__ import annotations

from shoal.wire.messages.base import Hop, SampleRange, Traffic
from shoal.wire.messages.collective import CollectiveMessage
from shoal.wire.messages.control import ControlMessage
from shoal.wire.messages.feed import FeedMessage
from shoal.wire.messages.inner import InnerMessage
from shoal.wire.messages.mirror import MirrorMessage
from shoal.wire.messages.round import RoundMessage
from shoal.wire.messages.snapshot import SnapshotMessage
from shoal.wire.messages.step import StepMessage
from shoal.wire.messages.transfer import TransferMessage

Message = (
    CollectiveMessage
    | ControlMessage
    | FeedMessage
    | InnerMessage
    | MirrorMessage
    | RoundMessage
    | SnapshotMessage
    | StepMessage
    | TransferMessage
)
"""What a frame may carry."""

__all__ = [
    "CollectiveMessage",
    "ControlMessage",
    "FeedMessage",
    "Hop",
    "InnerMessage",
    "Message",
    "MirrorMessage",
    "RoundMessage",
    "SampleRange",
    "SnapshotMessage",
    "StepMessage",
    "Traffic",
    "TransferMessage",
]
