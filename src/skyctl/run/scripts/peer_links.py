"""Which nodes reach each other: whom rank 0 may be on, and whether a node that is not heard is gone.

**Unreachable is not dead.** A node that this machine does not hear may train on with its peers, so they are
asked: each node listens as long as the script runs, and any other can try to connect to it.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from skyctl.check.check_orders import ConnectRequest, ListenRequest, PeerPort
from skyctl.check.node_questions import NodeQuestions
from skyctl.errors import NodeError, SkyctlError
from skyctl.remote.agent_session import Session

ANSWER_S = 30.0
CONNECT_S = 3.0
"""How long one node tries to connect to another."""
HINT = "skyctl check shows which nodes reach each other, and what to do"


class PeerLinks:
    """Tasks on the nodes of a script that answer each other. ``close`` ends them.

    Args:
        addresses: by node, where its peers reach it.

    Raises:
        SkyctlError: a node does not answer, or can't listen at its address.
    """

    def __init__(self, sessions: Mapping[str, Session], addresses: Mapping[str, str]) -> None:
        self._nodes = {name: NodeQuestions(sessions[name]) for name in addresses}
        self._locks = {name: threading.Lock() for name in addresses}
        self._ports: dict[str, PeerPort] = {}
        self._asked: dict[str, list[Future[bool | None]]] = {}
        self._pool = ThreadPoolExecutor(max_workers=len(self._nodes), thread_name_prefix="links")
        try:
            self._ports = dict(self._pool.map(lambda item: self._listen(*item), addresses.items()))
        except BaseException:
            self.close()
            raise

    def reached_by_all(self, order: Sequence[str]) -> str:
        """The first node in that order that every other one can connect to.

        Raises:
            NodeError: there is none; it names who can't connect to whom, and why.
        """
        tried = self._pool.map(lambda name: self._try(name, order), order)
        answers = dict(zip(order, tried, strict=True))
        for name in order:
            if all("error" not in answers[other][name] for other in order if other != name):
                return name
        failed = [
            f"{source} can't connect to {target}: {result['error']}"
            for source, results in answers.items()
            for target, result in results.items()
            if "error" in result
        ]
        raise NodeError(
            f"no node is reached by all others, and rank 0 has to be on one that is: {'; '.join(failed[:4])}",
            node=order[0],
            hint=HINT,
        )

    def ask(self, sources: Sequence[str], target: str) -> None:
        """Asks each source whether it can connect to a node; ``answers`` has what they said, later."""
        self._asked[target] = [self._pool.submit(self._reaches, source, target) for source in sources]

    def answers(self, target: str) -> list[bool | None]:
        """The answers of all that were asked for that node, once; empty as long as one is awaited.

        None: that one does not say.
        """
        asked = self._asked.get(target, [])
        if not all(answer.done() for answer in asked):
            return []
        self._asked.pop(target, None)
        return [answer.result() for answer in asked]

    def forget(self, target: str) -> None:
        """Drops what was asked for that node: it is heard again."""
        self._asked.pop(target, None)

    def _reaches(self, source: str, target: str) -> bool | None:
        try:
            return "error" not in self._try(source, [target]).get(target, {"error": ""})
        except SkyctlError:
            return None

    def close(self) -> None:
        """Ends the tasks, without waiting."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for questions in self._nodes.values():
            with suppress(SkyctlError, OSError):
                questions.close()

    def _listen(self, name: str, address: str) -> tuple[str, PeerPort]:
        secret = secrets.token_hex(16)
        answer = self._nodes[name].ask(partial(ListenRequest, address=address, secret=secret), ANSWER_S)
        if answer.get("port") is None:
            raise NodeError(
                f"node {name} can't listen at its address {address}: {answer.get('error')}",
                node=name,
                hint=f"name another interface with `interface:` of node {name!r} in cluster.yaml",
            )
        return name, PeerPort(address, answer["port"], secret)

    def _try(self, source: str, targets: Sequence[str]) -> dict[str, dict[str, Any]]:
        peers = {name: self._ports[name] for name in targets if name != source}
        if not peers:
            return {}
        request = partial(ConnectRequest, peers=peers, wait_s=CONNECT_S)
        with self._locks[source]:  # two nodes may be asked for at once
            results: dict[str, dict[str, Any]] = self._nodes[source].ask(request, ANSWER_S)["results"]
        return {name: results.get(name, {"error": "no answer"}) for name in peers}
