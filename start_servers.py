#!/usr/bin/env python3
"""Serve stages of a run that another host has started.

    python start_servers.py --num-servers 2 --initial-peers /ip4/203.0.113.7/tcp/50000/p2p/12D3Koo...
    INITIAL_PEERS=/ip4/... python start_servers.py --num-servers 2 --device cpu
    python start_servers.py --num-servers 2 --network-initial-peers @logs/sandbox/initial_peers.txt
    python start_servers.py --help

It needs the file with the swarm's key (--swarm-key-file, by default ~/.config/shoal/swarm.key) from the host of the
run, and takes model, data and optimizers from the run. The same as `shoal start-servers`.
"""

import sys

try:
    from shoal.cli import main
except ModuleNotFoundError as error:
    if error.name != "shoal":
        raise
    sys.exit(f"shoal: error: {sys.executable} has no shoal: `make setup`, then `source .venv/bin/activate`")

if __name__ == "__main__":
    sys.exit(main(["start-servers", *sys.argv[1:]]))
