"""Weight gradients put off: a backward that gives the inputs' gradients now, and the weights' when asked.

The forward is as always. Before the backward its graph is walked, and of the products with a weight (linear
layers, ``addmm``, ``mm``, convolutions) the weight's side is left out: the engine computes only what it is
asked for, and a hook at each of these nodes keeps the output's gradient and the saved input. A bias goes with
its convolution's weight: asked for the bias alone, oneDNN computes both. All else (norms, embeddings, weights
that have another use, hooks, or are computed from others, what lies inside a checkpoint or a function of the
user's) has its gradients in the backward, as always. So they are right whatever the layers are; only how much
can be put off depends on them.

Source: Qi et al. 2023, section 2 (B and W). Knows nothing of stages, schedules or clocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from skyctl.errors import WorkloadError
from skyctl.workload.mixed import collect

Node = Any
"""A node of autograd's graph, with what it saved as ``_saved_…``."""
Gradients = Callable[[Tensor, Tensor], Sequence[Tensor]]


class _Product(NamedTuple):
    """A node that multiplies by a weight.

    ``gradients``: of its parameters (the weight, maybe a bias), from the output's and the input.
    """

    node: Node
    saved: str
    parameters: tuple[Tensor, ...]
    gradients: Gradients


class _PutOff(NamedTuple):
    """Gradients to be. The versions are those of the two when they were put off."""

    gradients: Gradients
    parameters: tuple[Tensor, ...]
    g: Tensor
    x: Tensor
    versions: tuple[int, int]


class WeightGradients:
    """One microbatch's: ``backward``, and later ``add``."""

    def __init__(self) -> None:
        self._put_off: deque[_PutOff] = deque()
        self._passed = 0

    def backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """As ``torch.autograd.backward``, but for what can be put off until ``add``.

        The gradients given must not change until then.
        """
        products, leaves = _find(outputs)
        if not products:
            torch.autograd.backward(outputs, gradients)
            return
        self._passed = 0
        fresh = [leaf for leaf in leaves if leaf.grad is None]
        hooks = [one.node.register_prehook(partial(self._keep, one)) for one in products]
        try:
            torch.autograd.backward(outputs, gradients, inputs=leaves)
        finally:
            for hook in hooks:  # they hold their nodes
                hook.remove()
        if self._passed < len(products):
            raise WorkloadError(
                f"the backward has not come by {len(products) - self._passed} of {len(products)} weights",
                hint="use another schedule than zero-bubble",
            )
        self._keep_own(taken_over(fresh))

    def add(self) -> None:
        """Computes what was put off, and adds it to the weights' gradients.

        Raises:
            WorkloadError: a layer has changed in place what is needed for that.
        """
        with torch.no_grad():
            while self._put_off:
                gradients, parameters, g, x, versions = self._put_off.popleft()
                if versions != (g._version, x._version):
                    raise WorkloadError(
                        f"what the gradient of a weight of {list(parameters[0].shape)} is computed from (its "
                        "layer's input, or its output's gradient) was changed in place before that",
                        hint="let the layers not do that, or use another schedule than zero-bubble",
                    )
                for parameter, gradient in zip(parameters, gradients(g, x), strict=True):
                    _accumulate(parameter, gradient)

    @property
    def held(self) -> Iterator[Tensor]:
        """What is kept until ``add``; a storage may come several times."""
        for entry in self._put_off:
            yield entry.x
            yield entry.g

    def _keep(self, product: _Product, gradients: Sequence[Tensor | None]) -> None:
        self._passed += 1
        g = gradients[0]
        if g is None:
            return
        x: Tensor = getattr(product.node, f"_saved_{product.saved}")
        versions = g._version, x._version
        put_off = _PutOff(product.gradients, product.parameters, g.detach(), x.detach(), versions)
        self._put_off.append(put_off)

    def _keep_own(self, taken: set[int]) -> None:
        """Copies what has become a parameter's gradient too: the next microbatch is added to it in place."""
        for place, entry in enumerate(self._put_off if taken else ()):
            if entry.g.untyped_storage()._cdata in taken:
                g = entry.g.clone()
                self._put_off[place] = entry._replace(g=g, versions=(g._version, entry.versions[1]))


def taken_over(fresh: Iterable[Tensor]) -> set[int]:
    """The storages of the gradients of these leaves, which had none before a backward.

    Autograd takes a gradient that comes to a leaf first as it is, where nobody else seems to hold it; another
    node may still hold a view of it.
    """
    found = (leaf.grad for leaf in fresh)
    return {g.untyped_storage()._cdata for g in found if g is not None and g.layout is torch.strided}


