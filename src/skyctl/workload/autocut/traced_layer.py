"""A layer that runs some of the calls of a forward, with the submodules that these calls need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from skyctl.workload.autocut.call_context import shared_autocast_cache
from skyctl.workload.autocut.call_graph import (
    ByMode,
    Call,
    ConstantRef,
    HeldRef,
    RunDevice,
    SampleNumber,
    ValueRef,
    leaves_of,
    map_leaves,
    tensors_in,
)
from skyctl.workload.structures import flatten_value

CONSTANTS = "traced_constants"


@dataclass(frozen=True)
class SampleCount:
    """The input size that shows how many samples a layer is given: size ``dimension`` of input ``place``."""

    place: int
    dimension: int
    size: SampleNumber

    def of(self, inputs: Sequence[Tensor]) -> int:
        """The samples of these inputs."""
        have = inputs[self.place].shape[self.dimension]
        return int((have - self.size.fixed) / self.size.each)


@dataclass(frozen=True, eq=False)
class LayerProgram:
    """The program that a layer runs; it holds no tensors, so copies of the layer share it.

    Attributes:
        frees: by call, the values that nothing needs after it.
        outputs: the values that go to the next layer; for the last layer what the forward returns, with
            references.
    """

    inputs: tuple[int, ...]
    calls: tuple[Call, ...]
    frees: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...] | None
    returned: Any
    count: SampleCount

    @cached_property
    def autocasts(self) -> bool:
        """Whether any of its calls is made under autocast."""
        return any(call.context.autocasts for call in self.calls)

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerProgram:
        return self


@dataclass(frozen=True, eq=False)
class ModuleModes:
    """The dotted names of modules that the model's ``train()`` leaves in ``eval()``, and the other way."""

    kept_in_eval: frozenset[str]
    kept_in_train: frozenset[str]

    @classmethod
    def read(cls, model: nn.Module) -> ModuleModes:
        """Reads what ``model.train()`` and ``model.eval()`` do to its modules; leaves it in ``train()``."""
        model.eval()
        kept_in_train = frozenset(name for name, module in model.named_modules() if module.training)
        model.train()
        kept_in_eval = frozenset(name for name, module in model.named_modules() if not module.training)
        return cls(kept_in_eval, kept_in_train)

    def of(self, path: str, *, mode: bool) -> bool:
        """Whether a module trains after ``train(mode)``."""
        return path not in self.kept_in_eval if mode else path in self.kept_in_train


class TracedLayer(nn.Module):
    """Some calls of a model's forward; its tensors have the names that they have in the model.

    Its input is what the layer before gives: a tensor, or a tuple of those that the cut carries.
    """

    def __init__(self, program: LayerProgram, modes: ModuleModes) -> None:
        super().__init__()
        self._program, self._modes = program, modes

    def train(self, mode: bool = True) -> TracedLayer:
        """As the model's own ``train``, which may leave some modules in another mode."""
        super().train(mode)
        for path, module in self.named_modules():
            module.training = self._modes.of(path, mode=mode)
        return self

    def forward(self, value: Any) -> Any:
        program = self._program
        inputs, _ = flatten_value(value)
        values = dict(zip(program.inputs, inputs, strict=True))
        samples = program.count.of(inputs)
        device = inputs[0].device

        def thaw(leaf: Any) -> Any:
            if isinstance(leaf, ByMode):
                leaf = leaf.training if self.training else leaf.evaluating
            if isinstance(leaf, ValueRef):
                return values[leaf.number]
            if isinstance(leaf, SampleNumber):
                return leaf.at(samples)
            if leaf is RunDevice:
                return device
            if isinstance(leaf, HeldRef):
                return attrgetter(leaf.path)(self)
            if isinstance(leaf, ConstantRef):
                return getattr(self, f"{CONSTANTS}_{leaf.number}")
            return leaf

        del inputs, value
        with shared_autocast_cache() if program.autocasts else nullcontext():
            for call, unneeded in zip(program.calls, program.frees, strict=True):
                target: Callable[..., Any] = call.function or attrgetter(call.module or "")(self)
                with call.context.entered(device):
                    result = target(*map_leaves(call.args, thaw), **map_leaves(call.kwargs, thaw))
                values.update(zip(call.outputs, tensors_in(result), strict=True))
                del result
                for number in unneeded:
                    del values[number]
        if program.outputs is None:
            return map_leaves(program.returned, thaw)
        given = tuple(values[number] for number in program.outputs)
        return given if len(given) > 1 else given[0]


