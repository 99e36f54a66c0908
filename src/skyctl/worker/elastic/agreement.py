"""How ranks agree on which of them make steps together, and on whether a step's sum takes effect.

**Commit.** A rank that has the whole sum of a step votes for it at the arbiter, the generation's first
member. With the votes of all members, and one digest, the arbiter says so to all, and each applies it.

**Change.** Once ranks don't reach each other, those that would be left agree on the next generation: its
members, and whether the step under way is applied (all of them have its sum) or its sum is made again. That
is one round of Paxos (Lamport, *Paxos Made Simple*, 2001), in which the members of the generation before are
the acceptors. So of two halves only one can go on, and where an update was applied before somebody left, all
others apply it, too: it had everybody's vote. A rank that has promised to leave a generation votes no more in
it, and commits nothing. With an even number of members a *witness* is one acceptor more: it decides between
two halves.

Members are whole pipelines: where a stage is lost, its pipeline's other ranks agree on the change, and leave.

**Joining.** A rank that wants to be a member says so to all (``Knock``), and once each has answered, the next
generation has it. The arbiter begins that change as a step takes effect. A member without weights makes no
microbatches, and no step takes effect before it has them, for it has a vote.

``Agreement`` does no I/O and knows no clock. It is told what has come (``handle``), whom this rank has heard
from (``hear``) and whom it has lost (``lose``); what is to be sent lies in ``outbox``. A rank that ends is
lost for good: what acceptors know need not survive their processes. Needs the standard library only.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from skyctl.agent.message_fields import write_fields
from skyctl.transport.transfer_errors import PeerProtocolError
from skyctl.worker.elastic.acceptor import Acceptor
from skyctl.worker.elastic.microbatch_shares import Paces
from skyctl.worker.elastic.next_generation import drifted_in, next_generation
from skyctl.worker.member_messages import (
    Accept,
    Accepted,
    Ballot,
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
    Refused,
    StatePart,
    Trouble,
    Vote,
)

MOST_EARLY_BYTES = 1 << 20
"""Of one rank's messages of later generations, as JSON, that are kept until these are known."""
WITNESS = -1
"""Stands for the witness among the ranks that messages go to and come from."""
BEFORE_ALL = -1
"""The number of no generation: of a rank that is no member yet."""
Edge = tuple[int, int]


@dataclass(frozen=True)
class OwnWork:
    """How far a rank is with the step it is at. The fields: as of ``Promise``."""

    left: int
    pace_s: float | None


@dataclass
class _Round:
    """One attempt of a candidate to have a generation chosen."""

    ballot: Ballot
    live: frozenset[int]
    asks_witness: bool
    promises: dict[int, Promise] = field(default_factory=dict)
    proposed: Generation | None = None
    accepted: set[int] = field(default_factory=set)

    @property
    def voters(self) -> frozenset[int]:
        """Whose answers are waited for."""
        return self.live | {WITNESS} if self.asks_witness else self.live


