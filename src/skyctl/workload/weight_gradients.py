"""Deferred weight gradients: a backward that computes input gradients now, and weight gradients when asked.

The forward is as always. Before the backward its graph is walked, and of the products with a weight (linear
layers, ``addmm``, ``mm``, convolutions) the weight's side is left out: autograd computes only what it is
asked for, and a hook at each of these nodes keeps the output's gradient and the saved input. A convolution's
bias is deferred with its weight: asked for the bias alone, oneDNN computes both. Everything else (norms,
embeddings, weights that are used twice, have hooks or are computed from others, anything inside a checkpoint
or a user's Function) gets its gradients in the backward, as always; with a reentrant checkpoint all does. So
they are right whatever the layers are; only how much can be deferred depends on them.

Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism, section 2 (B and W). Knows nothing of stages,
schedules or clocks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from skyctl.errors import WorkloadError
from skyctl.workload.mixed_precision import accumulate_into_master

AutogradNode = Any
"""A node of autograd's graph, with what it saved as ``_saved_…``."""
GradientFunction = Callable[[Tensor, Tensor], Sequence[Tensor]]
"""(gradient of the output, input) → gradients of the product's parameters."""


class _Product(NamedTuple):
    """A node of the graph that multiplies by a weight.

    Attributes:
        saved: the name under which the node saved its input.
        parameters: the weight, and maybe a bias.
        casts: nodes between them and the product that convert a parameter's dtype.
    """

    node: AutogradNode
    saved: str
    parameters: tuple[Tensor, ...]
    gradients: GradientFunction
    casts: tuple[AutogradNode, ...]


class _DeferredProduct(NamedTuple):
    """A product whose weight gradient is still to be computed.

    Attributes:
        output_gradient, input: what it is computed from.
        versions: the version counters of these two when they were kept.
    """

    gradients: GradientFunction
    parameters: tuple[Tensor, ...]
    output_gradient: Tensor
    input: Tensor
    versions: tuple[int, int]


class DeferredWeightGradients:
    """The weight gradients of one microbatch: ``backward`` defers them, ``add`` computes them later."""

    def __init__(self) -> None:
        self._deferred: deque[_DeferredProduct] = deque()
        self._visited = 0

    def backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """As ``torch.autograd.backward``, except for what can be deferred until ``add``.

        The gradients given must not change until then.
        """
        products, leaves = _find_products(outputs)
        if not products:
            torch.autograd.backward(outputs, gradients)
            return
        self._visited = 0
        fresh = [leaf for leaf in leaves if leaf.grad is None]
        hooks = [product.node.register_prehook(partial(self._keep, product)) for product in products]
        try:
            torch.autograd.backward(outputs, gradients, inputs=leaves)
        finally:
            for hook in hooks:  # they hold their nodes
                hook.remove()
        if self._visited < len(products):
            raise WorkloadError(
                f"the backward has not come by {len(products) - self._visited} of {len(products)} weights",
                hint="use another schedule than zero-bubble",
            )
        self._keep_own(adopted_storages(fresh))

    def add(self) -> None:
        """Computes the deferred gradients, and adds them to the weights' gradients.

        Raises:
            WorkloadError: a layer has changed an operand in place meanwhile.
        """
        with torch.no_grad():
            while self._deferred:
                gradients, parameters, output_gradient, value, versions = self._deferred.popleft()
                if versions != (output_gradient._version, value._version):
                    raise WorkloadError(
                        f"what the gradient of a weight of {list(parameters[0].shape)} is computed from (its "
                        "layer's input, or its output's gradient) was changed in place before that",
                        hint="let the layers not do that, or use another schedule than zero-bubble",
                    )
                for parameter, gradient in zip(parameters, gradients(output_gradient, value), strict=True):
                    _accumulate(parameter, gradient)

    @property
    def held(self) -> Iterator[Tensor]:
        """The tensors kept until ``add``; some may share a storage."""
        for entry in self._deferred:
            yield entry.input
            yield entry.output_gradient

    def _keep(self, product: _Product, gradients: Sequence[Tensor | None]) -> None:
        self._visited += 1
        gradient = gradients[0]
        if gradient is None:
            return
        value: Tensor = getattr(product.node, f"_saved_{product.saved}")
        versions = gradient._version, value._version
        self._deferred.append(
            _DeferredProduct(
                product.gradients, product.parameters, gradient.detach(), value.detach(), versions
            )
        )

    def _keep_own(self, taken: set[int]) -> None:
        """Copies what has become a parameter's gradient: the next microbatch is added to that in place."""
        for place, entry in enumerate(self._deferred if taken else ()):
            if entry.output_gradient.untyped_storage()._cdata in taken:
                copy = entry.output_gradient.clone()
                versions = (copy._version, entry.versions[1])
                self._deferred[place] = entry._replace(output_gradient=copy, versions=versions)


def adopted_storages(fresh: Iterable[Tensor]) -> set[int]:
    """The storages that autograd has adopted as gradients of these leaves, which had none before a backward.

    The first gradient to reach a leaf is adopted without a copy where nothing else seems to hold it; yet
    another node may hold a view of it.
    """
    gradients = (leaf.grad for leaf in fresh)
    return {g.untyped_storage()._cdata for g in gradients if g is not None and g.layout is torch.strided}


