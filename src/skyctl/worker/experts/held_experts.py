"""The experts of a layer as modules: how they are numbered, and one of them with its optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from skyctl.checkpoint.node.shards import ShardStamp, StageState
from skyctl.experts.routed import RoutedExperts
from skyctl.worker.updates.lr_scheduler import LearningRateScheduler
from skyctl.workload.hf.fused_experts import FusedExpert
from skyctl.workload.mixed_precision import master_of
from skyctl.workload.optimizers import make_users_lr_scheduler
from skyctl.workload.recipe import Recipe
from skyctl.workload.workload import Workload

ExpertKey = tuple[int, int]
"""The workload layer, and the expert's number among all that the layer holds."""


@dataclass(frozen=True)
class LayerExperts:
    """The ``RoutedExperts`` of one workload layer.

    Attributes:
        modules: in the order of ``named_modules()``.
        experts: of all of them, one after the other: their places are the experts' numbers.
    """

    modules: tuple[RoutedExperts, ...]

    @classmethod
    def of(cls, layer: nn.Module) -> LayerExperts:
        """Those that the layer is or holds."""
        return cls(tuple(module for module in layer.modules() if isinstance(module, RoutedExperts)))

    @property
    def experts(self) -> list[nn.Module]:
        return [module.expert(n) for module in self.modules for n in range(module.count)]

    @property
    def features(self) -> list[int]:
        """Of each expert, the width of its tokens."""
        return [module.features for module in self.modules for _ in range(module.count)]

    def alone(self, number: int) -> nn.Module:
        """One of the experts, in memory of its own."""
        module, first = next(pair for pair in self.numbered() if number < pair[1] + pair[0].count)
        return module.expert(number - first, alone=True)

    def numbered(self) -> Iterator[tuple[RoutedExperts, int]]:
        """Each module, with the number of its first expert."""
        first = 0
        for module in self.modules:
            yield module, first
            first += module.count


def expert_stamp(workload: Workload, key: ExpertKey, step: int) -> ShardStamp:
    """The stamp that an expert's state has on its way between a rank and a host."""
    layer, number = key
    return ShardStamp(
        run_id="",
        step=step,
        layer=layer,
        name=f"{workload.names[layer]}, expert {number}",
        layers=workload.layers,
        workload=workload.digest,
        dtype=workload.spec.dtype,
        seed=workload.spec.seed,
    )


class HeldExpert:
    """An expert on its host, with an optimizer of its own, as the workload makes it.

    Args:
        features: the width of its tokens.
        epoch: how often it was placed before.
        done: so many steps are done.
    """

    def __init__(
        self,
        module: nn.Module,
        workload: Workload,
        recipe: Recipe,
        steps: int,
        *,
        features: int,
        epoch: int,
        done: int,
    ) -> None:
        self.module, self.features, self.epoch = module, features, epoch
        parameters = list(dict.fromkeys(module.parameters()))
        self.trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._optimizer = workload.optimizer(parameters) if parameters else None
        self._scheduler = LearningRateScheduler(
            self._optimizer if self.trained else None,
            recipe,
            done,
            lambda optimizer: make_users_lr_scheduler(workload.model, optimizer, recipe, steps),
        )
        self.state = StageState([module], self._optimizer, master_of, skip=self._scheduler.options)

    @torch.no_grad()
    def update(self, gradients: Sequence[Sequence[Tensor | None]]) -> None:
        """One step of its optimizer, with the sum of these gradients.

        Args:
            gradients: of each rank, in the ranks' order, the sum of its gradients by trained parameter.
        """
        for place, parameter in enumerate(self.trained):
            total: Tensor | None = None
            for part in gradients:
                if (own := part[place]) is not None:
                    total = own if total is None else total + own
            master = master_of(parameter)
            if total is None and isinstance(self.module, FusedExpert):
                total = torch.zeros_like(master)  # the parameter of all experts has a gradient in each step
            master.grad = total
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        self._scheduler.advance()
