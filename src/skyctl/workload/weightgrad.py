"""Weight gradients put off: a backward that gives the inputs' gradients now, and the weights' when asked.

Around a forward, ``WeightGradients`` replaces linear layers, ``torch.addmm`` and convolutions by autograd
functions of the same arithmetic. In the backward that it starts itself these hand on the gradient of their
input and queue the rest; in every other backward (one inside a layer, say) they give all gradients, as
autograd would. Everything else (norms, embeddings, weights that are computed from others or have hooks, what
lies inside a checkpoint) has its weights' gradients in the backward, as always. So the gradients are right
whatever the layers are; only how much can be put off depends on them.

Source: Qi et al. 2023, section 2 (B and W). Knows nothing of stages, schedules or clocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the field's name
from torch.overrides import TorchFunctionMode

from skyctl.errors import WorkloadError
from skyctl.workload.mixed import collect


class _Kind(Protocol):
    """A product of an input and a weight, and its gradients from ``g``, the output's."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...
    def of_input(self, g: Tensor, x: Tensor, weight: Tensor) -> Tensor: ...
    def of_weight(self, g: Tensor, x: Tensor, weight: Tensor) -> Tensor: ...
    def of_bias(self, g: Tensor) -> Tensor: ...


class _Linear:
    """x [..., in], weight [out, in]."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.dim() == 2:
            return F.linear(x, weight, bias)
        out = F.linear(x.reshape(-1, x.shape[-1]), weight, bias)
        # not a view for autograd: a Function's output that is one must not be changed in place
        whole: Tensor = torch.ops.aten._unsafe_view(out, (*x.shape[:-1], weight.shape[0]))
        return whole

    def of_input(self, g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return g.reshape(-1, g.shape[-1]).mm(weight).view(x.shape)

    def of_weight(self, g: Tensor, x: Tensor, weight: Tensor) -> Tensor:  # noqa: ARG002 — the kinds' one form
        return g.reshape(-1, g.shape[-1]).t().mm(x.reshape(-1, x.shape[-1]))

    def of_bias(self, g: Tensor) -> Tensor:
        return g.reshape(-1, g.shape[-1]).sum(0)


class _Addmm:
    """x [rows, in], weight [in, out], bias [out]."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert bias is not None
        return torch.addmm(bias, x, weight)

    def of_input(self, g: Tensor, x: Tensor, weight: Tensor) -> Tensor:  # noqa: ARG002
        return g.mm(weight.t())

    def of_weight(self, g: Tensor, x: Tensor, weight: Tensor) -> Tensor:  # noqa: ARG002
        return x.t().mm(g)

    def of_bias(self, g: Tensor) -> Tensor:
        return g.sum(0)