def _find(outputs: Sequence[Tensor]) -> tuple[list[_Product], list[Tensor]]:
    """(the products whose weight's side can be left out, all leaves but these weights) behind the outputs."""
    seen: set[Node] = set()
    found: list[_Product] = []
    leaves: dict[int, Tensor] = {}
    stack: list[Node] = [output.grad_fn for output in outputs]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            leaves[id(node.variable)] = node.variable
            continue
        product, edges = _product(node)
        if product is not None:
            found.append(product)
        stack += edges
    while True:  # one with another use has its gradient computed whole, and so has what belongs to it
        whole = [one for one in found if any(id(parameter) in leaves for parameter in one.parameters)]
        if not whole:
            return found, list(leaves.values())
        found = [one for one in found if all(one is not other for other in whole)]
        leaves |= {id(parameter): parameter for one in whole for parameter in one.parameters}


class _Kind(NamedTuple):
    """A kind of node.

    ``weight``, ``bias``: which input is the weight, and the bias that goes with it (None: none does);
    ``saved``: as what the other is kept; ``gradients``: of the node, the parameters, and whether the weight
    was turned.
    """

    weight: int
    bias: int | None
    saved: str
    gradients: Callable[[Node, Sequence[Tensor], bool], Gradients | None]


def _product(node: Node) -> tuple[_Product | None, list[Node]]:
    """(what can be put off of it, the nodes its backward goes on to)."""
    edges = [edge for edge, _ in node.next_functions]
    kind = _KINDS.get(type(node).__name__)
    if kind is None:
        return None, edges
    weight, turned = _parameter(edges[kind.weight])
    bias, _ = (None, False) if kind.bias is None else _parameter(edges[kind.bias])
    left_out = {kind.weight} if bias is None else {kind.weight, kind.bias}
    others = [edge for place, edge in enumerate(edges) if place not in left_out]
    if weight is None or not any(others):  # the backward passes here all the same
        return None, edges
    if getattr(getattr(node, f"_raw_saved_{kind.saved}"), "unpack_hook", None) is not None:
        return None, edges  # it lies elsewhere, or is to be computed again, and can be asked for once
    parameters = (weight,) if bias is None else (weight, bias)
    gradients = kind.gradients(node, parameters, turned)
    if gradients is None:
        return None, edges
    return _Product(node, kind.saved, parameters, gradients), others


def _parameter(edge: Node) -> tuple[Tensor | None, bool]:
    """The parameter behind it, None where it is none or has hooks; whether it was turned on the way."""
    turned = False
    while type(edge).__name__ in ("TBackward0", "ToCopyBackward0"):
        turned ^= type(edge).__name__ == "TBackward0"
        edge = edge.next_functions[0][0]
    if type(edge).__name__ != "AccumulateGrad" or _hooked(edge.variable):
        return None, turned
    return edge.variable, turned


def _hooked(parameter: Tensor) -> bool:
    after: Mapping[int, Any] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return bool(parameter._backward_hooks) or any(hook is not collect for hook in after.values())


def _of_turned(g: Tensor, x: Tensor) -> Sequence[Tensor]:
    return (g.t().mm(x.conj()),)  # of real numbers: x itself


def _of_straight(g: Tensor, x: Tensor) -> Sequence[Tensor]:
    return (x.conj().t().mm(g),)


def _addmm(node: Node, parameters: Sequence[Tensor], turned: bool) -> Gradients | None:
    return _mm(node, parameters, turned) if node._saved_alpha == 1 else None


def _mm(node: Node, parameters: Sequence[Tensor], turned: bool) -> Gradients | None:  # noqa: ARG001
    return _of_turned if turned else _of_straight


def _convolution(node: Node, parameters: Sequence[Tensor], turned: bool) -> Gradients | None:
    if turned:
        return None
    weight, *biases = parameters
    sizes = list(biases[0].shape) if biases else None
    how = (
        node._saved_stride,
        node._saved_padding,
        node._saved_dilation,
        node._saved_transposed,
        node._saved_output_padding,
        node._saved_groups,
        (False, True, bool(biases)),
    )

    def gradients(g: Tensor, x: Tensor) -> Sequence[Tensor]:
        like = weight.to(x.dtype)
        found: Sequence[Tensor] = torch.ops.aten.convolution_backward(g, x, like, sizes, *how)
        return found[1 : 1 + len(parameters)]

    return gradients


_KINDS = {
    "AddmmBackward0": _Kind(2, None, "mat1", _addmm),
    "MmBackward0": _Kind(1, None, "self", _mm),
    "ConvolutionBackward0": _Kind(1, 2, "input", _convolution),
}


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """What autograd does at a leaf, with the one hook that is ours (``_hooked``)."""
    gradient = gradient.to(parameter)
    if parameter.grad is None:
        if gradient.stride() != parameter.stride():  # fused optimizers read both as they lie in memory
            gradient = torch.empty_like(parameter).copy_(gradient)
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
    collect(parameter)
