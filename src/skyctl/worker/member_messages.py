"""The ranks that make steps together, and the messages by which they agree on who that is.

Each change makes a new *generation*: its members, and who makes which microbatches. A message carries the
number of the generation that it belongs to. Needs the standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from skyctl.agent.message_fields import Index, Matches, MaxLength, Seconds, Sha256, Within
from skyctl.worker.rank_order import IndexRange, Ranks

Ballot = tuple[Index, Index]
"""Of a proposal: its round, and the rank that makes it. Higher ones win."""
Edges = Annotated[tuple[tuple[Index, Index], ...], MaxLength(10_000)]
"""Pairs of ranks that don't reach each other, the lower one first."""
Ranges = Annotated[tuple[IndexRange, ...], MaxLength(10_000)]
"""Microbatches of a step, by their numbers."""
Digest = Annotated[str, Matches("[0-9a-f]{32}")]
Digests = Mapping[int, Digest]
"""By group that is summed."""


@dataclass(frozen=True)
class Generation:
    """The ranks that make steps together.

    Attributes:
        number: generations are numbered from 0.
        members: the ranks, in order. The first one, the *arbiter*, counts votes.
        shares: by the first rank of each pipeline, that pipeline's microbatches [first, stop) of every step
            after ``step``, until a commit has others.
        step: the step that was under way when it was agreed on.
        is_applied: every member has that step's whole sum, and applies it; False: the sum is made again.
        held: by the first rank of each pipeline, the microbatches of ``step`` that it makes, in that order;
            the later ones are of pipelines that have left.
        new: members that have yet to be given weights.
    """

    number: Index
    members: Ranks
    shares: Mapping[int, IndexRange]
    step: Index = 0
    is_applied: bool = False
    held: Mapping[int, Ranges] = field(default_factory=dict)
    new: Ranks = ()

    @property
    def holders(self) -> Ranks:
        """The members that have weights."""
        return tuple(rank for rank in self.members if rank not in self.new)

    @property
    def first_step(self) -> int:
        """The step that members are at once they have taken their places."""
        return self.step + self.is_applied

    @property
    def arbiter(self) -> int:
        """The rank that counts votes."""
        return self.members[0]

    def fault(self, pipelines: Mapping[int, int], microbatches: int) -> str | None:
        """The fault of the generation, as it comes from another rank; None: there is none.

        Args:
            pipelines: by rank, the first rank of its pipeline; of all that there may be.
            microbatches: of a step.
        """
        members = set(self.members)
        if not members or list(self.members) != sorted(members) or not members <= pipelines.keys():
            return f"its members are {self.members}"
        heads = {pipelines[rank] for rank in members}
        if any(head in heads and rank not in members for rank, head in pipelines.items()):
            return "its members are not whole pipelines"
        if not self.holders or not members.issuperset(self.new):
            return f"those who have no weights yet are {self.new}"
        if self.shares.keys() != heads or not self.held.keys() <= heads:
            return "its shares are not of its members"
        if fault := shares_fault(self.shares.values(), microbatches):
            return fault
        held = [one for some in self.held.values() for one in some]
        has_none = not held and (self.is_applied or not self.number)
        return None if has_none else shares_fault(held, microbatches)


def shares_fault(shares: Iterable[IndexRange], microbatches: int) -> str | None:
    """The fault of ranges that share out a step's microbatches; None: there is none, each is in one."""
    end = 0
    for first, stop in sorted(shares):
        if first > stop or (first < stop and first != end):
            return f"its shares are not of {microbatches} microbatches"
        end = max(end, stop)
    return None if end == microbatches else f"its shares are not of {microbatches} microbatches"


@dataclass(frozen=True)
class Vote:
    """To the arbiter: this rank has the whole sum of that step.

    Attributes:
        digests: by group, of its sum's bytes.
        pace_s: seconds that it took for a microbatch of the step; None: it made none, or does not tell.
    """

    kind: ClassVar[str] = "vote"
    number: Index
    step: Index
    digests: Digests
    pace_s: Seconds | None = None


@dataclass(frozen=True)
class Commit:
    """From the arbiter: all members have the same sum of that step, so it is applied.

    Attributes:
        shares: by the first rank of each pipeline, its microbatches of later steps; None: as before.
    """

    kind: ClassVar[str] = "commit"
    number: Index
    step: Index
    shares: Mapping[int, IndexRange] | None = None