class _Convolution:
    """x [samples, in, …], weight [out, in / groups, …]."""

    def __init__(self, stride: list[int], padding: list[int], dilation: list[int], groups: int) -> None:
        self._how = stride, padding, dilation, False, [0] * len(stride), groups

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = torch.convolution(x, weight, bias, *self._how)
        return out

    def of_input(self, g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self._backward(g, x, weight, 0)

    def of_weight(self, g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self._backward(g, x, weight, 1)

    def of_bias(self, g: Tensor) -> Tensor:
        return g.sum([0, *range(2, g.dim())])

    def _backward(self, g: Tensor, x: Tensor, weight: Tensor, which: int) -> Tensor:
        wanted = [which == place for place in range(3)]
        found: Tensor = torch.ops.aten.convolution_backward(g, x, weight, None, *self._how, wanted)[which]
        return found


class _Call(NamedTuple):
    kind: _Kind
    x: Tensor
    weight: Tensor
    bias: Tensor | None


_LINEAR, _ADDMM = _Linear(), _Addmm()


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> _Call | None:  # noqa: A002 — torch's
    return _Call(_LINEAR, input, weight, bias) if weight.dim() == 2 else None


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **more: Any) -> _Call | None:  # noqa: A002
    return None if more or input.shape != mat2.shape[1:] else _Call(_ADDMM, mat1, mat2, input)


def _convolution(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> _Call | None:
    if isinstance(padding, str) or input.dim() != weight.dim():
        return None
    n = weight.dim() - 2
    kind = _Convolution(_spread(stride, n), _spread(padding, n), _spread(dilation, n), groups)
    return _Call(kind, input, weight, bias)


def _spread(value: int | Sequence[int], dimensions: int) -> list[int]:
    given = [value] if isinstance(value, int) else list(value)
    return given * dimensions if len(given) == 1 else given


_KINDS: dict[Any, Callable[..., _Call | None]] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    Tensor.addmm: _addmm,
    F.conv1d: _convolution,
    F.conv2d: _convolution,
    F.conv3d: _convolution,
}


class _PutOff(NamedTuple):
    """A weight's gradient to be. The versions are those of the tensors when it was put off."""

    kind: _Kind
    g: Tensor
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    versions: tuple[int, int]


class WeightGradients(TorchFunctionMode):
    """One forward's weight gradients: ``with`` this around it, then ``backward``, then ``add``."""

    def __init__(self) -> None:
        super().__init__()
        self._put_off: deque[_PutOff] = deque()
        self._backward_id: int | None = None

    def backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """As ``torch.autograd.backward``; what can be put off is, until ``add``.

        The gradients given must not change until then.
        """

        def begins(_: Tensor) -> None:
            self._backward_id = _backward_id()

        roots: list[Any] = [output for output in outputs if output.requires_grad]
        hooks = [root.register_hook(begins) for root in roots]
        try:
            torch.autograd.backward(outputs, gradients)
        finally:
            self._backward_id = None
            for hook in hooks:
                hook.remove()

    def add(self) -> None:
        """Computes what was put off, and adds it to the weights' gradients.

        Raises:
            WorkloadError: a layer has changed in place what is needed for that.
        """
        with torch.no_grad():
            while self._put_off:
                kind, g, x, weight, bias, versions = self._put_off.popleft()
                if versions != (g._version, x._version):
                    raise WorkloadError(
                        f"what the gradient of a weight of {list(weight.shape)} is computed from (its "
                        "layer's input, or its output's gradient) was changed in place before that",
                        hint="let the layers not do that, or use another schedule than zero-bubble",
                    )
                _accumulate(weight, kind.of_weight(g, x, weight))
                if bias is not None:
                    _accumulate(bias, kind.of_bias(g))

    @property
    def held(self) -> Iterator[Tensor]:
        """What is kept until ``add``; a storage may come several times."""
        for entry in self._put_off:
            yield entry.x
            yield entry.g

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        reads = _KINDS.get(func)
        if reads is not None and not types and torch.is_grad_enabled() and not _special():
            call = reads(*args, **(kwargs or {}))
            if call is not None and _trained(call.weight):
                return _apply(self, call)
        return func(*args, **(kwargs or {}))

    def _takes(self, kind: _Kind, g: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Puts it off if this is our backward and nobody waits for the weights' gradients."""
        if self._backward_id is None or self._backward_id != _backward_id():
            return False
        if _hooked(weight) or (bias is not None and _hooked(bias)):
            return False
        versions = g._version, x._version
        self._put_off.append(_PutOff(kind, g.detach(), x.detach(), weight, bias, versions))
        return True


def _apply(later: WeightGradients, call: _Call) -> Any:
    kind, x, weight, bias = call
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64 or not x.is_floating_point():
        return _Product.apply(later, kind, None, x, weight, bias)  # type: ignore[no-untyped-call]
    dtype = torch.get_autocast_dtype(device)
    x = x.to(dtype)
    with torch.autocast(device, enabled=False):  # it would remember casts made without a history
        return _Product.apply(later, kind, dtype, x, weight, bias)  # type: ignore[no-untyped-call]


class _Product(torch.autograd.Function):
    """A product whose backward may leave the weight's part for later."""

    @staticmethod
    def forward(
        ctx: Any,
        later: WeightGradients,
        kind: _Kind,
        dtype: torch.dtype | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.later, ctx.kind, ctx.dtype, ctx.weight, ctx.bias = later, kind, dtype, weight, bias
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[3] else None)
        if dtype is not None:
            weight = weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        return kind.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needs_x, _, needs_bias = ctx.needs_input_grad[3:]
        kind, own = ctx.kind, ctx.weight
        of_x = None
        if needs_x:
            of_x = kind.of_input(g, x, weight if ctx.dtype is None else weight.to(ctx.dtype))
        bias = ctx.bias if needs_bias else None
        if (bias is None or bias.is_leaf) and ctx.later._takes(kind, g, x, own, bias):
            return None, None, None, of_x, None, None
        of_weight = kind.of_weight(g, x, own).to(own.dtype)
        of_bias = None if bias is None else kind.of_bias(g).to(bias.dtype)
        return None, None, None, of_x, of_weight, of_bias


def _trained(weight: Tensor) -> bool:
    return weight.is_leaf and weight.requires_grad and weight.layout == torch.strided


def _hooked(parameter: Tensor) -> bool:
    after: Mapping[int, Any] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return bool(parameter._backward_hooks) or any(hook is not collect for hook in after.values())


_hooks_of_saved = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)
"""From torch 2.8 on; before, a checkpoint inside a layer finds other tensors than it saved, and says so."""


def _special() -> bool:
    """Inside ``torch.compile`` or ``torch.func``, which differentiate in their own ways, or where what is
    saved for the backward goes elsewhere (a checkpoint, which will run this again without us)."""
    return (
        torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or _hooks_of_saved(True) is not None
    )


def _backward_id() -> int:
    return int(torch._C._current_graph_task_id())


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """What autograd does at a leaf, with the one hook that is ours (``_hooked``)."""
    gradient = gradient.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
    collect(parameter)
