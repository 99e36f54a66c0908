"""A rank's membership: with whom it makes steps, what it votes for, and what has been agreed on.

``Agreement`` decides; this gives it what comes over ``MemberLines``, sends what it says, and lets the thread
that trains wait for what follows.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median

from skyctl.errors import RunError
from skyctl.transport.transfer_errors import PeerProtocolError
from skyctl.worker.elastic.agreement import WITNESS, Agreement, OwnWork
from skyctl.worker.elastic.member_lines import MemberLines
from skyctl.worker.member_messages import (
    Commit,
    Generation,
    MemberMessage,
    generations_in,
    shares_fault,
)
from skyctl.worker.peer import Peer

_KEPT_STEPS = 32
_LEAST_STEPS = 3
"""Before so many steps were made it is not known how long one takes."""


class Membership:
    """One rank's membership in a run whose members may leave.

    Args:
        rank: this one's.
        first: the first generation.
        microbatches: of a step.
        peers: by rank, the lines to all others of that generation.
        ask_witness: sends a message to the witness; None: there is none.
        on_change: called with a generation's number once its sums can't take effect any more: what waits
            for them is to end. It must return at once.
        least: fewer members than these do not go on.
        is_dynamic: shares follow the members' paces.

    Attributes:
        left: how many of the step's own microbatches this rank has still to make.
        pace_s: seconds that it takes for one; None: not known yet.
    """

    def __init__(
        self,
        rank: int,
        first: Generation,
        microbatches: int,
        peers: Mapping[int, Peer],
        *,
        ask_witness: Callable[[MemberMessage], None] | None,
        on_change: Callable[[int], None],
        least: int = 1,
        is_dynamic: bool = False,
    ) -> None:
        self._rank, self._ask_witness, self._on_change = rank, ask_witness, on_change
        self.left, self._least = 0, least
        self._ranks, self._microbatches = first.members, microbatches
        self.pace_s: float | None = None
        self._changed = threading.Condition(threading.RLock())
        self._agreement = Agreement(
            rank,
            first,
            microbatches,
            self._own_work,
            has_witness=ask_witness is not None,
            is_dynamic=is_dynamic,
        )
        self._step_times: deque[float] = deque(maxlen=_KEPT_STEPS)
        self._stepped_at: float | None = None
        self._interrupted = -1
        self._lines = MemberLines(peers, self._receive, self._lose, self._usual_step_s)

    def start(self) -> None:
        """Begins to listen to the others."""
        self._lines.start()

    def leave(self) -> None:
        """The last step has taken effect: nobody is missed any more, and lines may end."""
        self._lines.stop_missing()

    def close(self) -> None:
        """Leaves: the others are to go on without this rank. Idempotent."""
        self._lines.close()

    @property
    def generation(self) -> Generation:
        """The newest generation that is agreed on."""
        with self._changed:
            return self._agreement.generation

    @property
    def held(self) -> frozenset[int]:
        """The microbatches that this rank makes of the step whose sum is the next to take effect."""
        with self._changed:
            return frozenset(self._agreement.held)

    def is_current(self, number: int) -> bool:
        """Whether a sum of that generation can still take effect."""
        with self._changed:
            return number == self._agreement.generation.number and self._agreement.may_vote

    def vote(self, number: int, step: int, digest: str, pace_s: float | None = None) -> bool:
        """This rank has the whole sum of a step: waits until it takes effect, or is to be made again.

        Args:
            number: of the generation in which it was summed.
            digest: of the sum's bytes, 32 hexadecimal digits.
            pace_s: seconds that this rank took for a microbatch of the step; None: it made none.

        Returns:
            Whether it takes effect.

        Raises:
            RunError: the members that are left may not go on, or their sums differ.
        """
        agreement = self._agreement
        with self._changed:
            if number == agreement.generation.number and agreement.committed < step:
                agreement.vote(digest, pace_s)
                self._flush()
            while agreement.committed < step and number == agreement.generation.number:
                self._check()
                self._changed.wait()
            self._check()
            if agreement.committed < step:
                return False
            now = time.monotonic()
            if self._stepped_at is not None:
                self._step_times.append(now - self._stepped_at)
            self._stepped_at = now
            return True

    def wait_change(self, number: int) -> None:
        """The sum of that generation can't end: waits for the generation that follows.

        Raises:
            RunError: as ``vote``.
        """
        with self._changed:
            self._agreement.fail(number)
            self._flush()
            while number == self._agreement.generation.number:
                self._check()
                self._changed.wait()
            self._check()

    def take_witness(self, message: MemberMessage) -> None:
        """The witness has answered."""
        self._receive(WITNESS, message)

    def lose(self, rank: int) -> None:
        """That rank can't be reached for sums, though it may give signs of life."""
        self._lines.lose(rank)

    # --- what comes

    def _receive(self, rank: int, message: MemberMessage | None) -> None:
        for generation in () if message is None else generations_in(message):
            if (fault := generation.fault(self._ranks, self._microbatches)) is not None:
                raise PeerProtocolError(f"rank {rank} proposes a generation, but {fault}", peer_rank=rank)
        if isinstance(message, Commit) and message.shares is not None:
            fault = shares_fault(message.shares.values(), self._microbatches)
            if fault is not None or not message.shares.keys() >= set(self.generation.members):
                raise PeerProtocolError(f"rank {rank} deals shares that are none", peer_rank=rank)
        with self._changed:
            if rank != WITNESS:
                self._agreement.hear(rank)
            if message is not None:
                self._agreement.handle(rank, message)
            self._flush()

    def _lose(self, rank: int) -> None:
        with self._changed:
            self._agreement.lose(rank)
            self._flush()

    def _flush(self) -> None:
        """Sends what the agreement says. Under the lock."""
        agreement = self._agreement
        while agreement.outbox:
            rank, message = agreement.outbox.popleft()
            if rank == self._rank:
                agreement.handle(rank, message)
            elif rank == WITNESS:
                assert self._ask_witness is not None
                self._ask_witness(message)
            else:
                self._lines.send(rank, message)
        given_up = agreement.generation.number - agreement.may_vote
        if given_up > self._interrupted:
            self._interrupted = given_up
            self._on_change(given_up)
        self._changed.notify_all()

    def _check(self) -> None:
        agreement = self._agreement
        if agreement.drifted:
            ranks = ", ".join(map(str, agreement.drifted))
            raise PeerProtocolError(
                f"the sum of step {agreement.step} is not the same on rank {ranks} as on rank "
                f"{agreement.generation.arbiter}",
                peer_rank=agreement.drifted[0],
            )
        if agreement.is_left_out:
            raise RunError(f"the others go on without rank {self._rank}: they did not hear it in time")
        if len(agreement.generation.members) < self._least:
            raise RunError(
                f"{len(agreement.generation.members)} of the ranks that hold all layers are left, and "
                f"{self._least} are asked for (--min-pipelines)"
            )
        if agreement.is_cut_off:
            raise RunError(
                f"rank {self._rank} and those that it reaches are not more than half of "
                f"{len(agreement.generation.members)} members: the others may go on"
            )

    def _own_work(self) -> OwnWork:
        return OwnWork(self.left, self.pace_s)

    def _usual_step_s(self) -> float | None:
        return median(self._step_times) if len(self._step_times) >= _LEAST_STEPS else None
