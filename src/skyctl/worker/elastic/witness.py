"""The witness: one acceptor more, which makes no steps. The launcher is it, where one is wanted."""

from __future__ import annotations

from skyctl.worker.elastic.acceptor import Acceptor
from skyctl.worker.member_messages import Accepted, Refused
from skyctl.worker.rank_events import WitnessAskedEvent
from skyctl.worker.rank_requests import WitnessRequest


class QuorumWitness:
    """Answers ranks in the order in which they ask; the same questions anew give the same answers."""

    def __init__(self) -> None:
        self._acceptor = Acceptor()

    def answer(self, asked: WitnessAskedEvent) -> WitnessRequest:
        """The answer to the rank that has asked."""
        acceptor = self._acceptor
        if (prepare := asked.prepare) is not None:
            if acceptor.prepare(prepare.number, prepare.ballot):
                return WitnessRequest(promise=acceptor.promise(prepare.number, prepare.ballot))
            return WitnessRequest(refused=Refused(prepare.number, acceptor.promised))
        accept = asked.accept
        assert accept is not None, "one of both"
        if acceptor.accept(accept.number, accept.ballot, accept.generation):
            return WitnessRequest(accepted=Accepted(accept.number, accept.ballot))
        return WitnessRequest(refused=Refused(accept.number, acceptor.promised))
