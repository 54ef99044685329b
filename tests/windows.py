"""What tests look at inside of objects, and nothing in production asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.data.pool import Pool
    from shoal.data.preparer import Preparer
    from shoal.runtime.supervisor import Supervisor
    from shoal.swarm.lease import Batch, LeaseTable
    from shoal.transport.buffer_pool import BufferPool


def num_free(pool: Pool) -> int:
    """Places of a batch pool that nobody uses."""
    return pool._free.bit_count()


def num_preparing(preparer: Preparer) -> int:
    """Batches on their way into the pool."""
    return len(preparer._preparing)


def idle_bytes(pool: BufferPool) -> int:
    """Memory that a buffer pool keeps and that is not in use."""
    pool._collect()
    return pool._idle_bytes


def leased(table: LeaseTable) -> dict[int, Batch]:
    """The batches that are leased or done, by lease."""
    return {number: lease.batch for number, lease in table._leases.items()}


def fork_server_pid(supervisor: Supervisor) -> int:
    """The process from which the next role will be forked."""
    return supervisor._keeper.pid
