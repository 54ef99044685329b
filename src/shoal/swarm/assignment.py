"""Which stage a server takes that was given none, by a rule that everybody computes alike.

Servers that start together must not race into one gap. So nobody grabs a stage: each announces itself as a candidate,
waits until it sees the others, and computes the assignment of *all* of them, each to the stage that has the fewest
servers at that point: first those that the fewest stages fit, so that a large machine does not take what a small one
could have hosted, and of these the oldest. A stage that fits only in smaller microbatches than the run's is taken where
a stage would have nobody otherwise, or by a server that nothing else fits. Who has announced its stage a moment earlier
is counted as if it were still a candidate (as long as it has trained nothing), so that it does not matter in which
order the announcements are seen. What they choose who have not seen all is corrected before the first round (see
`placement`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from shoal.ids import PeerId, StageIndex
from shoal.swarm.microbatch_cut import EVAL_SAMPLES
from shoal.swarm.view import Candidate, Replica, SwarmView


class Files(IntEnum):
    """What of a replica lies in files on the disk of its server, where memory is short. The more, the slower it is."""

    NOTHING = 0
    VECTORS = 1  # what rounds and checkpoints need, and no step
    MOMENTS = 2  # also what the inner optimizer knows, which each step reads and writes


@dataclass(frozen=True, slots=True)
class StageNeed:
    """Memory that a replica of a stage needs, the same for everybody who computes it.

    Attributes:
        device_bytes: of the device that computes, always.
        step_bytes: of the device, for each open step: its gradients.
        open_bytes: of the device, while any step is open.
        sample_bytes: likewise, for each sample of a microbatch: activations of all that are in flight.
        further_bytes: of the device, for each microbatch that a step has in flight beside those of the window.
        further_sample_bytes: likewise, for each of its samples.
        max_further: the most of these that a step ever has.
        eval_sample_bytes: of the device, for each sample that is evaluated: steps wait meanwhile.
        host_bytes: of the host, always.
        round_bytes: of the host, while averaging: then no step is open.
        file_bytes: of `host_bytes` and, while averaging, of `round_bytes`: what may lie in files instead.
        round_file_bytes: likewise of `round_bytes`; the vector that is averaged is in memory then, and only then.
        moment_bytes: of `device_bytes`, where that is the host: what may lie in files too.
        disk_bytes: that files of all these take at most.
        max_samples: of the largest microbatch.
        min_samples: of the smallest microbatches into which a step may be cut: replicas take a limited number of them.
        max_steps: that a replica ever has open.
    """

    device_bytes: int
    step_bytes: int = 0
    open_bytes: int = 0
    sample_bytes: int = 0
    further_bytes: int = 0
    further_sample_bytes: int = 0
    max_further: int = 0
    eval_sample_bytes: int = 0
    host_bytes: int = 0
    round_bytes: int = 0
    file_bytes: int = 0
    round_file_bytes: int = 0
    moment_bytes: int = 0
    disk_bytes: int = 0
    max_samples: int = 1
    min_samples: int = 1
    max_steps: int = 1

    def of(
        self,
        server: Candidate,
        cap: int | None,
        steps: int = 1,
        further: int = 0,
        files: Files = Files.NOTHING,
    ) -> tuple[int, int]:
        """Return the bytes that the stage needs of the server's host and of its device.

        A server without a device of its own (`device_memory_bytes` 0) needs all of its host.

        Args:
            cap: the most samples in a microbatch; None: any number.
            steps: that are open at the same time.
            further: microbatches that each of these has in flight beside those of the window.
            files: what does not lie in memory.
        """
        host_bytes = self.host_bytes - (self.file_bytes if files else 0)
        round_bytes = self.round_bytes - (self.round_file_bytes if files else 0)
        device_bytes = self.device_bytes - (self.moment_bytes if files is Files.MOMENTS else 0)
        samples = self.max_samples if cap is None else min(cap, self.max_samples)
        evaluated = EVAL_SAMPLES if cap is None else min(cap, EVAL_SAMPLES)
        activation_bytes = max(samples * self.sample_bytes, evaluated * self.eval_sample_bytes)
        further_bytes = steps * further * (self.further_bytes + samples * self.further_sample_bytes)
        busy_bytes = steps * self.step_bytes + self.open_bytes + activation_bytes + further_bytes
        if server.device_memory_bytes:
            # What of these is on its way from or to the device lies beside it.
            return host_bytes + round_bytes + further_bytes, device_bytes + busy_bytes
        return host_bytes + device_bytes + max(busy_bytes, round_bytes), 0

    def files_of(self, server: Candidate) -> Files:
        """Return what has to lie in files for the stage to fit into the server's memory; all that may, if it does not
        fit even so.

        Files are rather taken than smaller microbatches, and these rather than moments in files.
        """
        has_disk = 0 < self.disk_bytes <= server.free_disk_bytes
        if not has_disk or self.fits(server, server.max_microbatch_samples):
            return Files.NOTHING
        # What a device has of its own is in no file.
        if server.device_memory_bytes or self._fits_somehow(server, Files.VECTORS):
            return Files.VECTORS
        return Files.MOMENTS

    def _fits_somehow(self, server: Candidate, files: Files) -> bool:
        """Whether the memory suffices with what the server's user lets it take, or with the smallest microbatches."""
        caps = (server.max_microbatch_samples, *self._caps(server)[:1])
        return any(self.fits(server, cap, files=files) for cap in caps)

    def cap_of(self, server: Candidate) -> int | None:
        """Return the most samples in a microbatch with which the stage fits into the memory of a server that it
        `fits_cut`: what the server's user says where that fits. None: any number."""
        files, cap = self.files_of(server), server.max_microbatch_samples
        if self.fits(server, cap, files=files):
            return cap
        caps = self._caps(server)
        return caps[bisect_left(caps, True, key=lambda samples: not self.fits(server, samples, files=files)) - 1]

    def steps_of(self, server: Candidate, cap: int | None) -> int:
        """Return how many steps a server that the stage fits with this cap may have open: one at least."""
        files = self.files_of(server)
        return next((steps for steps in range(self.max_steps, 1, -1) if self.fits(server, cap, steps, files=files)), 1)

    def further_of(self, server: Candidate, cap: int | None, steps: int) -> int:
        """Return how many microbatches each of so many open steps may have in flight beside those of the window.

        They may take half of what is left: nobody waits for them, the allocator has its own share, and others'
        snapshots are kept there too. Where nobody knows how much memory there is, none.
        """
        if not server.free_memory_bytes and not server.device_memory_bytes:
            return 0
        files, more = self.files_of(server), range(1, self.max_further + 1)
        return bisect_left(more, True, key=lambda further: not self.fits(server, cap, steps, 2 * further, files))

    def fits_whole(self, server: Candidate) -> bool:
        """Whether the server's memory suffices with microbatches as large as its user lets them be, if need be with
        files for what no step needs."""
        files = self.files_of(server)
        return files is not Files.MOMENTS and self.fits(server, server.max_microbatch_samples, files=files)

    def fits_cut(self, server: Candidate) -> bool:
        """Whether the server's memory suffices, if need be with smaller microbatches than its user lets them be, or
        with all in files that may lie there."""
        return self._fits_somehow(server, self.files_of(server))

    def _caps(self, server: Candidate) -> range:
        """Return the caps that cut a step, and into no more microbatches than replicas take."""
        most = max(self.max_samples, EVAL_SAMPLES)
        cap = server.max_microbatch_samples
        return range(self.min_samples, (most if cap is None else min(cap, most)) + 1)

    def fits(
        self, server: Candidate, cap: int | None, steps: int = 1, further: int = 0, files: Files = Files.NOTHING
    ) -> bool:
        """Whether the server's memory suffices, for what `of` is asked; what is not known is taken to be enough."""
        host_bytes, device_bytes = self.of(server, cap, steps, further, files)
        fits_host = not server.free_memory_bytes or host_bytes <= server.free_memory_bytes
        return fits_host and device_bytes <= server.device_memory_bytes


