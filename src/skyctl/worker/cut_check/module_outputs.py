"""Which module of a model is the first that gives something else in another trial."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_FAR = 1e-4
"""The output of each module is compared by its norm, which rounding changes by less."""


class ModuleOutputs:
    """Notes, call by call, what the modules without children give; it stays with the modules.

    Args:
        modules: with the prefix of each in the whole model's names, such as ``3.`` or nothing.
    """

    def __init__(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        self._calls: list[tuple[str, float]] = []
        for prefix, root in modules:
            for name, module in root.named_modules():
                if next(module.children(), None) is None:
                    self._note(prefix + name, module)

    def _note(self, name: str, module: nn.Module) -> None:
        def note(_module: nn.Module, _args: object, output: object) -> None:
            tensors = [t.detach() for t in tree_leaves(output) if isinstance(t, Tensor)]
            norms = [float(torch.linalg.vector_norm(t.double())) for t in tensors if not t.is_complex()]
            self._calls.append((name.strip("."), sum(norms)))

        module.register_forward_hook(note)

    def first_other(self, others: ModuleOutputs) -> str | None:
        """The first module, in the order of these calls, of which the others have another output."""
        theirs: dict[str, deque[float]] = defaultdict(deque)
        for name, norm in others._calls:
            theirs[name].append(norm)
        for name, norm in self._calls:
            if not theirs[name]:
                continue  # it has been opened: what it calls is there
            other = theirs[name].popleft()
            if not abs(norm - other) <= _FAR * max(abs(norm), abs(other)):
                return name
        return None
