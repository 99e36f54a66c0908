"""Which checkpoints no node may prune, so that one is always in copies, however slowly copies come. Pure.

Nodes keep the last few steps. Where copying one takes longer than writing those, no step would ever be in
copies: each is pruned before its last layer has arrived. So one step at a time is copied to its end, and the
one before it is kept until then.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass
class Pins:
    """One run's.

    ``newest``: the newest step that every rank has written. ``whole``: the newest of whose layers other nodes
    have copies, of all. ``copying``: the one that is to be next. ``alone``: no node copies from another.
    ``before``: what an earlier supervisor has left pinned; kept until something is whole.
    """

    layers: int
    alone: bool = True
    newest: int | None = None
    whole: int | None = None
    copying: int | None = None
    before: frozenset[int] = frozenset()
    _copied: dict[int, set[int]] = field(default_factory=dict)

    @property
    def steps(self) -> list[int]:
        """Those to keep."""
        known = {step for step in (self.whole, self.copying, self.newest) if step is not None}
        return sorted(known | self.before if self.whole is None else known)

    def written(self, step: int) -> None:
        """Every rank has written its layers after so many steps."""
        self.newest = step
        if self.copying is None or self.alone:
            self._next()

    def copied(self, step: int, layers: Collection[int]) -> None:
        """Another node has taken these layers of that step."""
        self._copied.setdefault(step, set()).update(layers)
        if step == self.copying:
            self._next()

    def failed(self) -> None:
        """A node can't copy from another. The step it was at is not waited for."""
        self.copying = None
        self._next()

    def restarted(self, step: int | None) -> None:
        """Another attempt goes on from that step: what is newer is gone."""
        self.newest = self.whole = step
        self.copying = None
        self._copied.clear()

    def _next(self) -> None:
        """What was copied is whole; then it is the newest one's turn."""
        if self.alone:
            self.whole, self.copying = self.newest, None
            return
        for step in (self.copying, self.newest):
            if step is None or (self.whole is not None and step <= self.whole):
                continue
            if len(self._copied.get(step, ())) < self.layers:
                self.copying = step
                return
            self.whole, self.copying = step, None
            self._copied = {known: had for known, had in self._copied.items() if known > step}