class Agreement:
    """One rank's part.

    Attributes:
        generation: the newest that is known to be chosen.
        committed: the last step whose sum takes effect; one before the first: none has.
        is_first: whether this rank's pipeline was the first one when that was agreed on.
        held: the microbatches of the step after it that this rank's pipeline makes, in that order.
        shares: by the first rank of each pipeline, its microbatches of the steps after that.
        is_new: this rank has no weights yet.
        outbox: (rank, message) to be sent, in order.
        drifted: ranks whose sums of a step differ from the arbiter's; then nothing is committed any more.
        is_cut_off: this rank and those that it reaches may not go on, as the others may.
        is_left_out: the others go on without this rank.

    Args:
        rank: this one's number.
        generation: the first one; None: this rank is none of its members, and wants to join.
        pipelines: by rank, the first rank of its pipeline; those that join later are pipelines of their own.
        microbatches: of a step.
        own_work: what this rank has of the step it is at.
        has_witness: whether there is one.
        is_dynamic: the arbiter deals shares anew where members' paces have changed.
    """

    def __init__(
        self,
        rank: int,
        generation: Generation | None,
        microbatches: int,
        own_work: Callable[[], OwnWork],
        *,
        pipelines: Mapping[int, int],
        has_witness: bool = False,
        is_dynamic: bool = False,
    ) -> None:
        self.is_new = self._is_waiting = generation is None
        generation = generation or Generation(BEFORE_ALL, (rank,), {rank: (0, 0)})
        self.shares = generation.shares
        self._paces = Paces() if is_dynamic else None
        self.rank, self.generation = rank, generation
        self._microbatches, self._own_work, self._has_witness = microbatches, own_work, has_witness
        self._pipelines = {rank: rank, **pipelines}
        self._head = self._pipelines[rank]
        self.committed, self.is_first = generation.step - 1, self._is_first_in(generation)
        self.held = self._share()
        self._digests: Digests | None = None
        self._waiting: dict[int, float | None] = {}
        self._knocking: set[int] = set()
        self.outbox: deque[tuple[int, MemberMessage]] = deque()
        self.drifted: tuple[int, ...] = ()
        self.is_cut_off = self.is_left_out = False
        self._acceptor = Acceptor()
        self._lost: set[int] = set()
        self._edges: set[Edge] = set()
        self._in_trouble = False
        self._unsettled: set[int] = set()
        self._asked: tuple[int, Prepare] | None = None
        self._round: _Round | None = None
        self._rounds_begun = 0
        self._votes: dict[int, Vote] = {}
        self._early: list[tuple[int, MemberMessage]] = []
        self._early_bytes: dict[int, int] = {}

    # --- what this rank does

    @property
    def may_vote(self) -> bool:
        """Whether sums of this generation can still take effect."""
        return not (self._acceptor.has_promised(self.generation.number) or self.is_left_out)

    @property
    def step(self) -> int:
        """The step whose sum is the next to take effect."""
        return self.committed + 1

    def vote(self, digests: Digests, pace_s: float | None = None) -> None:
        """This rank has the whole sum of its step; arguments as of ``Vote``."""
        if not self.may_vote:
            return
        self._digests = digests
        self._send(self.generation.arbiter, Vote(self.generation.number, self.step, digests, pace_s))

    def fail(self, number: int) -> None:
        """The sum in generation ``number`` can't end, for a reason other than a rank that is lost."""
        if number == self.generation.number:
            self._worry(())

    # --- what this rank hears

    def hear(self, rank: int) -> None:
        """A sign of life has come from that rank."""
        self._unsettled.discard(rank)
        self._consider()

    def lose(self, rank: int) -> None:
        """This rank does not reach that one any more, for good."""
        if rank in self._lost:
            return
        self._lost.add(rank)
        self._unsettled.discard(rank)
        if rank in self.generation.members:
            self._worry([_edge(self.rank, rank)])

    def handle(self, sender: int, message: MemberMessage) -> None:
        """Takes in a message; what does not belong to this generation is answered, kept or dropped.

        Raises:
            PeerProtocolError: its sender has sent too much of generations that are not known here.
        """
        if sender in self._lost:
            return
        if self._is_waiting:
            self._wait_for_place(sender, message)
            if self._is_waiting:
                return
        if isinstance(message, Heard | StatePart):
            return
        if isinstance(message, Knock):
            self._let_in(sender, message)
            return
        if isinstance(message, Prepare):
            self._enter(message.base)
        elif isinstance(message, Chosen):
            self._enter(message.generation)
            return
        if message.number > self.generation.number:
            self._keep(sender, message)
            if isinstance(message, Trouble):  # the sender then tells what was chosen meanwhile
                self._send(sender, Trouble(self.generation.number, tuple(sorted(self._edges))))
            return
        if message.number < self.generation.number:
            if isinstance(message, Trouble | Prepare):
                self._send(sender, Chosen(self.generation))
            return
        if isinstance(message, Vote):
            self._count(sender, message)
        elif isinstance(message, Commit):
            if sender == self.generation.arbiter and self.may_vote:
                self._commit(message)
        elif isinstance(message, Trouble):
            self._worry(message.edges)
        elif isinstance(message, Prepare):
            if self._asked is None or message.ballot > self._asked[1].ballot:
                self._asked = sender, message
            self._worry(message.edges)
        elif isinstance(message, Promise):
            self._take_promise(sender, message)
        elif isinstance(message, Accept):
            if self._acceptor.accept(message.number, message.ballot, message.generation):
                self._send(sender, Accepted(message.number, message.ballot))
            else:
                self._send(sender, Refused(message.number, self._acceptor.promised))
        elif isinstance(message, Accepted):
            self._take_accepted(sender, message)
        elif self._round is not None and message.promised > self._round.ballot:
            self._rounds_begun = max(self._rounds_begun, message.promised[0])
            self._round = None
            self._consider()

    def _keep(self, sender: int, message: MemberMessage) -> None:
        """Keeps a message until its generation is known."""
        nbytes = self._early_bytes.get(sender, 0) + len(json.dumps(write_fields(message)))
        if nbytes > MOST_EARLY_BYTES:
            raise PeerProtocolError(
                f"rank {sender} sends {nbytes} bytes of generations that nobody has agreed on, and "
                f"{MOST_EARLY_BYTES} are kept",
                peer_rank=sender,
            )
        self._early.append((sender, message))
        self._early_bytes[sender] = nbytes

    # --- joining

    def _let_in(self, rank: int, knock: Knock) -> None:
        if rank in self.generation.members:
            return
        self._waiting[rank] = knock.pace_s
        self._pipelines.setdefault(rank, rank)
        if knock.is_known:
            self._knocking.add(rank)
        else:
            self._send(rank, Heard())

    def _wait_for_place(self, sender: int, message: MemberMessage) -> None:
        """As a rank that wants to join: looks for a generation that it is in."""
        told = [message.base if isinstance(message, Prepare) else None]
        told.append(message.generation if isinstance(message, Chosen) else None)
        found = [generation for generation in told if generation and self.rank in generation.members]
        if found:
            self._is_waiting = False
            self._enter(found[0])
        elif not isinstance(message, Chosen | Heard | Knock | StatePart):
            self._keep(sender, message)

    def admit(self) -> None:
        """As the arbiter, as a step takes effect: those that have knocked are to be members."""
        knocking, self._knocking = self._knocking - self._lost, set()
        if knocking and self.rank == self.generation.arbiter:
            self._worry(())

    # --- votes

    def _count(self, sender: int, vote: Vote) -> None:
        """As the arbiter: with everybody's vote the step is committed."""
        members = self.generation.members
        if self.rank != self.generation.arbiter or sender not in members or not self.may_vote:
            return
        self._votes[sender] = vote
        votes = [self._votes.get(member) for member in members]
        if any(other is None or other.step != vote.step for other in votes):
            return
        self.drifted = drifted_in({rank: self._votes[rank].digests for rank in members})
        if not self.drifted:
            shares = None
            if self._paces is not None:
                told = self._by_pipeline({rank: self._votes[rank].pace_s for rank in members})
                shares = self._paces.deal_anew(told, self.shares, self._microbatches)
            for member in members:
                self._send(member, Commit(self.generation.number, vote.step, shares))

    def lacks_sum(self, generation: Generation) -> bool:
        """Whether a generation says that all members have a sum which this one has not: a lie."""
        if not generation.is_applied or self.is_new or self.rank not in generation.members:
            return False
        return self.step < generation.step or (self.step == generation.step and self._digests is None)

    def _commit(self, commit: Commit) -> None:
        if commit.step == self.step and self._digests is not None:  # else this rank has not voted for it
            self.committed, self._digests = commit.step, None
            self.is_first = self._is_first_in(self.generation)
            self.shares = self.shares if commit.shares is None else commit.shares
            self.held = self._share()
            self.admit()

    # --- the next generation

    def _worry(self, edges: Iterable[Edge]) -> None:
        """The generation must be followed by another; says so to all that don't know all of it."""
        if self.is_left_out:
            return
        members = set(self.generation.members)
        new = {edge for edge in edges if members.issuperset(edge)} - self._edges
        if new or not self._in_trouble:
            self._in_trouble = True
            self._edges |= new
            accused = {rank for edge in new for rank in edge}
            self._unsettled |= accused - self._lost - {self.rank}
            trouble = Trouble(self.generation.number, tuple(sorted(self._edges)))
            for member in sorted(members - self._lost - {self.rank}):
                self._send(member, trouble)
        self._consider()

    def _live(self) -> frozenset[int]:
        """The members that would be left: as few as can be leave, so that all others reach each other.

        If this rank reaches none of them, it goes by those that it does reach.
        """
        members = set(self.generation.members)
        live = self._without_edges(members)
        return live if self.rank in live or live - self._lost else self._without_edges(members - self._lost)

    def _without_edges(self, ranks: set[int]) -> frozenset[int]:
        """Those ranks without the ones that most edges end at; of equals the higher rank goes first."""
        live = set(ranks)
        edges = {edge for edge in self._edges if ranks.issuperset(edge)}
        while edges:
            count = {rank: sum(rank in edge for edge in edges) for rank in live}
            worst = max(live, key=lambda rank: (count[rank], rank))
            live.remove(worst)
            edges = {edge for edge in edges if worst not in edge}
        return frozenset(live)

    def _consider(self) -> None:
        """Answers a candidate, or is one, once it is known of every accused rank whether it is there."""
        if not self._in_trouble or self._unsettled or self.is_left_out:
            return
        self._answer()
        live = self._live()
        if self.rank not in live or self.rank != min(live):
            return
        if self._round is not None and self._round.live == live:
            return
        members = len(self.generation.members)
        asks_witness = self._has_witness and 2 * len(live) == members
        is_half = 2 * len(live) <= members and not asks_witness
        is_settled = self.committed >= self.generation.first_step
        new = set[int]() if is_settled else set(self.generation.new)
        self.is_cut_off = is_half or not self._whole(live - new)
        if self.is_cut_off:
            return
        self._begin_round(live, asks_witness=asks_witness)

    def _begin_round(self, live: frozenset[int], *, asks_witness: bool) -> None:
        self._rounds_begun = max(self._rounds_begun, self._acceptor.promised[0]) + 1
        ballot = (self._rounds_begun, self.rank)
        self._round = _Round(ballot, live, asks_witness)
        prepare = Prepare(self.generation, ballot, tuple(sorted(self._edges)))
        for voter in sorted(self._round.voters):
            self._send(voter, prepare)

    def _answer(self) -> None:
        if self._asked is None:
            return
        (sender, prepare), self._asked = self._asked, None
        number, ballot = prepare.number, prepare.ballot
        if not self._acceptor.prepare(number, ballot):
            self._send(sender, Refused(number, self._acceptor.promised))
            return
        work = self._own_work()
        promise = replace(
            self._acceptor.promise(number, ballot),
            step=self.step,
            digests=self._digests,
            held=self.held,
            left=work.left,
            pace_s=work.pace_s,
            edges=tuple(sorted(self._edges)),
            is_new=self.is_new,
            waiting=tuple(sorted(self._waiting.keys() - self._lost)),
        )
        self._send(sender, promise)

    def _take_promise(self, sender: int, promise: Promise) -> None:
        self._worry(promise.edges)
        attempt = self._round
        if attempt is None or promise.ballot != attempt.ballot or sender not in attempt.voters:
            return
        attempt.promises[sender] = promise
        if attempt.proposed is None and attempt.promises.keys() == attempt.voters:
            attempt.proposed = self._proposal(attempt)
            if attempt.proposed is None:
                self.is_cut_off = True
                return
            accept = Accept(self.generation.number, attempt.ballot, attempt.proposed)
            for voter in sorted(attempt.voters):
                self._send(voter, accept)

    def _proposal(self, attempt: _Round) -> Generation | None:
        """The generation accepted already, by the highest ballot; else what follows from the promises.

        None: nobody who has weights is left.
        """
        accepted = [
            (promise.accepted_ballot, promise.accepted)
            for promise in attempt.promises.values()
            if promise.accepted is not None and promise.accepted_ballot is not None
        ]
        if accepted:
            return max(accepted, key=lambda pair: pair[0])[1]
        promises = {rank: p for rank, p in attempt.promises.items() if rank != WITNESS}
        whole = {rank: promises[rank] for rank in self._whole(promises)}
        if all(promise.is_new for promise in whole.values()):
            return None
        joining = set(self._waiting).intersection(*(promise.waiting for promise in promises.values()))
        return next_generation(
            self.generation.number + 1,
            whole,
            self._microbatches,
            self._pipelines,
            {rank: self._waiting[rank] for rank in joining},
        )

    def _take_accepted(self, sender: int, accepted: Accepted) -> None:
        attempt = self._round
        if attempt is None or attempt.proposed is None or accepted.ballot != attempt.ballot:
            return
        attempt.accepted.add(sender)
        if attempt.accepted >= attempt.voters:
            self._enter(attempt.proposed)

    def _enter(self, generation: Generation) -> None:
        """A generation is chosen: this rank takes its place in it, or learns that it is left out."""
        if generation.number <= self.generation.number:
            return
        before, self.generation = self.generation, generation
        for rank in sorted({*before.members, *generation.members} - self._lost - {self.rank}):
            self._send(rank, Chosen(generation))  # who told this one may leave before it tells all
        self._round, self._asked, self._votes = None, None, {}
        self._edges, self._unsettled, self._in_trouble, self.is_cut_off = set(), set(), False, False
        for rank in generation.members:
            self._waiting.pop(rank, None)
            self._knocking.discard(rank)
            self._pipelines.setdefault(rank, rank)
        if self.rank not in generation.members:
            self.is_left_out = True
            return
        self._digests, self.shares = None, generation.shares
        if generation.is_applied:
            self.committed, self.is_first = generation.step, self._is_first_in(generation)
            self.held = self._share()
        else:
            if self.committed < generation.step - 1:
                self.committed, self.is_first = generation.step - 1, self._is_first_in(before)
            self.held = generation.held.get(self._head, ())
        early, self._early, self._early_bytes = self._early, [], {}
        for sender, message in early:
            self.handle(sender, message)
        if gone := [rank for rank in self.generation.members if rank in self._lost]:
            self._worry([_edge(self.rank, rank) for rank in gone])

    # --- pipelines

    def _is_first_in(self, generation: Generation) -> bool:
        return self._pipelines.get(generation.arbiter) == self._head

    def _share(self) -> Ranges:
        first, stop = self.shares[self._head]
        return ((first, stop),) if first < stop else ()

    def _whole(self, ranks: Collection[int]) -> list[int]:
        """Those of the ranks whose pipelines are there in full."""
        torn = {head for rank, head in self._pipelines.items() if rank not in ranks}
        return sorted(rank for rank in ranks if self._pipelines[rank] not in torn)

    def _by_pipeline(self, told: Mapping[int, float | None]) -> dict[int, float | None]:
        """By first rank, the pace of each pipeline: of its slowest stage; None: not all of them know it."""
        paces: dict[int, float | None] = {}
        for rank, pace_s in told.items():
            head = self._pipelines[rank]
            so_far = paces.get(head, 0.0)
            paces[head] = None if so_far is None or pace_s is None else max(so_far, pace_s)
        return paces

    def _send(self, rank: int, message: MemberMessage) -> None:
        """A message to itself is taken in at once, behind what is being taken in."""
        self.outbox.append((rank, message))


def _edge(one: int, other: int) -> Edge:
    return (min(one, other), max(one, other))