@dataclass(frozen=True)
class Trouble:
    """The sum of a step can't end as it is. ``edges``: who does not reach whom, as far as is known."""

    kind: ClassVar[str] = "trouble"
    number: Index
    edges: Edges = ()


@dataclass(frozen=True)
class Prepare:
    """A candidate asks for what is known, and that nobody votes in ``base`` any more."""

    kind: ClassVar[str] = "prepare"
    base: Generation
    ballot: Ballot
    edges: Edges = ()

    @property
    def number(self) -> int:
        """Of the generation that is to be followed by another."""
        return self.base.number


@dataclass(frozen=True)
class Promise:
    """The answer to ``Prepare``.

    Attributes:
        accepted: the proposal that this rank has accepted already, and its ballot; None: none.
        step: that it is at; None: a witness, which makes no steps.
        digests: of the step's whole sum, if it has that.
        held: the step's microbatches that are its pipeline's, in the order in which they are made.
        left: how many of these it has still to make.
        pace_s: seconds that it takes for one.
        is_new: it has no weights yet.
        waiting: those that want to be members, and that this rank reaches.
    """

    kind: ClassVar[str] = "promise"
    number: Index
    ballot: Ballot
    accepted: Generation | None = None
    accepted_ballot: Ballot | None = None
    step: Index | None = None
    digests: Digests | None = None
    held: Ranges = ()
    left: Index = 0
    pace_s: Seconds | None = None
    edges: Edges = ()
    is_new: bool = False
    waiting: Ranks = ()


@dataclass(frozen=True)
class Accept:
    """A candidate proposes the generation that follows number ``number``."""

    kind: ClassVar[str] = "accept"
    number: Index
    ballot: Ballot
    generation: Generation


@dataclass(frozen=True)
class Accepted:
    """The answer to ``Accept``."""

    kind: ClassVar[str] = "accepted"
    number: Index
    ballot: Ballot


@dataclass(frozen=True)
class Refused:
    """The answer to ``Prepare`` and ``Accept`` of a ballot that is too low. ``promised``: to which one."""

    kind: ClassVar[str] = "refused"
    number: Index
    promised: Ballot


@dataclass(frozen=True)
class Chosen:
    """The generation is agreed on: it follows number ``number``."""

    kind: ClassVar[str] = "chosen"
    generation: Generation

    @property
    def number(self) -> int:
        """Of the generation that it follows."""
        return self.generation.number - 1


@dataclass(frozen=True)
class Knock:
    """From a rank that wants to be a member: it reaches the one that it sends this to.

    Attributes:
        pace_s: seconds that it is expected to take for a microbatch; None: as others do.
        is_known: all members have answered it, so that the next generation can have it.
    """

    kind: ClassVar[str] = "knock"
    pace_s: Seconds | None = None
    is_known: bool = False


@dataclass(frozen=True)
class Heard:
    """The answer to ``Knock``."""

    kind: ClassVar[str] = "heard"


@dataclass(frozen=True)
class StatePart:
    """To a member that has no weights yet: a part of one layer's state; its bytes follow the message.

    Attributes:
        number: of the generation that it is a new member of.
        layer: None: there is one part, and it is what ranks share for their sums.
        bytes: how many follow, 1 at least.
        sha256: of all of the layer's parts, with the last one; None: there are more.
    """

    kind: ClassVar[str] = "state"
    number: Index
    layer: Index | None
    bytes: Annotated[int, Within(1, 1 << 20)]
    sha256: Sha256 | None = None


MemberMessage = (
    StatePart
    | Knock
    | Heard
    | Vote
    | Commit
    | Trouble
    | Prepare
    | Promise
    | Accept
    | Accepted
    | Refused
    | Chosen
)
MEMBER_MESSAGES: tuple[type[MemberMessage], ...] = (
    Vote,
    Commit,
    Trouble,
    Prepare,
    Promise,
    Accept,
    Accepted,
    Refused,
    Chosen,
    Knock,
    Heard,
    StatePart,
)


def generations_in(message: MemberMessage) -> list[Generation]:
    """Those that a message carries."""
    told = (
        getattr(message, "base", None),
        getattr(message, "generation", None),
        getattr(message, "accepted", None),
    )
    return [generation for generation in told if isinstance(generation, Generation)]
