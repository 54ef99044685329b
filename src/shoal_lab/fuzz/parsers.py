"""The parsers of what comes from the network, and of what a disk gives back, each as the fuzzer meets it.

    frames       wire.frame_decoder    bytes of a connection whose handshake is over, in reads of any size
    messages     the same              whole frames around messages that say something wrong
    hello        wire.handshake        the first bytes of a connection
    connection   transport.connection  hello and frames, as the event loop delivers them
    record       control               sealed records of the DHT: bytes, and wrong ones that an insider has signed
    round        swarm.records         the same for round records
    tag          wire.messages.round   tags of quorums, in the messages of a collective
    manifest     checkpoint.manifest   what a checkpoint says that it is
    kept_record  checkpoint.stored     the signed record in it
    tensor_file  checkpoint            tensors, as models and checkpoints have them
    payload_*    codec                 vectors as a round's members send them, for each codec that is not element-wise

A parser may take an input, or refuse it with its own typed error. Everything else is a fault: another exception, memory
for a tensor beyond the limit, a read that goes nowhere.
"""

from __future__ import annotations

from shoal.clock import Clock
from shoal.codec.registry import GATHERED_NAMES
from shoal_lab.fuzz.file_parsers import KeptRecordParser, ManifestParser, TensorFileParser
from shoal_lab.fuzz.frame_parsers import ConnectionParser, Frames, HelloParser, Messages
from shoal_lab.fuzz.parser import Parser
from shoal_lab.fuzz.payload_parsers import PayloadParser
from shoal_lab.fuzz.record_parsers import RecordParser, RoundParser, TagParser


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
        ManifestParser(seed),
        KeptRecordParser(seed),
        TensorFileParser(seed),
        *(PayloadParser(name, seed) for name in GATHERED_NAMES),
    ]
