"""What any peer of the DHT tells whoever asks: to which swarm it belongs, readable with that swarm's key alone.

    newcomer -- 32 random bytes --> peer of the DHT
             <-- sealed: experiment_prefix --

All else that a swarm says stands under names that follow from its key and its prefix, so a newcomer with another key
or another prefix sees nothing at all, like one that has come too early. By this it learns at once which of the three
it is. The answer is sealed for the question and for who gives it, so it says nothing to others and cannot be replayed.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Final

from shoal.identity import open_content, seal_content, swarm_key_fingerprint
from shoal.ids import PREFIX_PATTERN, PeerId

QUESTION_BYTES: Final = 32
MAX_ANSWER_BYTES: Final = 512
_LABEL: Final = b"shoal greeting 1"


def new_question() -> bytes:
    """Return bytes that nobody has asked with before."""
    return os.urandom(QUESTION_BYTES)


@dataclass(frozen=True)
class Greeter:
    """One swarm's side of the exchange, for peers that ask and peers that answer.

    Attributes:
        prefix: the user's name of the experiment.
    """

    swarm_key: bytes
    prefix: str

    def answer(self, question: bytes, own_peer: PeerId) -> bytes:
        """Return what `own_peer` answers; nothing to what is no question."""
        if len(question) != QUESTION_BYTES:
            return b""
        return seal_content(self.swarm_key, _LABEL, self.prefix.encode(), _bound(question, own_peer))

    def prefix_in(self, answer: bytes, question: bytes, peer: PeerId) -> str | None:
        """Return the prefix of the swarm of `peer`, or None if that has another key."""
        if len(answer) > MAX_ANSWER_BYTES:
            return None
        prefix = open_content(self.swarm_key, _LABEL, answer, _bound(question, peer))
        said = None if prefix is None else prefix.decode(errors="replace")
        # It stands in a command that the user is told to type.
        return said if said is not None and re.match(PREFIX_PATTERN, said) else None


def _bound(question: bytes, peer: PeerId) -> bytes:
    """Return what an answer is bound to: the question, which is of one length, and who answers."""
    return question + peer.encode()


def misfit(own: Greeter, prefixes: list[str | None]) -> str | None:
    """Return why the swarm that answered is not the one that this host seeks, and what to do; None: it may be the one.

    Args:
        prefixes: of the peers that answered; None of a peer with another key.
    """
    if not prefixes or own.prefix in prefixes:
        return None
    theirs = sorted({prefix for prefix in prefixes if prefix is not None})
    if theirs:
        return (
            f"the swarm there has this swarm key, but experiment_prefix = {' or '.join(theirs)}, not {own.prefix}: "
            f"join it with --experiment-prefix {theirs[0]}"
        )
    own_mark = swarm_key_fingerprint(own.swarm_key)
    return (
        f"the swarm there has another swarm key than this host, whose fingerprint is {own_mark}: compare it with what "
        "`shoal key fingerprint` prints on the client's host, and copy that host's key file here (--swarm-key-file "
        "names it)"
    )
