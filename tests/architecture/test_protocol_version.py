"""The protocol's version goes up when its forms change: `protocol_versions.txt` has a line for each version.

A line is the version and the fingerprint of all its forms: messages, records, hello, refusal, prefix and header. Lines
of released versions never change. The last line is that of the version in the making: it is written anew with every
change until it is released, and the first change after a release adds a line and raises `PROTOCOL_VERSION`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, get_args

import msgspec

from shoal.control import records
from shoal.wire import frame, handshake
from shoal.wire.limits import TENSORS_OF
from shoal.wire.messages import Message, Traffic
from shoal.wire.messages.round import Record

VERSIONS = Path(__file__).with_name("protocol_versions.txt")


def forms() -> dict[str, Any]:
    """Return everything whose change old peers do not understand; texts for people are left out."""
    announced = (*get_args(records.Record), records._Envelope)
    # A round's record travels as the bytes that were signed, so no message's form has its own.
    types = (*get_args(Message), Record, *announced, handshake.Hello, handshake.Refusal)
    _, components = msgspec.json.schema_components((*types, frame.Body))
    return {
        "types": _without_texts(components),
        "record": [records._KEY_LABEL.hex(), records._MAC_BYTES],
        "tensors": sorted((kind.__name__, counts.start, counts.stop) for kind, counts in TENSORS_OF.items()),
        "traffic": list(Traffic),
        "prefix": [handshake.MAGIC.hex(), handshake.PREFIX.format],
        "header": [frame.MAGIC.hex(), frame.HEADER.format, frame.FRAME_VERSION],
        "piece": [frame.PIECE_MAGIC.hex(), frame.PIECE_HEADER.format, frame.MIN_PIECE_BYTES],
    }


def fingerprint() -> str:
    return hashlib.sha256(json.dumps(forms(), sort_keys=True).encode()).hexdigest()[:16]


def _without_texts(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {key: _without_texts(value) for key, value in schema.items() if key != "description"}
    return [_without_texts(item) for item in schema] if isinstance(schema, list) else schema


def test_the_forms_are_those_of_the_version() -> None:
    lines = [line.split() for line in VERSIONS.read_text().splitlines()]
    wanted = f"{handshake.PROTOCOL_VERSION} {fingerprint()}"
    assert lines, f"write into {VERSIONS.name}: {wanted}"
    assert " ".join(lines[-1]) == wanted, (
        f"messages, records or frames have changed. Was version {lines[-1][0]} released? Then raise PROTOCOL_VERSION, "
        f"and add a line to {VERSIONS.name}. If it was not, its last line becomes: {wanted}"
    )
    versions = [int(version) for version, _ in lines]
    assert versions == sorted(set(versions))


def test_a_changed_field_changes_the_fingerprint() -> None:
    text = json.dumps(forms(), sort_keys=True)
    for name in ("StepReport", "StageRecord", "_Envelope", "Hello", "Close", "TensorHeader", "Origin"):
        assert f'"{name}"' in text, name
