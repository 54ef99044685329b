"""What inner optimizers know, for checkpoints, and back from them (docs/protocol.md, "Inner states").

a record with `keep` is swapped to

mirror                               member of the record
  | -- AskInner ------------------->  |
  | <- InnerHeld                      |   as long as it has it: until the next such record
  |    gets the content (`transfer`)  |

the run goes on from the checkpoint

client                               replica that takes a member's place
  | -- TakeInner ------------------>  |   before the first step
  |    gets the content (`transfer`)  |
  | <- InnerTaken                     |
"""

from __future__ import annotations

from shoal.ids import Stage
from shoal.wire.messages.base import ContentBytes, Struct
from shoal.wire.messages.transfer import ContentKind, ContentName, Digest


class InnerState(Struct, frozen=True):
    """What an inner optimizer of a stage knew at the record with this hash. `digest` (hex) is the SHA-256 of the
    SHA-256 of its content's chunks. The content is a safetensors file: each tensor is called by what it is and by its
    parameter, and the metadata say whose it is."""

    stage: Stage
    record_hash: Digest
    digest: Digest
    num_bytes: ContentBytes

    @property
    def name(self) -> ContentName:
        """Of its content."""
        return ContentName(ContentKind.INNER, self.stage, self.digest)


class AskInner(Struct, frozen=True, tag="ask_inner"):
    """What did the receiver's inner optimizer know at this record?"""

    stage: Stage
    record_hash: Digest


class InnerHeld(Struct, frozen=True, tag="inner_held"):
    """The sender gives it, or (None) does not have it."""

    stage: Stage
    record_hash: Digest
    inner: InnerState | None


class TakeInner(Struct, frozen=True, tag="take_inner"):
    """Train on with this, which the sender gives."""

    inner: InnerState


class InnerTaken(Struct, frozen=True, tag="inner_taken"):
    """The receiver's inner optimizer now knows the content with this digest, or `refused` says why not."""

    digest: Digest
    refused: str = ""


InnerMessage = AskInner | InnerHeld | TakeInner | InnerTaken
