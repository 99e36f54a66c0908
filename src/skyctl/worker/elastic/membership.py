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
from skyctl.worker.elastic.agreement import BEFORE_ALL, WITNESS, Agreement, OwnWork
from skyctl.worker.elastic.member_lines import MemberLines
from skyctl.worker.member_messages import (
    Chosen,
    Commit,
    Digests,
    Generation,
    Heard,
    Knock,
    MemberMessage,
    Prepare,
    Promise,
    Ranges,
    StatePart,
    generations_in,
    shares_fault,
)
from skyctl.worker.peer import Peer

_KNOCK_S = 0.5
"""From one time that a rank asks to be let in to the next."""
_KEPT_STEPS = 32
_LEAST_STEPS = 3
"""Before so many steps were made it is not known how long one takes."""


class Membership:
    """One rank's membership in a run whose members may leave.

    Args:
        rank: this one's.
        first: the first generation; None: this rank wants to join.
        microbatches: of a step.
        peers: by rank, the lines to all others of that generation; of one that joins, to all members.
        pipelines: by rank, the first rank of its pipeline.
        ask_witness: sends a message to the witness; None: there is none.
        on_change: called with a generation's number once its sums can't take effect any more: what waits
            for them is to end. It must return at once, and so must ``on_new``.
        on_new: called with a generation that has new members, where this rank is to give them weights.
        least: fewer pipelines than these do not go on.
        is_dynamic: shares follow the pipelines' paces.
        on_part: called with each part of a state that comes, and its bytes; may raise PeerProtocolError.

    Attributes:
        left: how many of the step's own microbatches this rank has still to make.
        pace_s: seconds that it takes for one; None: not known yet.
    """

    def __init__(
        self,
        rank: int,
        first: Generation | None,
        microbatches: int,
        peers: Mapping[int, Peer],
        *,
        pipelines: Mapping[int, int],
        ask_witness: Callable[[MemberMessage], None] | None,
        on_change: Callable[[int], None],
        least: int = 1,
        is_dynamic: bool = False,
        on_part: Callable[[int, StatePart, bytes], None] = lambda _rank, _part, _data: None,
        on_new: Callable[[Generation], None] = lambda _generation: None,
    ) -> None:
        self._on_new, self._newest = on_new, BEFORE_ALL
        self._rank, self._ask_witness, self._on_change = rank, ask_witness, on_change
        self.left, self._least, self._on_part = 0, least, on_part
        self._pipelines, self._microbatches = dict(pipelines), microbatches
        self.pace_s: float | None = None
        self._changed = threading.Condition(threading.RLock())
        self._agreement = Agreement(
            rank,
            first,
            microbatches,
            self._own_work,
            pipelines=pipelines,
            has_witness=ask_witness is not None,
            is_dynamic=is_dynamic,
        )
        self._step_times: deque[float] = deque(maxlen=_KEPT_STEPS)
        self._stepped_at: float | None = None
        self._begun = -1
        self._interrupted = BEFORE_ALL
        self._missing: set[int] = set()
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
    def held(self) -> Ranges:
        """The microbatches that this rank's pipeline makes of the next step to take effect, in that order."""
        with self._changed:
            return self._agreement.held

    @property
    def is_first(self) -> bool:
        """Whether this rank's pipeline was the first one when the last step took effect."""
        with self._changed:
            return self._agreement.is_first

    # --- joining

    def admit(self, rank: int, peer: Peer) -> None:
        """A rank that wants to join has connected."""
        with self._changed:
            self._pipelines.setdefault(rank, rank)
        self._lines.add(rank, peer)

    def join(self, pace_s: float | None, limit_s: float) -> Generation:
        """Waits until this rank is a member; returns the generation.

        Args:
            pace_s: seconds that it is expected to take for a microbatch; None: as others do.

        Raises:
            RunError: the members did not let it in within ``limit_s``.
        """
        deadline = time.monotonic() + limit_s
        with self._changed:
            self._missing = set(self._pipelines) - {self._rank}
            while self._agreement.generation.number == BEFORE_ALL:
                missing = self._missing - self._lines.lost
                for rank in self._pipelines.keys() - {self._rank}:
                    self._lines.send(rank, Knock(pace_s, is_known=not missing))
                self._changed.wait(_KNOCK_S)
                if self._lines.lost >= self._pipelines.keys() - {self._rank}:
                    raise RunError(f"no member is left that could let rank {self._rank} in")
                if time.monotonic() > deadline:
                    raise RunError(f"the members did not let rank {self._rank} in within {limit_s:.0f} s")
            self._check()
            return self._agreement.generation

    def look(self, limit_s: float) -> Generation:
        """The newest generation, once something has come, or ``limit_s`` is over. Raises as ``vote``."""
        with self._changed:
            self._changed.wait(limit_s)
            self._check()
            return self._agreement.generation

    def has_state(self) -> None:
        """This rank has been given all weights of its generation's first step."""
        with self._changed:
            self._agreement.is_new = False

    def begin_step(self, step: int) -> None:
        """All steps before that one are applied."""
        with self._changed:
            self._begun = step
            self._changed.notify_all()

    def wait_begun(self, generation: Generation) -> bool:
        """Waits until this rank is at the first step of the generation; False: there is a newer one."""
        with self._changed:
            while self.generation.number == generation.number and self._begun < generation.first_step:
                self._changed.wait()
            return self.generation.number == generation.number

    def send_part(self, rank: int, part: StatePart, data: bytes) -> bool:
        """Gives a new member a part of its state; whether it has left."""
        return self._lines.send_part(rank, part, data)

    def is_current(self, number: int) -> bool:
        """Whether a sum of that generation can still take effect."""
        with self._changed:
            return number == self._agreement.generation.number and self._agreement.may_vote

    def vote(self, number: int, step: int, digests: Digests, pace_s: float | None = None) -> bool:
        """This rank has the whole sum of a step: waits until it takes effect, or is to be made again.

        Args:
            number: of the generation in which it was summed.
            digests: by group, of the sum's bytes.
            pace_s: seconds that this rank took for a microbatch of the step; None: it made none.

        Returns:
            Whether it takes effect.

        Raises:
            RunError: the members that are left may not go on, or their sums differ.
        """
        agreement = self._agreement
        with self._changed:
            if number == agreement.generation.number and agreement.committed < step:
                agreement.vote(digests, pace_s)
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
            self._check()
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

    def _receive(self, rank: int, message: MemberMessage | None, data: bytes = b"") -> None:
        if isinstance(message, StatePart):
            self._on_part(rank, message, data)
        for generation in () if message is None else generations_in(message):
            if (fault := generation.fault(self._pipelines, self._microbatches)) is not None:
                raise PeerProtocolError(f"rank {rank} proposes a generation, but {fault}", peer_rank=rank)
        if isinstance(message, Commit) and message.shares is not None:
            fault = shares_fault(message.shares.values(), self._microbatches)
            heads = {self._pipelines[member] for member in self.generation.members}
            if fault is not None or not message.shares.keys() >= heads:
                raise PeerProtocolError(f"rank {rank} deals shares that are none", peer_rank=rank)
        if isinstance(message, Promise) and any(stop > self._microbatches for _, stop in message.held):
            raise PeerProtocolError(f"rank {rank} makes microbatches that there are not", peer_rank=rank)
        with self._changed:
            told = [message] if isinstance(message, Chosen | Prepare) else []
            if any(map(self._agreement.lacks_sum, (one for text in told for one in generations_in(text)))):
                raise PeerProtocolError(
                    f"rank {rank} says that all have a sum, and this rank has not", peer_rank=rank
                )
            if rank != WITNESS:
                self._agreement.hear(rank)
            if isinstance(message, Heard):
                self._missing.discard(rank)
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
        given_up = agreement.generation.number - (agreement.may_vote and not agreement.is_cut_off)
        if given_up > self._interrupted:
            self._interrupted = given_up
            self._on_change(given_up)
        generation = agreement.generation
        if generation.number > self._newest:
            self._newest = generation.number
            if generation.new and self._rank in generation.holders:
                self._on_new(generation)
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
            stages = sum(head == self._pipelines[self._rank] for head in self._pipelines.values())
            why = "they did not hear it in time" if stages == 1 else "not all of its pipeline is left"
            raise RunError(f"the others go on without rank {self._rank}: {why}")
        pipelines = {self._pipelines.get(member, member) for member in agreement.generation.members}
        if len(pipelines) < self._least:
            raise RunError(
                f"{len(pipelines)} of the pipelines that hold all layers are left, and {self._least} are "
                "asked for (--min-pipelines)"
            )
        if agreement.is_cut_off:
            raise RunError(
                f"rank {self._rank} and those that it reaches are not more than half of "
                f"{len(agreement.generation.members)} members: the others may go on"
            )

    def _own_work(self) -> OwnWork:
        return OwnWork(self.left, self.pace_s)

    def _usual_step_s(self) -> float | None:
        times = list(self._step_times)
        return median(times) if len(times) >= _LEAST_STEPS else None
