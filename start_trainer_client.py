#!/usr/bin/env python3
"""Train with servers of other hosts: monitor, client, data server and trainers run here, and servers join.

    python start_trainer_client.py                                             the sandbox, a model of two stages
    python start_trainer_client.py --config-path configs/resnet18_split.yaml   ResNet-18 on images of digits
    python start_trainer_client.py --public-ip 203.0.113.7 --network.monitor-port 50000   behind a forwarded port
    python start_trainer_client.py --num-servers 6                             begin only when there are six servers
    python start_trainer_client.py --help

It prints the two lines to paste on the other hosts, waits for servers of all stages, however long, and trains. The same
as `shoal start-trainer-client`.
"""

import sys

try:
    from shoal.cli import main
except ModuleNotFoundError as error:
    if error.name != "shoal":
        raise
    sys.exit(f"shoal: error: {sys.executable} has no shoal: `make setup`, then `source .venv/bin/activate`")

if __name__ == "__main__":
    sys.exit(main(["start-trainer-client", *sys.argv[1:]]))
