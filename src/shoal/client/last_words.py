"""What a client still writes down when it ends, however that comes about.

Between `CommitRecord` and the file of the record there is time for a Ctrl-C. The replicas hold the record then, and
without the file nobody could check what they hold.
"""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.to_thread

from shoal.averaging.coordinator import RoundOutcome
from shoal.averaging.journal import follows, write_round
from shoal.client.ledger import Ledger
from shoal.events.run import RoundNotWritten

_PATIENCE_S = 5.0
"""So long may the disk take; then the client ends without the file."""


async def write_last(standing: RoundOutcome | None, log_dir: Path, ledger: Ledger) -> bool:
    """Write the record that the replicas were told to swap to, if it is the next one. Shielded, and bounded in time.

    Args:
        standing: what the coordinator knows; None: no round has been committed, and D_0 stands.
        log_dir: of this client; may hold records of another chain.

    Returns:
        Whether it was written.

    Raises:
        RecordRejected: a file that is there is no record.
        StorageError: it cannot be written.
    """
    if standing is None:
        return False

    def write() -> bool:
        is_next = follows(log_dir, standing.record)
        if is_next:
            write_round(log_dir, standing.record, standing.signed)
        return is_next

    with anyio.move_on_after(_PATIENCE_S, shield=True):
        return await anyio.to_thread.run_sync(write, abandon_on_cancel=True)
    ledger.note(RoundNotWritten(standing.record.round, _PATIENCE_S))
    return False