class Crowd(NamedTuple):
    """Whom a server finds at a stage: all others, and those of its own machine. Less is better, in this order: the
    weakest stage is as fast as the whole swarm; and when a machine dies no stage should lose all replicas with it."""

    others: int
    beside: int


class Crowds:
    """Who stands where."""

    def __init__(self, num_stages: int, places: Iterable[tuple[Candidate, int]]) -> None:
        self.counts = [0] * num_stages
        self._machines: dict[frozenset[str], Counter[int]] = {}
        for server, stage in places:
            self.add(server.hosts, stage)

    def add(self, hosts: frozenset[str], stage: int) -> None:
        """A server of this machine takes a stage."""
        self.counts[stage] += 1
        self._machines.setdefault(hosts, Counter())[stage] += 1

    def beside(self, hosts: frozenset[str]) -> Counter[int]:
        """Return how many servers of this machine each stage has."""
        found = Counter[int]()
        for names, counts in self._machines.items():
            if names & hosts:
                found.update(counts)
        return found


def assign(view: SwarmView, num_stages: int, needs: Sequence[StageNeed] = ()) -> dict[PeerId, StageIndex]:
    """Return the stage of every server that is still free to choose.

    Args:
        needs: memory that each stage needs; a server that says it has less does not take it. Empty: any fits.

    Returns:
        A stage for each candidate and for each replica that is not pinned and has trained nothing yet. A candidate
        that no stage fits is left out.
    """
    settled = [r for r in view.replicas if r.pinned or _has_trained(r)]
    movable = [r for r in view.replicas if not (r.pinned or _has_trained(r))]
    assigned = _assigned(settled, [*view.candidates, *movable], num_stages, needs)
    if all(assigned.get(replica.peer) == replica.stage for replica in movable):
        return assigned
    # Somebody who was counted on has left, or chose by another view: what is announced counts, not what should be.
    return {r.peer: r.stage for r in movable} | _assigned(view.replicas, view.candidates, num_stages, needs)


