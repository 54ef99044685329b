"""What a machine says about itself."""

from __future__ import annotations

import json

from shoal_lab.bench.machine import describe_machine


def test_the_description_names_what_decides_about_speed_and_can_be_written_as_json() -> None:
    machine = json.loads(json.dumps(describe_machine()))
    assert machine["cores"] >= 1
    assert machine["memory_bytes"] > 0
    assert machine["torch"]
    assert {"processor", "kernel", "python", "load_1min"} <= machine.keys()
