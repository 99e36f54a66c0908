"""An acceptor of Paxos: what it has promised and accepted. Pure."""

from __future__ import annotations

from skyctl.worker.member_messages import Ballot, Generation, Promise

NO_BALLOT: Ballot = (0, 0)


class Acceptor:
    """The promises and acceptances of one acceptor, for the generation that follows number ``number``."""

    def __init__(self) -> None:
        self.number = -1
        self.promised: Ballot = NO_BALLOT
        self.accepted: tuple[Ballot, Generation] | None = None

    def prepare(self, number: int, ballot: Ballot) -> bool:
        """Whether it promises to accept nothing of a lower ballot any more."""
        self._move_to(number)
        if number < self.number or ballot <= self.promised:
            return False
        self.promised = ballot
        return True

    def accept(self, number: int, ballot: Ballot, generation: Generation) -> bool:
        """Whether it accepts the proposal."""
        self._move_to(number)
        if number < self.number or ballot < self.promised:
            return False
        self.promised, self.accepted = ballot, (ballot, generation)
        return True

    def has_promised(self, number: int) -> bool:
        """Whether it has promised anything for that number."""
        return self.number == number and self.promised > NO_BALLOT

    def promise(self, number: int, ballot: Ballot) -> Promise:
        """The answer to a candidate that it has promised to."""
        if self.accepted is None:
            return Promise(number, ballot)
        return Promise(number, ballot, self.accepted[1], self.accepted[0])

    def _move_to(self, number: int) -> None:
        if number > self.number:
            self.number, self.promised, self.accepted = number, NO_BALLOT, None
