"""Members that agree over simulated lines: what comes when is drawn at random, and so is who dies."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import dataclass, field
from functools import partial

from skyctl.worker.elastic.acceptor import Acceptor
from skyctl.worker.elastic.agreement import WITNESS, Agreement, OwnWork
from skyctl.worker.elastic.microbatch_shares import even_shares, numbers_in
from skyctl.worker.member_messages import (
    Accept,
    Accepted,
    Generation,
    Knock,
    MemberMessage,
    Prepare,
    Refused,
)

SumId = tuple[int, int]
"""Step and generation in which a sum was made."""


@dataclass
class Member:
    """A rank: computes, sums and applies."""

    agreement: Agreement
    step: int = 0
    generation: int = 0
    is_computed: bool = False
    has_sum: bool = False
    applied: dict[int, SumId] = field(default_factory=dict)
    made: tuple = ()


class Simulation:
    """``members`` ranks that make steps while ``run`` lasts; what happens next is drawn by seed.

    Args:
        stages: so many ranks, one after another, are a pipeline.
    """

    def __init__(
        self,
        seed: int,
        members: int,
        microbatches: int = 8,
        *,
        has_witness: bool = False,
        is_dynamic: bool = False,
        stages: int = 1,
    ) -> None:
        self.stages, self.has_witness, self.is_dynamic = stages, has_witness, is_dynamic
        self.pipelines = {rank: rank - rank % stages for rank in range(members)}
        self.firsts: dict[int, dict[int, bool]] = defaultdict(dict)
        self.draw = random.Random(seed)
        self.microbatches = microbatches
        shares = even_shares(microbatches, dict.fromkeys(self.pipelines.values(), 1.0))
        first = Generation(0, tuple(range(members)), shares)
        self.members = {rank: Member(self._agreement(rank, first)) for rank in range(members)}
        self.witness = Acceptor()
        self.dead: set[int] = set()
        self.isolated: set[int] = set()
        self.cut: set[frozenset[int]] = set()
        self.noticed: set[tuple[int, int]] = set()
        self.lines: dict[tuple[int, int], deque[MemberMessage]] = defaultdict(deque)
        self.contributions: dict[SumId, dict[int, set[int]]] = defaultdict(dict)
        self.sums: dict[int, SumId] = {}
        self.knocked: list[tuple[int, int]] = []

    def _agreement(self, rank: int, first: Generation | None) -> Agreement:
        return Agreement(
            rank,
            first,
            self.microbatches,
            lambda: self._work(rank),
            pipelines=self.pipelines,
            has_witness=self.has_witness,
            is_dynamic=self.is_dynamic,
        )

    def join(self) -> int:
        """Another rank wants to be a member, and has lines to all that there are."""
        rank = max(self.members) + 1
        self.members[rank] = Member(self._agreement(rank, None))
        for other in self.alive():
            if other != rank:
                self.lines[(rank, other)].append(Knock(1.0))
                self.knocked.append((rank, other))
        return rank

    def can_lose(self, rank: int) -> bool:
        """Whether more than half of the newest members are left then, with weights."""
        there = set(self.alive()) - self.isolated
        agreements = [self.members[other].agreement for other in there]
        newest = max((agreement.generation for agreement in agreements), key=lambda g: g.number)
        left = set(newest.members) & there - {rank}
        return 2 * len(left) > len(newest.members) and bool(left - set(newest.new))

    def kill(self, rank: int) -> None:
        self.dead.add(rank)

    def leave(self, rank: int) -> None:
        """It ends: of what it has sent to each of the others, the last messages may never come."""
        self.kill(rank)
        for (sender, _to), queue in self.lines.items():
            for _ in range(self.draw.randint(0, len(queue)) if sender == rank else 0):
                queue.pop()

    def cut_line(self, one: int, other: int) -> None:
        self.cut.add(frozenset((one, other)))

    def isolate(self, ranks: set[int]) -> None:
        for rank in ranks:
            for other in set(self.members) - ranks:
                self.cut_line(rank, other)

    def alive(self) -> list[int]:
        return [rank for rank in self.members if rank not in self.dead]

    def run(self, events: int) -> None:
        for _ in range(events):
            choices = self._choices()
            if not choices:
                return
            self.draw.choice(choices)()

    def least_applied(self, ranks: list[int]) -> int:
        return min(len(self.members[rank].applied) for rank in ranks)

    # --- what may happen next

    def _choices(self) -> list:
        choices = []
        for line, queue in self.lines.items():
            if queue and line[1] not in self.dead and not self._is_cut(line):
                choices.append(lambda line=line: self._deliver(line))
        for rank in self.alive():
            for other in self.members:
                gone = other in self.dead or frozenset((rank, other)) in self.cut
                nothing_comes = not self.lines[(other, rank)] or self._is_cut((other, rank))
                if gone and nothing_comes and (rank, other) not in self.noticed and other != rank:
                    choices.append(partial(self._notice, rank, other))
            choices += self._work_choices(rank)
            agreement = self.members[rank].agreement
            if agreement.is_left_out or agreement.is_cut_off or agreement.drifted:
                choices.append(partial(self.leave, rank))
        if not choices or self.draw.random() < 0.1:
            choices.append(self._beat)
        return choices

    def _beat(self) -> None:
        """Everybody hears from everybody that it reaches; who waits for a place says so again."""
        for rank, other in self.knocked:
            if self.members[rank].agreement.generation.number < 0 and rank not in self.dead:
                self.lines[(rank, other)].append(Knock(1.0, is_known=True))
        for rank in self.alive():
            for other in self.alive():
                if other != rank and (rank, other) not in self.noticed and not self._is_cut((other, rank)):
                    self.members[rank].agreement.hear(other)
            self._flush(rank)

    def _work_choices(self, rank: int) -> list:
        member = self.members[rank]
        agreement = member.agreement
        if agreement.is_left_out or agreement.drifted or agreement.generation.number < 0:
            return []
        if agreement.is_new:
            first = agreement.generation.first_step
            holders = [self.members[holder] for holder in agreement.generation.holders]
            there = all(h.step == first and h.agreement.generation == agreement.generation for h in holders)
            return [lambda: self._get_state(rank, first)] if there else []
        if agreement.committed >= member.step or agreement.generation.number != member.generation:
            return [lambda: self._follow(rank)]
        if not member.is_computed:
            return [lambda: self._compute(rank)]
        if not member.has_sum and self._sum_is_there(member):
            return [lambda: self._sum(rank)]
        return []

    def _get_state(self, rank: int, step: int) -> None:
        member = self.members[rank]
        member.agreement.is_new = False
        member.step, member.generation = step, member.agreement.generation.number
        member.is_computed = member.has_sum = False

    def _compute(self, rank: int) -> None:
        member = self.members[rank]
        member.is_computed = True
        key = member.step, member.generation
        held = member.agreement.held
        assert held[: len(member.made)] == member.made, "a stage has begun with others"
        member.made = held
        self.contributions[key][rank] = held

    def _sum_is_there(self, member: Member) -> bool:
        key = member.step, member.generation
        generation = member.agreement.generation
        return set(generation.members) <= set(self.contributions[key])

    def _sum(self, rank: int) -> None:
        member = self.members[rank]
        member.has_sum = True
        key = member.step, member.generation
        parts = defaultdict(set)
        for other in member.agreement.generation.members:
            parts[self.pipelines.get(other, other)].add(self.contributions[key][other])
        assert all(len(part) == 1 for part in parts.values()), (key, parts)
        made = [n for [part] in parts.values() for first, stop in part for n in range(first, stop)]
        assert sorted(made) == list(range(self.microbatches)), (key, parts)
        pace_s = self.draw.choice([None, 1.0, 2.0, 5.0])
        member.agreement.vote({rank % self.stages: f"{key[0]:016x}{key[1]:016x}"}, pace_s)
        self._flush(rank)

    def _follow(self, rank: int) -> None:
        """Applies what is committed, or begins the step's sum again."""
        member = self.members[rank]
        agreement = member.agreement
        if agreement.committed >= member.step:
            assert member.has_sum, "applies what it has not"
            key = member.step, member.generation
            assert self.sums.setdefault(member.step, key) == key, "two sums of one step took effect"
            member.applied[member.step] = key
            self.firsts[member.step][rank] = agreement.is_first
            member.step += 1
            member.made = ()
        member.generation = agreement.generation.number
        member.is_computed = member.has_sum = False

    def _work(self, rank: int) -> OwnWork:
        member = self.members[rank]
        left = 0 if member.is_computed else len(numbers_in(member.agreement.held))
        return OwnWork(left, 1.0 + rank)

    # --- lines

    def _is_cut(self, line: tuple[int, int]) -> bool:
        return frozenset(line) in self.cut

    def _notice(self, rank: int, other: int) -> None:
        self.noticed.add((rank, other))
        self.members[rank].agreement.lose(other)
        self._flush(rank)

    def _deliver(self, line: tuple[int, int]) -> None:
        sender, rank = line
        message = self.lines[line].popleft()
        if rank == WITNESS:
            self._ask_witness(sender, message)
            return
        agreement = self.members[rank].agreement
        if sender != WITNESS:
            agreement.hear(sender)
        agreement.handle(sender, message)
        self._flush(rank)

    def _ask_witness(self, sender: int, message: MemberMessage) -> None:
        if isinstance(message, Prepare):
            if self.witness.prepare(message.number, message.ballot):
                answer = self.witness.promise(message.number, message.ballot)
            else:
                answer = Refused(message.number, self.witness.promised)
        else:
            assert isinstance(message, Accept)
            if self.witness.accept(message.number, message.ballot, message.generation):
                answer = Accepted(message.number, message.ballot)
            else:
                answer = Refused(message.number, self.witness.promised)
        self.lines[(WITNESS, sender)].append(answer)

    def _flush(self, rank: int) -> None:
        agreement = self.members[rank].agreement
        while agreement.outbox:
            to, message = agreement.outbox.popleft()
            if to == rank:
                agreement.handle(rank, message)
            elif to not in self.dead:
                self.lines[(rank, to)].append(message)
