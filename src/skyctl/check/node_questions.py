"""Questions to a node, answered by one task that serves until the session ends (``check_task``)."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from typing import Any

from skyctl.agent.task_events import read_as_json
from skyctl.agent.task_orders import write_order, write_request
from skyctl.check.check_answers import ANSWERS
from skyctl.check.check_orders import CheckRequest, ServeOrder
from skyctl.errors import NodeError
from skyctl.remote.agent_session import Session
from skyctl.remote.remote_task import RemoteTask, translate_task_failure

CHECK_TASK = "skyctl.check.check_task"


class NodeQuestions:
    """The questions of one node; its task is started at the first one. For one thread at a time."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._task: RemoteTask | None = None
        self._ids = count()

    def ask(self, request_of: Callable[[int], CheckRequest], timeout_s: float) -> dict[str, Any]:
        """One question, and the fields of its answer.

        Args:
            request_of: the request with that number.

        Raises:
            SkyctlError: the task failed, the node is lost, or no answer in time.
        """
        name = self.session.node.name
        if self._task is None:
            order = write_order(ServeOrder())
            self._task = self.session.start_task(CHECK_TASK, order, name="check", needs_ack=False)
        number = next(self._ids)
        request = request_of(number)
        self._task.send(write_request(request))
        deadline = time.monotonic() + timeout_s
        while (event := self._task.recv(max(0.0, deadline - time.monotonic()))) is not None:
            message = event[0]
            if message.get("event") == "answer" and message.get("id") == number:
                return read_as_json(ANSWERS[request.kind], message, name)
            if message.get("event") in ("error", "exit"):
                raise translate_task_failure(self.session.node, message)
        raise NodeError(f"node {name} did not answer within {timeout_s:g} s", node=name)

    def close(self) -> None:
        """Ends the task on its node, without waiting."""
        if self._task is not None and not self._task.ended:
            self._task.kill()
