"""Opens peers with children, has the peers work for ever, and says then which processes there are: to be killed."""

from __future__ import annotations

import json
import signal

from shoal_lab.bench.peers import PeerProcesses

if __name__ == "__main__":
    # What was started in the background by a shell ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with PeerProcesses("tests.integration.bench.sample_peer:main", 2) as peers:
        pids = [*peers.pids, *peers.call("with_child")]
        signal.signal(signal.SIGUSR1, lambda _number, _frame: print(json.dumps(pids), flush=True))
        peers.call("hang_and_tell")