def make_layer(
    program: LayerProgram, model: nn.Module, constants: Sequence[Tensor], seen: set[str], modes: ModuleModes
) -> TracedLayer:
    """A layer that holds what its calls need of the model, under the model's names.

    Args:
        modes: of the model's modules.
        seen: names of buffers that earlier layers hold; they are added. A buffer is in the file of weights
            once, though several layers read it.
    """
    layer = TracedLayer(program, modes)
    whole = {call.module for call in program.calls if call.module is not None}
    for path in sorted(whole):
        place_module(layer, path, model.get_submodule(path))
    for leaf in leaves_of([(call.args, call.kwargs) for call in program.calls] + [program.returned]):
        if isinstance(leaf, HeldRef):
            place_tensor(layer, leaf.path, model, seen)
        elif isinstance(leaf, ConstantRef):
            setattr(layer, f"{CONSTANTS}_{leaf.number}", constants[leaf.number])
    return layer.train()


def place_module(layer: nn.Module, path: str, module: nn.Module) -> None:
    """Puts a submodule of the model at its dotted name into the layer."""
    parent, _, name = path.rpartition(".")
    submodule = _submodule(layer, parent)
    if submodule is not None:
        submodule._modules[name] = module


def place_tensor(layer: nn.Module, path: str, model: nn.Module, seen: set[str]) -> None:
    """Puts a tensor of the model at its dotted name into the layer, unless a submodule there has it."""
    parent, _, name = path.rpartition(".")
    submodule = _submodule(layer, parent)
    if submodule is None or name in submodule._parameters or name in submodule._buffers:
        return
    owner = model.get_submodule(parent)
    if name in owner._parameters:
        submodule.register_parameter(name, owner._parameters[name])
    elif name in owner._buffers:
        saved = name not in owner._non_persistent_buffers_set and path not in seen
        seen.add(path)
        submodule.register_buffer(name, owner._buffers[name], persistent=saved)
    else:
        setattr(submodule, name, getattr(owner, name))


class _Scope(nn.Module):
    """In the place of an opened module: holds those of its submodules and tensors that a layer needs."""


def _submodule(layer: nn.Module, path: str) -> nn.Module | None:
    """The module at a dotted name, made where there is none; None: it is within a submodule that is whole."""
    at = layer
    for name in path.split(".") if path else ():
        if not isinstance(at, TracedLayer | _Scope):
            return None
        if name not in at._modules:
            at._modules[name] = _Scope()
        at = at._modules[name]  # type: ignore[assignment]
    return at if isinstance(at, TracedLayer | _Scope) else None


def make_program(
    calls: Sequence[Call],
    inputs: Sequence[int],
    outputs: Sequence[int] | None,
    returned: Any,
    count: SampleCount,
) -> LayerProgram:
    """The program of some calls, with what each of them frees."""
    kept = set(outputs or ()) | {leaf.number for leaf in leaves_of(returned) if isinstance(leaf, ValueRef)}
    frees: list[tuple[int, ...]] = []
    needed = set(kept)
    for call in reversed(calls):
        uses = {leaf.number for leaf in call.refs() if isinstance(leaf, ValueRef)} | set(call.outputs)
        frees.append(tuple(sorted(uses - needed)))
        needed |= uses
    return LayerProgram(
        inputs=tuple(inputs),
        calls=tuple(calls),
        frees=tuple(reversed(frees)),
        outputs=None if outputs is None else tuple(outputs),
        returned=returned,
        count=count,
    )


def unused_weights(model: nn.Module, layers: Sequence[nn.Module]) -> Mapping[str, Tensor]:
    """Parameters and buffers of the model that no layer holds."""
    held = {id(t) for layer in layers for t in (*layer.parameters(), *layer.buffers())}
    return {name: t for name, t in model.state_dict(keep_vars=True).items() if id(t) not in held}
