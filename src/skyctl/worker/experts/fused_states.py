"""A rank's optimizer states of fused experts: by expert while hosts hold these, and together again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from skyctl.workload.hf.fused_experts import FusedExpert
from skyctl.workload.mixed_precision import master_of
from skyctl.workload.workload import Workload


class FusedStates:
    """The states of some fused experts, in an optimizer that makes no step.

    Each state is of weights that are updated one by one, so its rows are the experts' own.

    Attributes:
        by_expert: the optimizer over the experts' own parameters.

    Args:
        modules: each module's experts, in their order.
        whole: the optimizer over the modules' parameters.
    """

    def __init__(
        self,
        modules: Iterable[tuple[nn.Module, list[FusedExpert]]],
        workload: Workload,
        whole: torch.optim.Optimizer,
    ) -> None:
        self._whole = whole
        self._parts: list[tuple[nn.Parameter, list[nn.Parameter]]] = []
        every = []
        for module, experts in modules:
            for name, parameter in module.named_parameters():
                own = [expert.fused.get_parameter(name) for expert in experts]
                self._parts.append((master_of(parameter), list(map(master_of, own))))
                every += own
        self.by_expert = workload.optimizer(every)

    def split(self) -> None:
        """Gives each expert its rows of the states, in the same memory."""
        for whole, parts in self._parts:
            for place, part in enumerate(parts):
                if state := self._whole.state.get(whole):
                    self.by_expert.state[part] = {
                        key: value[place : place + 1] if _has_rows(value, whole) else _copy(value)
                        for key, value in state.items()
                    }

    def join(self) -> None:
        """Makes the whole states those of the experts.

        They share the count of steps: the largest is taken, where an expert that came back has made fewer.
        """
        for whole, parts in self._parts:
            states = [self.by_expert.state.get(part) or {} for part in parts]
            known = [state for state in states if state]
            if not known:
                continue
            joined: dict[str, Any] = {}
            for key, value in known[0].items():
                if _has_rows(value, parts[0]):
                    joined[key] = torch.cat([state.get(key, torch.zeros_like(value)) for state in states])
                else:
                    joined[key] = _copy(max(state[key] for state in known))
            self._whole.state[whole] = joined
            for place, state in enumerate(states):
                state |= {
                    key: joined[key][place : place + 1]
                    for key, value in state.items()
                    if _has_rows(value, parts[place])
                }


def _has_rows(value: object, parameter: nn.Parameter) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
