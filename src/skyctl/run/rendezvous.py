"""The store over which an attempt's ranks find each other, kept by the launcher: no port is open for it."""

from __future__ import annotations

from collections import defaultdict

from skyctl.agent.task_orders import write_request
from skyctl.remote.remote_task import RemoteTask
from skyctl.worker.rank_events import KeyWantedEvent, StoredEvent
from skyctl.worker.rank_requests import StoredRequest


class Rendezvous:
    """The keys that ranks have set, each its own alone (``rank_messages``), and those that they wait for."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._waiting: dict[str, list[RemoteTask]] = defaultdict(list)

    def take(self, task: RemoteTask, event: StoredEvent | KeyWantedEvent) -> None:
        """Keeps what a rank's task sets, and tells those that wait for it."""
        if isinstance(event, StoredEvent):
            self._values[event.key] = event.value
            told = self._waiting.pop(event.key, [])
        elif event.key in self._values:
            told = [task]
        else:
            self._waiting[event.key].append(task)
            return
        for one in told:
            one.send(write_request(StoredRequest(event.key, self._values[event.key])))