def fitting_stages(
    server: Candidate, num_stages: int, needs: Sequence[StageNeed], *, cut: bool
) -> tuple[StageIndex, ...]:
    """Return the stages that a server's memory suffices for; with `cut` also those that need smaller microbatches."""
    return tuple(
        StageIndex(s)
        for s in range(num_stages)
        if not needs or (needs[s].fits_cut(server) if cut else needs[s].fits_whole(server))
    )


def _has_trained(replica: Replica) -> bool:
    # Not `serving` alone: the first servers of a start serve before the last have chosen, who would then count anew.
    return replica.serving and (replica.step > 0 or replica.base_round > 0)


def _assigned(
    settled: Sequence[Replica], choosers: Sequence[Candidate], num_stages: int, needs: Sequence[StageNeed]
) -> dict[PeerId, StageIndex]:
    """Give each chooser a stage that it takes whole; smaller microbatches are the second choice, see above."""
    whole = _fill(settled, choosers, num_stages, needs)
    already = {replica.stage for replica in settled}
    hosted = already | set(whole.values())
    if len(whole) < len(choosers) or len(hosted) < min(num_stages, len(already) + len(choosers)):
        cut = _fill(settled, choosers, num_stages, needs, cut=True)
        if len(already | set(cut.values())) > len(hosted):
            return cut
    placed = [Replica(c.hop, c.join_unix_s, stage=whole[c.peer]) for c in choosers if c.peer in whole]
    rest = [c for c in choosers if c.peer not in whole]
    return whole | _fill([*settled, *placed], rest, num_stages, needs, cut=True)


def _fill(
    settled: Sequence[Replica],
    choosers: Iterable[Candidate],
    num_stages: int,
    needs: Sequence[StageNeed],
    *,
    cut: bool = False,
) -> dict[PeerId, StageIndex]:
    """Give each chooser, the most constrained and then the oldest first, the stage that needs it most."""
    crowds = Crowds(num_stages, ((replica, replica.stage) for replica in settled if replica.stage < num_stages))
    fitting = [(chooser, fitting_stages(chooser, num_stages, needs, cut=cut)) for chooser in choosers]
    # Of stages that need a server equally, the one comes first that the fewest choosers could host.
    num_fitting = {s: sum(s in stages for _, stages in fitting) for s in range(num_stages)}
    assigned: dict[PeerId, StageIndex] = {}
    for chooser, stages in sorted(fitting, key=lambda found: (len(found[1]), found[0].seniority)):
        if not stages:
            continue
        beside = crowds.beside(chooser.hosts)
        stage = min(stages, key=lambda s: (Crowd(crowds.counts[s], beside[s]), num_fitting[s], s))
        crowds.add(chooser.hosts, stage)
        assigned[chooser.peer] = stage
    return assigned
