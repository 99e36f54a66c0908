"""The store over which an attempt's ranks find each other, kept by the launcher: no port is open for it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from skyctl.errors import RunError
from skyctl.run.rank_failure import RankState
from skyctl.worker.rank_events import KeyWantedEvent, StoredEvent


class Rendezvous:
    """The keys that ranks have set, and those that they wait for."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[RankState, str]] = {}
        self._waiting: dict[str, list[RankState]] = defaultdict(list)

    def take(self, rank: RankState, event: StoredEvent | KeyWantedEvent) -> None:
        """Keeps what a rank sets, and tells those that wait for it.

        Raises:
            RunError: two ranks say different things, and nothing tells which one is wrong.
        """
        if isinstance(event, KeyWantedEvent):
            if event.key in self._values:
                _tell(rank, event.key, self._values[event.key][1])
            else:
                self._waiting[event.key].append(rank)
            return
        first, value = self._values.setdefault(event.key, (rank, event.value))
        if value != event.value:
            raise RunError(
                f"{first.name} and {rank.name} say different things of {event.key!r:.80}, and nothing tells "
                "which of them is wrong",
                hint=f"leave out one of the nodes {first.spec.node} and {rank.spec.node}: --limit",
            )
        for waiting in self._waiting.pop(event.key, ()):
            _tell(waiting, event.key, value)


def _tell(rank: RankState, key: str, value: str) -> None:
    message: dict[str, Any] = {"op": "stored", "key": key, "value": value}
    rank.task.send(message)
