"""The cost of each layer per microbatch, counted in one forward and backward on fake tensors.

Nothing here is a formula per architecture: flops from torch's own counter, bytes from the tensors that
autograd keeps and from the storages that live while the layer runs. A layer's cost depends only on its
signature, so equal layers are counted once.
"""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from skyctl.errors import WorkloadError
from skyctl.experts.routed import RoutedExperts
from skyctl.workload import mixed_precision, user_code
from skyctl.workload.deferred_init import DispatchMode
from skyctl.workload.operation_digest import OperationDigest, backward_kinds, plain_settings
from skyctl.workload.parameter_names import copy_name
from skyctl.workload.real_runs import NeedsValuesError, is_for_lack_of_values
from skyctl.workload.shape_inference import LayerBoundary
from skyctl.workload.structures import Value, value_tensors
from skyctl.workload.weight_gradients import DeferredWeightGradients
from skyctl.workload.workload import Workload


@dataclass(frozen=True)
class LayerCost:
    """The cost of one layer at one microbatch size.

    Attributes:
        signature: equal for layers that cost the same (operations, shapes, types and arguments of the
            forward, kinds of the backward, parameters); the last layer's includes the loss.
        flops: forward and backward together.
        state_bytes: parameters, gradients, optimizer state and buffers.
        activation_bytes: kept from a forward until its backward: the layer's input and what autograd saves,
            without parameters and what the layer gives or passes on (the next layer counts that as input).
        output_bytes: the tensors passed to the next layer.
        workspace_bytes: the peak beyond that while forward or backward run, gradients included.
        deferred_bytes: kept from a backward until its weight gradients, where these are deferred.
        gradient_bytes: gradients of the trained parameters in float32, as replicas of the model sum them.
        gradient_matrices: (rows, columns) of those of two dimensions or more; rows: the first dimension.
        full_state_bytes: of the layer without adapters, all its parameters trained; None: it has none.
    """

    name: str
    signature: str
    flops: float
    state_bytes: float
    activation_bytes: float
    output_bytes: float
    workspace_bytes: float
    deferred_bytes: float = 0.0
    gradient_bytes: float = 0.0
    gradient_matrices: tuple[tuple[int, int], ...] = ()
    full_state_bytes: float | None = None


def count_layer_costs(workload: Workload, samples: int) -> list[LayerCost]:
    """The cost of every layer at a microbatch of ``samples``.

    Raises:
        WorkloadError: a layer can't be run, forward or backward, at that many samples.
    """
    boundaries = workload.shapes.boundaries(samples)
    by_signature: dict[str, LayerCost] = {}
    costs = []
    for index, name in enumerate(workload.names):
        try:
            cost = _layer_cost(workload, index, boundaries, samples, by_signature)
        except NeedsValuesError:  # its backward does, or the loss behind it
            workload.shapes.use_values(index)
            cost = _layer_cost(workload, index, boundaries, samples, by_signature)
        costs.append(replace(cost, name=name))
    return costs


def part_of_experts(workload: Workload, index: int) -> float:
    """The part of a layer's flops, forward and backward, that its experts do.

    Raises:
        WorkloadError: the layer can't be run.
    """
    samples = 2  # the part hardly depends on them
    boundary = workload.shapes.boundaries(samples)[index]
    whole = _CountedRun(workload, index, boundary, samples).flops
    with ExitStack() as stack:
        for module in workload.shapes.layer(index).modules():
            if isinstance(module, RoutedExperts):
                stack.enter_context(module.without_experts())
        rest = _CountedRun(workload, index, boundary, samples).flops
    return 1 - rest / whole if whole else 0.0


def _layer_cost(
    workload: Workload,
    index: int,
    boundaries: list[LayerBoundary],
    samples: int,
    by_signature: dict[str, LayerCost],
) -> LayerCost:
    """The cost of one layer: of an equal one that is known by its signature, or counted."""
    signature = _signature(workload, index, boundaries, samples)
    if signature not in by_signature:
        run = _CountedRun(workload, index, boundaries[index], samples)
        fake_layer = workload.shapes.fake_layers[index]
        by_signature[signature] = LayerCost(
            name=workload.names[index],
            signature=signature,
            flops=float(run.flops),
            state_bytes=float(state_bytes(workload, fake_layer)),
            activation_bytes=float(run.activation_bytes),
            output_bytes=float(sum(t.nbytes for t in boundaries[index + 1].tensors)),
            workspace_bytes=float(run.workspace_bytes),
            deferred_bytes=float(_deferred_bytes(workload, index, boundaries[index], samples)),
            gradient_bytes=float(_gradient_bytes(fake_layer)),
            gradient_matrices=_gradient_matrices(fake_layer),
            full_state_bytes=_full_state_bytes(workload, index),
        )
    return by_signature[signature]


