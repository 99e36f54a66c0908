"""Which of a stage's parameters other stages hold copies of, since layers there share them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from skyctl.errors import RunError
from skyctl.worker.rank_order import SumGroupOrder
from skyctl.workload.shared_parameters import SharedParameter


class StageTies:
    """The trained parameters that a stage shares with layers of other stages.

    Args:
        shared: the model's.
        layers: the stage's, [start, start + len(layers)) of the model.

    Attributes:
        parameters: by the layers that share them, the stage's own copies, in the model's order.
        counted_elsewhere: those whose first layer lies in an earlier stage, which counts them in norms.
    """

    def __init__(self, shared: Sequence[SharedParameter], layers: Sequence[nn.Module], start: int) -> None:
        self.parameters: dict[tuple[int, ...], list[nn.Parameter]] = {}
        self.counted_elsewhere: list[nn.Parameter] = []
        own = range(start, start + len(layers))
        for parameter in shared:
            here = [(layer, name) for layer, name in parameter.uses if layer in own]
            if not here or len(here) == len(parameter.uses) or not parameter.gradient_bytes:
                continue
            layer, name = here[0]
            copy = layers[layer - start].get_parameter(name)
            self.parameters.setdefault(parameter.layers, []).append(copy)
            if parameter.layers[0] not in own:
                self.counted_elsewhere.append(copy)

    def check(self, groups: Sequence[SumGroupOrder], who: str) -> None:
        """Checks that the plan sums the gradients of just these.

        Args:
            groups: those that the rank is in.
            who: what to call the model.

        Raises:
            RunError: copies would part, or the plan names layers that share nothing.
        """
        planned = {group.tie for group in groups if group.tie is not None}
        if planned != self.parameters.keys():
            odd = min(planned ^ self.parameters.keys())
            what = "the plan does not say so" if odd in self.parameters else "only in the plan"
            raise RunError(
                f"{who}: layers {', '.join(map(str, odd))} share parameters over stages: {what}",
                hint="the plan was made for another model: skyctl probe and skyctl plan again",
            )
