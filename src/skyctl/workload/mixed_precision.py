"""Mixed precision: layers in bfloat16 over master weights, gradients and optimizer state in float32.

The arrangement of Micikevicius et al. 2018 (section 3.1) as Megatron-LM has it for bfloat16: forward and
backward run in bfloat16, and a step shorter than a bfloat16 can tell apart is not lost, because the masters
take it. A parameter knows its master, so building layers and an optimizer is enough:

- the gradient of each backward is added to the master's in float32, and dropped;
- the optimizer works on the masters, and after each step the layers' parameters are set from them.

bfloat16 has float32's range, so losses need no scaling.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from skyctl.workload.deferred_init import DispatchMode
from skyctl.workload.structures import Value, map_tensors

_MASTER_ATTRIBUTE = "_skyctl_master"
_WIDE_DTYPES = (torch.float32, torch.float64)


def compute_dtype(name: str) -> torch.dtype | None:
    """The dtype of layers and activations under ``--dtype``; None: they stay as the workload made them."""
    return torch.bfloat16 if name == "bfloat16" else None


def low_precision_ids(layer: nn.Module) -> set[int]:
    """The ids of the layer's parameters and buffers that mixed precision converts to bfloat16.

    Those that ``layer.bfloat16()`` would convert, except in batch norms, whose running means move by less
    than bfloat16 can tell apart, and in modules with an attribute ``keep_float32 = True``.
    """
    kept: set[int] = set()
    low = {id(t) for t in (*layer.parameters(), *layer.buffers()) if t.dtype in _WIDE_DTYPES}
    for module in layer.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) or getattr(module, "keep_float32", False):
            kept.update(id(t) for t in (*module.parameters(), *module.buffers()))
    return low - kept


def to_low_precision(old: Tensor, values: Tensor, dtype: torch.dtype, *, real: bool = True) -> Tensor:
    """``values`` in ``dtype``, as a parameter with a master where ``old`` is a parameter that is trained.

    Args:
        real: False for fake tensors, whose gradients need not reach a master.
    """
    low = values.to(dtype)
    if not isinstance(old, nn.Parameter):
        return low
    parameter = nn.Parameter(low, requires_grad=old.requires_grad)
    if old.requires_grad:
        setattr(parameter, _MASTER_ATTRIBUTE, nn.Parameter(values))
        if real:
            parameter.register_post_accumulate_grad_hook(accumulate_into_master)  # type: ignore[no-untyped-call]
    return parameter


def master_of(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter that the optimizer works on: its float32 master, or itself where it has none."""
    master: nn.Parameter = getattr(parameter, _MASTER_ATTRIBUTE, parameter)
    return master


def part_of(parameter: nn.Parameter, place: int, *, alone: bool) -> nn.Parameter:
    """One place of a parameter's first dimension as a parameter, with a master where that has one.

    Args:
        alone: in memory of its own; else in the parameter's, and the master in the master's.
    """

    def cut(whole: nn.Parameter) -> nn.Parameter:
        rows = whole.data[place : place + 1]
        return nn.Parameter(rows.clone() if alone else rows, requires_grad=whole.requires_grad)

    part, master = cut(parameter), master_of(parameter)
    if master is not parameter:
        setattr(part, _MASTER_ATTRIBUTE, cut(master))
    return part


def accumulate_into_master(parameter: Tensor) -> None:
    """Adds a parameter's gradient to its master's and drops it; does nothing without a master.

    Autograd calls it after each backward; code that sets ``.grad`` by other means must call it.
    """
    master: nn.Parameter | None = getattr(parameter, _MASTER_ATTRIBUTE, None)
    gradient = parameter.grad
    if master is None or gradient is None:
        return
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad.add_(gradient)
    parameter.grad = None


def copy_masters_after_step(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Has the optimizer copy the masters, which it works on, to the parameters after each step."""
    weights = MasterWeights(parameters)
    if weights.low:
        optimizer.register_step_post_hook(lambda *_: weights.refresh())


class MasterWeights:
    """Trained parameters, and the weights that stand for them, which are set together.

    No views are kept: an optimizer or a layer may give a parameter other memory.

    Attributes:
        parameters: those that are trained, each once.
        masters: in their order, what the optimizer works on.
        low: the parameters that have a master of their own.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = [*{id(p): p for p in parameters if p.requires_grad}.values()]
        self.masters: list[Tensor] = [master_of(p) for p in self.parameters]
        self.low: list[Tensor] = [p for p in self.parameters if master_of(p) is not p]
        self._of_low: list[Tensor] = [master_of(p) for p in self.parameters if master_of(p) is not p]

    @torch.no_grad()
    def set(self, values: Sequence[Tensor]) -> None:
        """Gives the masters those values, one each, and their parameters the same."""
        if values:
            torch._foreach_copy_(self.masters, list(values))
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copies masters to the parameters that they stand for."""
        if self.low:
            torch._foreach_copy_(self.low, self._of_low)


class SameDtypeMode(DispatchMode):  # type: ignore[no-untyped-call]
    """Raises for products of two dtypes, as real tensors do; fake ones would let them pass."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "_overloadpacket", None) in _PRODUCTS:
            dtypes = {a.dtype for a in args if isinstance(a, Tensor) and a.is_floating_point()}
            if len(dtypes) > 1:
                names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
                raise RuntimeError(f"a product needs tensors of one dtype, it was given {names}")
        return func(*args, **(kwargs or {}))


_ATEN = torch.ops.aten
_PRODUCTS = frozenset(
    (
        *(_ATEN.mm, _ATEN.addmm, _ATEN.bmm, _ATEN.baddbmm, _ATEN.mv, _ATEN.addmv, _ATEN.convolution),
        *(_ATEN._scaled_dot_product_flash_attention_for_cpu, _ATEN._scaled_dot_product_flash_attention),
    )
)


def cast_value(value: Value, dtype: torch.dtype | None) -> Value:
    """The value with its floating tensors in ``dtype``; None: unchanged."""
    if dtype is None:
        return value
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, value)


def upcast(value: Value) -> Value:
    """The value with its bfloat16 tensors in float32, as a loss needs them."""
    return map_tensors(lambda t: t.float() if t.dtype is torch.bfloat16 else t, value)
