"""The keys over which ranks find each other: each is set by one rank, and told to all that wait for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from skyctl.worker.rank_events import KeyWantedEvent, StoredEvent
from skyctl.worker.rank_requests import StoredRequest


class KeyExchange:
    """The keys of one attempt, or of one pipeline that generates. It does no I/O.

    Whether a rank may set or ask for a key is for the caller to check first (``rank_messages``).
    """

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._waiting: dict[str, list[int]] = defaultdict(list)

    def has(self, key: str) -> bool:
        """Whether a rank has set it."""
        return key in self._values

    def answers(self, rank: int, event: StoredEvent | KeyWantedEvent) -> Iterator[tuple[int, StoredRequest]]:
        """Takes in what a rank sets or asks for; gives (rank, request) for each rank to be told now."""
        if isinstance(event, StoredEvent):
            self._values[event.key] = event.value
            for other in self._waiting.pop(event.key, []):
                yield other, StoredRequest(event.key, event.value)
        elif event.key in self._values:
            yield rank, StoredRequest(event.key, self._values[event.key])
        else:
            self._waiting[event.key].append(rank)
