"""`shoal doctor` with time for everything, so that no verdict depends on how busy the machine is.

    patient_doctor.py OFFSET_S ANSWER_S FLAG...

prints the diagnosis of a host whose clock is off by so much, as JSON; each peer has this time for an answer.
"""

from __future__ import annotations

import sys
import time

_real_unix_s = time.time
_offset_s = float(sys.argv[1]) if __name__ == "__main__" else 0.0
if _offset_s:
    # Before anybody can keep the function, as in control/stepping_peer.py.
    time.time = lambda: _real_unix_s() + _offset_s

# ruff: noqa: E402

from functools import partial

import anyio
import msgspec

from shoal import log
from shoal.cli.doctor import joined_facts
from shoal.cli.doctor.examine import examine
from shoal.config.load import load_with_origins
from shoal.control import dht, dht_launcher, initial_peers

LONG_S = 200.0
PATIENT = {
    joined_facts: ("_JOIN_S", "_READ_S", "_ANSWER_S"),
    dht: ("_GREETING_TIMEOUT_S", "_LOOK_AROUND_S", "WAIT_TIMEOUT_S"),
    dht_launcher: ("WAIT_TIMEOUT_S",),
    initial_peers: ("_ANSWER_TIMEOUT_S",),
}
"""What is given up after a few seconds otherwise."""


def main() -> None:
    """Print it."""
    log.configure("doctor", None)
    for module, names in PATIENT.items():
        for name in names:
            setattr(module, name, LONG_S)
    dht._GREETING_TIMEOUT_S = initial_peers._ANSWER_TIMEOUT_S = float(sys.argv[2])
    if _offset_s:
        # What a host with a wrong clock cannot read does not come later either.
        joined_facts._READ_S = 0.5
    config, origins = load_with_origins(None, sys.argv[3:], {})
    found = anyio.run(partial(examine, config, origins, within_s=LONG_S), backend_options={"use_uvloop": True})
    print(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main()
