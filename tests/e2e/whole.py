"""What is true of a run after all faults: its replicas agree, and no sample is lost or doubled.

`Launched.leaves_nothing` looks for what a run may leave behind.
"""

from __future__ import annotations

from tests.e2e.observed import Swarm

from shoal.averaging.audit import Audit, audit
from shoal.averaging.journal import read_records
from shoal.wire.messages.round import StageOutcome


def replicas_agree(swarm: Swarm) -> int:
    """Check each record that each server has swapped in against the record itself; return how many there were.

    Raises:
        AssertionError: a server held other bytes.
    """
    directory = swarm.client.log_dir
    assert directory is not None
    outcomes: dict[tuple[int, int], StageOutcome] = {}
    for record, _ in read_records(directory):
        outcomes |= {(record.round, outcome.stage): outcome for outcome in record.stages}
    compared = 0
    for server in swarm.servers:
        for event in server.swapped():
            if (outcome := outcomes.get((event["round"], event["stage"]))) is None:
                continue  # decided when the client was gone: it had no time to write it down
            held = {name: event[name] for name in ("parameters", "momentum", "buffers")}
            recorded = {name: getattr(outcome.hashes, name) for name in held}
            assert held == recorded, f"{server.role}, stage {event['stage']}, round {event['round']}"
            compared += 1
    return compared


def samples_are_whole(swarm: Swarm) -> Audit:
    """Recompute the run's samples from its step logs.

    Raises:
        AssertionError: one was trained twice, or left out.
    """
    directory = swarm.client.log_dir
    assert directory is not None
    opened = swarm.events("data_server_0", "dataset.opened")[0]
    found = audit(directory, opened["num_train"])
    assert (found.duplicates, found.missing) == (0, 0), found
    return found
