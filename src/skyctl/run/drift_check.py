"""Whether pipelines side by side still hold the same parameters: compared with each checkpoint.

They start alike and add the same sums, to the last bit; what is left are the last bits of their processors'
optimizers. So sketches are compared with a tolerance: far more than rounding ever comes to, far less than one
update that only one of them has made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from skyctl.run.batch_check import same_tensors
from skyctl.run.rank_spec import RankSpec
from skyctl.worker.rank_events import CheckpointEvent, TensorSketch

TOLERANCE = 5e-3
"""How far a parameter may be apart, as a part of its norm; it is compared in float32."""


class DriftCheck:
    """Warns once of each device whose parameters are not those of the first that holds the layer."""

    def __init__(self, specs: Sequence[RankSpec], warn: Callable[[str], None]) -> None:
        self._specs, self._warn = specs, warn
        self._named: set[int] = set()

    def look(self, events: Mapping[int, CheckpointEvent]) -> None:
        """Compares what the ranks have told of one checkpoint."""
        first: dict[int, tuple[int, tuple[TensorSketch, ...]]] = {}
        for rank, event in sorted(events.items()):
            for layer, sketches in sorted(event.sketches.items()):
                other, expected = first.setdefault(layer, (rank, sketches))
                if rank not in self._named and not same_tensors(expected, sketches, TOLERANCE):
                    self._named.add(rank)
                    here, there = self._specs[rank].device, self._specs[other].device
                    self._warn(
                        f"after {event.step} steps layer {layer} on {here} has drifted from that on {there}, "
                        "which is kept: an optimizer that draws random numbers, or a layer's own state, may "
                        "make their updates differ"
                    )