def _find_products(outputs: Sequence[Tensor]) -> tuple[list[_Product], list[Tensor]]:
    """Walks the graph behind the outputs → (products to defer, all leaves but their parameters)."""
    seen: set[AutogradNode] = set()
    products: list[_Product] = []
    leaves: dict[int, Tensor] = {}
    stack: list[AutogradNode] = [output.grad_fn for output in outputs]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "CheckpointFunctionBackward":
            return [], []  # a reentrant checkpoint refuses to be told which leaves are asked for
        if type(node).__name__ == "AccumulateGrad":
            leaves[id(node.variable)] = node.variable
            continue
        product, edges = _product(node)
        if product is not None:
            products.append(product)
        stack += edges
    casts = Counter(cast for product in products for cast in product.casts)
    for (
        product
    ) in products:  # autocast converts a weight once for all its uses, whose gradients it sums converted
        if any(casts[cast] > 1 for cast in product.casts):
            leaves |= {id(parameter): parameter for parameter in product.parameters}
    while True:  # one with another use has its gradient computed whole, and so has what belongs to it
        whole = [
            product
            for product in products
            if any(id(parameter) in leaves for parameter in product.parameters)
        ]
        if not whole:
            return products, list(leaves.values())
        products = [product for product in products if all(product is not other for other in whole)]
        leaves |= {id(parameter): parameter for product in whole for parameter in product.parameters}


class _NodeKind(NamedTuple):
    """A kind of node that multiplies by a weight.

    Attributes:
        weight, bias: which of its inputs are the weight and the bias deferred with it (None: none is).
        saved: the name under which it saves the other operand.
        gradients: (node, parameters, whether the weight was transposed) → its ``GradientFunction``; None
            where it can't be deferred.
    """

    weight: int
    bias: int | None
    saved: str
    gradients: Callable[[AutogradNode, Sequence[Tensor], bool], GradientFunction | None]


def _product(node: AutogradNode) -> tuple[_Product | None, list[AutogradNode]]:
    """(the product that can be deferred at a node, the nodes that its backward continues with)."""
    edges = [edge for edge, _ in node.next_functions]
    kind = _NODE_KINDS.get(type(node).__name__)
    if kind is None:
        return None, edges
    weight, transposed, casts = _parameter(edges[kind.weight])
    bias, _, bias_casts = (None, False, []) if kind.bias is None else _parameter(edges[kind.bias])
    left_out = {kind.weight} if bias is None else {kind.weight, kind.bias}
    others = [edge for place, edge in enumerate(edges) if place not in left_out]
    if weight is None or not any(others):  # the backward passes here all the same
        return None, edges
    if getattr(getattr(node, f"_raw_saved_{kind.saved}"), "unpack_hook", None) is not None:
        return (
            None,
            edges,
        )  # a hook packed it (offloaded, or to be recomputed), and it can be unpacked once only
    parameters = (weight,) if bias is None else (weight, bias)
    gradients = kind.gradients(node, parameters, transposed)
    if gradients is None:
        return None, edges
    return _Product(node, kind.saved, parameters, gradients, (*casts, *bias_casts)), others


def _parameter(edge: AutogradNode) -> tuple[Tensor | None, bool, list[AutogradNode]]:
    """The parameter behind an edge.

    Returns:
        It (None where there is none or it has hooks), whether it is transposed, the nodes that convert it.
    """
    transposed, casts = False, []
    while type(edge).__name__ in ("TBackward0", "ToCopyBackward0"):
        transposed ^= type(edge).__name__ == "TBackward0"
        if type(edge).__name__ == "ToCopyBackward0":
            casts.append(edge)
        edge = edge.next_functions[0][0]
    if type(edge).__name__ != "AccumulateGrad" or _has_hooks(edge.variable):
        return None, transposed, casts
    return edge.variable, transposed, casts


def _has_hooks(parameter: Tensor) -> bool:
    after: Mapping[int, Any] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return bool(parameter._backward_hooks) or any(
        hook is not accumulate_into_master for hook in after.values()
    )


def _transposed_gradient(g: Tensor, x: Tensor) -> Sequence[Tensor]:
    return (g.t().mm(x.conj()),)  # of real numbers: x itself


def _plain_gradient(g: Tensor, x: Tensor) -> Sequence[Tensor]:
    return (x.conj().t().mm(g),)


def _addmm(node: AutogradNode, parameters: Sequence[Tensor], transposed: bool) -> GradientFunction | None:
    return _mm(node, parameters, transposed) if node._saved_alpha == 1 else None


def _mm(node: AutogradNode, parameters: Sequence[Tensor], transposed: bool) -> GradientFunction | None:  # noqa: ARG001
    return _transposed_gradient if transposed else _plain_gradient


def _convolution(
    node: AutogradNode, parameters: Sequence[Tensor], transposed: bool
) -> GradientFunction | None:
    if transposed:
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
        results: Sequence[Tensor] = torch.ops.aten.convolution_backward(g, x, like, sizes, *how)
        return results[1 : 1 + len(parameters)]

    return gradients


_NODE_KINDS = {
    "AddmmBackward0": _NodeKind(2, None, "mat1", _addmm),
    "MmBackward0": _NodeKind(1, None, "self", _mm),
    "ConvolutionBackward0": _NodeKind(1, 2, "input", _convolution),
}


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Adds a gradient to a leaf as autograd does, with our own hook for masters (``_has_hooks``)."""
    gradient = gradient.to(parameter)
    if parameter.grad is None:
        if gradient.stride() != parameter.stride():  # fused optimizers read both as they lie in memory
            gradient = torch.empty_like(parameter).copy_(gradient)
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
    accumulate_into_master(parameter)
