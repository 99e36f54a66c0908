"""Which jobs' memory is on a shared device at a time: nobody gets more than there is, nobody is ended. Pure.

A job has *persistent* bytes, which stay while others have their turns (weights, optimizer, what waits between
a forward and its backward), and *ephemeral* ones, which it needs only in its turn. Jobs that take turns share
a lane: of their ephemeral bytes the largest counts. With several at a time each has a lane of its own (Salus,
Yu and Chowdhury 2020, section 3.3: ΣP + Σ over lanes of max E ≤ capacity).

A job that does not fit waits, and comes in as soon as it fits, also before others that have waited for longer
and need more than there is. So a large job may wait for as long as smaller ones come; it is told its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from skyctl.errors import MismatchError


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of one job on the device: those that it keeps, and those that it has in a turn at most."""

    persistent_bytes: float
    ephemeral_bytes: float = 0.0


class MemoryAdmission:
    """The jobs on one device, and those that wait for room.

    Args:
        capacity_bytes: what all of them may have together.
        lanes_are_shared: one of them computes at a time; else each has a lane of its own.
    """

    def __init__(self, capacity_bytes: float, *, lanes_are_shared: bool = True) -> None:
        self.capacity_bytes, self.lanes_are_shared = capacity_bytes, lanes_are_shared
        self._there: dict[str, MemoryNeed] = {}
        self._waiting: dict[str, MemoryNeed] = {}
        self._aside: frozenset[str] = frozenset()

    @property
    def there(self) -> tuple[str, ...]:
        """The jobs that were let in, in that order."""
        return tuple(self._there)

    @property
    def used_bytes(self) -> float:
        """The bytes that those that are there may have together at most."""
        return self._bytes_of(self._there)

    @property
    def is_tight(self) -> bool:
        """Those that are there fit only as none keeps its ephemeral bytes beyond its turn."""
        needs = self._there.values()
        return sum(need.persistent_bytes + need.ephemeral_bytes for need in needs) > self.capacity_bytes

    def ask(self, job_id: str, need: MemoryNeed) -> None:
        """The job waits for room; ``let_in`` lets it in.

        Raises:
            MismatchError: the device could not hold it even alone.
        """
        alone = self._bytes_of({job_id: need})
        if alone > self.capacity_bytes:
            raise MismatchError(
                f"{job_id} needs {alone / 2**30:.3g} GiB, "
                f"and the device has {self.capacity_bytes / 2**30:.3g}",
                hint="a smaller batch, recomputation, or a plan with more devices",
            )
        if job_id not in self._there:
            self._waiting[job_id] = need

    def keep(self, job_id: str, need: MemoryNeed) -> None:
        """The job is there already, whatever there is: it was let in before this began to count."""
        self._waiting.pop(job_id, None)
        self._there[job_id] = need

    def leave(self, job_id: str) -> None:
        """The job is gone, or waits no longer."""
        self._there.pop(job_id, None)
        self._waiting.pop(job_id, None)
        self.take_back(job_id)

    def put_aside(self, job_id: str) -> bool:
        """The job keeps its ephemeral bytes while others have turns; False: there is no room for that."""
        aside, self._aside = self._aside, self._aside | {job_id}
        if self.used_bytes > self.capacity_bytes:
            self._aside = aside
        return job_id in self._aside

    def take_back(self, job_id: str) -> None:
        """The job keeps them no longer."""
        self._aside -= {job_id}

    def let_in(self) -> tuple[str, ...]:
        """Lets in whoever fits, the first ones first; gives those."""
        came = []
        for job_id, need in list(self._waiting.items()):
            if self._bytes_of({**self._there, job_id: need}) <= self.capacity_bytes:
                self._there[job_id] = self._waiting.pop(job_id)
                came.append(job_id)
        return tuple(came)

    def place(self, job_id: str) -> int:
        """Its place among those that wait, from 1; 0: it does not wait."""
        return 1 + list(self._waiting).index(job_id) if job_id in self._waiting else 0

    def _bytes_of(self, needs: Mapping[str, MemoryNeed]) -> float:
        shared = [need.ephemeral_bytes for job_id, need in needs.items() if job_id not in self._aside]
        own = [need.ephemeral_bytes for job_id, need in needs.items() if job_id in self._aside]
        lanes = max(shared, default=0.0) if self.lanes_are_shared else sum(shared)
        return sum(need.persistent_bytes for need in needs.values()) + lanes + sum(own)