def _forward(
    workload: Workload, index: int, boundary: LayerBoundary, samples: int
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Value]:
    """Runs a layer, the last one with its loss → (inputs as received, targets, output)."""
    shapes = workload.shapes
    value = shapes.received(index, boundary, samples)
    inputs = value_tensors(value)  # before a layer takes any of them out of its dict
    targets: tuple[Tensor, ...] = ()
    out = shapes.run_layer(index, value, boundary)
    if index + 1 == workload.layers:
        _, wanted = shapes.batch(index, samples)
        targets = value_tensors(wanted)
        try:
            with shapes.mode(index):
                out = workload.loss(out, wanted)
        except WorkloadError as exc:
            raise _perhaps_needs_values(workload, index, exc) from exc
    return inputs, targets, out


def _perhaps_needs_values(workload: Workload, index: int, error: WorkloadError) -> WorkloadError:
    """The error, or the one that says that real tensors may help."""
    if not workload.shapes.needs_values(index) and is_for_lack_of_values(error):
        return NeedsValuesError(index, error)
    return error


def _signature(workload: Workload, index: int, boundaries: list[LayerBoundary], samples: int) -> str:
    with_values = workload.shapes.needs_values(index)
    listing = OperationDigest(kinds_only=with_values)
    layer = workload.shapes.fake_layers[index]
    held = [(p, p.requires_grad) for p in layer.parameters()] + [(b, False) for b in layer.buffers()]
    for tensor, trained in held:
        listing.digest.update(f"{tensor.dtype}{list(tensor.shape)}{trained}\n".encode())
    boundary = boundaries[index]
    for spec in boundary.tensors:
        listing.digest.update(f"in {spec} {spec.requires_grad}\n".encode())
    for structure in (boundary.structure, boundaries[index + 1].structure):
        if structure is not None:  # layers that differ in it can't stand in for each other in the probe
            listing.digest.update(f"{json.dumps(structure)}\n".encode())
    with listing:
        _, _, out = _forward(workload, index, boundary, samples)
    if with_values:
        for line in (*sorted(listing.kinds), *plain_settings(layer)):
            listing.digest.update(f"{line}\n".encode())
    for kind in () if with_values else backward_kinds(out):
        listing.digest.update(f"{kind}\n".encode())
    return listing.digest.hexdigest()[:16]


class _LiveBytes(DispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of living storages that were made inside, now and at most, and the flops."""

    def __init__(self, counted: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.most = 0
        self.flops = 0
        self._counted: dict[int, Any] = {}
        self._outside = [t.untyped_storage() for t in counted]  # alive, so that their ids are not used again
        for storage in self._outside:
            self._counted[storage._cdata] = None

    def add(self, tensor: Tensor) -> None:
        """Counts a tensor's storage until it is freed; of a sparse one its parts, which are tensors, were."""
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._counted:
            return

        def gone(_: Any) -> None:
            self.now -= nbytes
            del self._counted[key]

        self._counted[key] = weakref.ref(storage, gone)
        self.now += nbytes
        self.most = max(self.most, self.now)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.add(tensor)
        kind = getattr(func, "_overloadpacket", None)
        count = _CPU_ATTENTION.get(kind) or flop_registry.get(kind)
        if count is not None:
            self.flops += int(count(*args, **(kwargs or {}), out_val=out))
        return out


class _CountedRun:
    """Runs one layer's forward and backward, and counts flops and bytes."""

    def __init__(self, workload: Workload, index: int, boundary: LayerBoundary, samples: int) -> None:
        layer = workload.shapes.layer(index)
        own = [*layer.parameters(), *layer.buffers()]
        live = _LiveBytes(own)
        saved: dict[int, int] = {}
        state = {t.untyped_storage()._cdata for t in own}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in state:
                saved[storage._cdata] = storage.nbytes()
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with live:
            with hooks:
                inputs, targets, out = _forward(workload, index, boundary, samples)
            held = saved | _storages([*inputs, *targets])
            given = _storages(value_tensors(out))  # what is only passed on as well: the next layer counts it
            self.activation_bytes = sum(nbytes for key, nbytes in held.items() if key not in given)
            forward_most = live.most
            live.most = live.now
            _backward(workload, index, boundary, out, torch.autograd.backward)
        self.flops = live.flops
        self.workspace_bytes = max(0, forward_most - self.activation_bytes, live.most - self.activation_bytes)


def _deferred_bytes(workload: Workload, index: int, boundary: LayerBoundary, samples: int) -> int:
    """The bytes that a layer's weight gradients hold while they are deferred."""
    later = DeferredWeightGradients()
    _, _, out = _forward(workload, index, boundary, samples)
    _backward(workload, index, boundary, out, later.backward)
    own = workload.shapes.layer(index)
    state = {t.untyped_storage()._cdata for t in (*own.parameters(), *own.buffers())}
    return sum(nbytes for key, nbytes in _storages(later.held).items() if key not in state)


def _backward(
    workload: Workload, index: int, boundary: LayerBoundary, out: Value, run: Callable[..., None]
) -> None:
    """Calls ``run`` with the outputs and gradients for them; drops the parameters' gradients."""
    ends = [t for t in value_tensors(out) if t.requires_grad]
    if not ends:
        return
    shapes = workload.shapes
    make = torch.zeros_like if shapes.needs_values(index) else torch.empty_like
    try:
        with shapes.mode(index):
            run(ends, [make(t) for t in ends])
    except Exception as exc:
        who = f"{workload.model.source_name}: {workload.model.label(index)}"
        error = WorkloadError(f"{who} can't run backward on {boundary}: {user_code.describe_exception(exc)}")
        error.__cause__ = exc
        raise _perhaps_needs_values(workload, index, error) from exc
    finally:
        for parameter in shapes.layer(index).parameters():
            parameter.grad = None


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    sizes = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
    return sizes


def _cpu_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]


