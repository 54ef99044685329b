#!/usr/bin/env python3
"""Train on a swarm of processes on this machine: monitor, client, data server, trainers and servers.

    python run_local.py                                             the sandbox: 2 stages, 4 servers, a minute
    python run_local.py --config-path configs/resnet18_split.yaml   ResNet-18 in two stages on images of digits
    python run_local.py --num-servers 6 --baseline                  more servers, and the plain loop for comparison
    python run_local.py --diloco.inner-steps 20 --no-wandb          every key of the configuration is a flag
    python run_local.py --config-path configs/gemma3_270m.yaml --tiny   a known model in small
    python run_local.py --help

The same as `shoal run-local`.
"""

import sys

try:
    from shoal.cli import main
except ModuleNotFoundError as error:
    if error.name != "shoal":
        raise
    sys.exit(f"shoal: error: {sys.executable} has no shoal: `make setup`, then `source .venv/bin/activate`")

if __name__ == "__main__":
    sys.exit(main(["run-local", *sys.argv[1:]]))
