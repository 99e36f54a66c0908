"""The launcher, as a device that is measured sees it."""

from __future__ import annotations


class Alone:
    """There is no other device: what is measured counts at once, and then it is over."""

    def __init__(self, count_s: float | None = 0.0) -> None:
        self.calls: list[str] = []
        self._count_s = count_s

    def progress(self, done: int, of: int, what: str) -> None: ...

    def passed(self) -> None:
        self.calls.append("passed")

    def count_s(self) -> float | None:
        return self._count_s

    def measured(self) -> None:
        self.calls.append("measured")

    def stopped(self) -> bool:
        return True
