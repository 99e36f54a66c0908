"""What lies between two uses of some values in training: other layers, which take them out of the caches.

For what is measured on its own: weight gradients that come later, and optimizers. Taking more out than
training does makes small layers look slower than they are (docs/decisions.md).
"""

from __future__ import annotations

import torch

ELSEWHERE_BYTES = 1 << 20
"""A tenth of a millisecond to read."""


class Elsewhere:
    """Reads something else, on a CPU; on an accelerator nothing is done."""

    def __init__(self, device: str) -> None:
        on_cpu = torch.device(device).type == "cpu"
        self._values = torch.ones(ELSEWHERE_BYTES // 4) if on_cpu else None

    def __call__(self) -> None:
        if self._values is not None:
            self._values.sum()
