"""The parsers of what comes from the network, each as the fuzzer meets it: an input from a seed, and what it may do.

    frames       wire.frame_decoder    bytes of a connection whose handshake is over, in reads of any size
    messages     the same              whole frames around messages that say something wrong
    hello        wire.handshake        the first bytes of a connection
    connection   transport.connection  hello and frames, as the event loop delivers them
    record       control               sealed records of the DHT: bytes, and wrong ones that an insider has signed
    round        swarm.records         the same for round records
    tag          wire.messages.round   tags of quorums, in the messages of a collective

A parser may take an input, or refuse it with its own typed error. Everything else is a fault: another exception, memory
for a tensor beyond the limit, a read that goes nowhere.
"""

from __future__ import annotations

from shoal.clock import Clock
from shoal.testing.fuzz.frame_parsers import ConnectionParser, Frames, HelloParser, Messages
from shoal.testing.fuzz.parser import Parser
from shoal.testing.fuzz.record_parsers import RecordParser, RoundParser, TagParser


def all_parsers(seed: int, clock: Clock) -> list[Parser]:
    """Return every parser, with valid inputs of this seed.

    Args:
        clock: gives the time to records and links.
    """
    return [
        Frames(seed),
        Messages(seed),
        HelloParser(seed),
        ConnectionParser(seed, clock),
        RecordParser(seed, clock),
        RoundParser(seed),
        TagParser(seed),
    ]