def _cpu_attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> int:
    shapes = (gradient.shape, query.shape, key.shape, value.shape)
    return int(sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]


_ATEN = torch.ops.aten
_CPU_ATTENTION: dict[Any, Any] = {  # torch's own registry knows the GPU kernels only
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
}


def _gradient_bytes(layer: nn.Module) -> int:
    """The bytes of a layer's gradients in float32, whatever it computes in; 0 where nothing is trained."""
    return sum(p.numel() * torch.float32.itemsize for p in layer.parameters() if p.requires_grad)


def _gradient_matrices(layer: nn.Module) -> tuple[tuple[int, int], ...]:
    """(rows, columns) of what a layer trains in two dimensions or more, but for what is empty."""
    shapes = [p.shape for p in layer.parameters() if p.requires_grad and p.dim() > 1 and p.numel()]
    return tuple((shape[0], math.prod(shape[1:])) for shape in shapes)


def state_bytes(workload: Workload, layer: nn.Module) -> int:
    """The bytes of parameters, gradients, buffers, and of the optimizer's state after a step.

    In mixed precision also of the masters, and the gradients are the masters' (``mixed_precision``).
    """
    parameters = list(layer.parameters())
    trained = [mixed_precision.master_of(p) for p in parameters if p.requires_grad]
    masters = [
        m for m, p in zip(trained, (p for p in parameters if p.requires_grad), strict=True) if m is not p
    ]
    total = sum(_tensor_bytes(t) for t in (*parameters, *masters, *trained, *layer.buffers()))
    return total + sum(_optimizer_bytes(workload, trained))


def _full_state_bytes(workload: Workload, index: int) -> float | None:
    """``state_bytes`` of a layer without its adapters, if it were trained itself; None where it is."""
    hub = workload.model.hub
    if hub is None or hub.adapters is None:
        return None
    layer = workload.shapes.fake_layers[index]
    own = hub.naming.names[index]
    base = [p for name, p in layer.named_parameters() if name in own]
    low = [p for p in base if workload.model.dtype is not None and p.dtype is workload.model.dtype]
    masters = [nn.Parameter(torch.empty(p.shape, device="meta")) for p in low]
    trained = [*masters, *(p for p in base if all(p is not other for other in low))]
    held = (*base, *masters, *trained, *layer.buffers())
    return float(sum(map(_tensor_bytes, held)) + sum(_optimizer_bytes(workload, trained)))


def _optimizer_bytes(workload: Workload, parameters: Sequence[nn.Parameter]) -> list[int]:
    """The optimizer's state in bytes, by parameter: from a step on the meta device, or on small stand-ins."""
    if not parameters:
        return []
    try:
        return _bytes_after_step(workload, [_make_stand_in(p, tuple(p.shape), "meta") for p in parameters])
    except (NotImplementedError, RuntimeError, WorkloadError):
        small = [_make_stand_in(p, tuple(min(size, 4) for size in p.shape), "cpu") for p in parameters]
        try:
            state_bytes = _bytes_after_step(workload, small)
        except RuntimeError as exc:
            raise WorkloadError(
                f"{workload.model.place_of('optimizer')}: its step() fails on dense gradients of zeros: "
                f"{user_code.describe_exception(exc)}",
                hint="give an optimizer that takes dense gradients, and Embedding(sparse=False)",
            ) from exc
        return [
            int(have * p.numel() / max(1, s.numel()))
            for have, p, s in zip(state_bytes, parameters, small, strict=True)
        ]


def _make_stand_in(parameter: nn.Parameter, shape: tuple[int, ...], device: str) -> nn.Parameter:
    stand_in = nn.Parameter(torch.zeros(shape, dtype=parameter.dtype, device=device))
    stand_in.grad = torch.zeros_like(stand_in)
    copy_name(parameter, stand_in)
    return stand_in


def _bytes_after_step(workload: Workload, parameters: Sequence[nn.Parameter]) -> list[int]:
    optimizer = workload.optimizer(parameters)
    optimizer.step()
    state_bytes = []
    for parameter in parameters:
        kept = tree_leaves(dict(optimizer.state.get(parameter, {})))
        state_bytes.append(sum(_tensor_bytes(t) for t in kept if isinstance(t, Tensor) and t.dim() > 0))
    return state_bytes


def _tensor_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
