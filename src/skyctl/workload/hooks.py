"""Hooks and functions that a layer holds, carried over to a copy of the layer with other tensors.

``copy.deepcopy`` copies a function as itself. So a hook ``lambda g: g * self.mask`` of a copied layer would
still look at the mask of the layer that was copied, and hooks on parameters would be lost altogether.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CellType, FunctionType
from typing import Any

from torch import Tensor, nn

from skyctl.errors import WorkloadError


class ForeignValueError(Exception):
    """A function holds a module or a tensor that is not in the layer; says which, in words."""


def tensor_hooks(tensor: Tensor) -> list[Any]:
    """The functions that ``tensor.register_hook`` was given, in their order."""
    return list((tensor._backward_hooks or {}).values())


def module_hooks(module: nn.Module, *, backward: bool) -> list[Any]:
    """The functions that wait for a module's backward, or for its call."""
    names = (
        ("_backward_hooks", "_backward_pre_hooks")
        if backward
        else ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called")
    )
    return [hook for name in names for hook in (getattr(module, name, None) or {}).values()]


def held_values(function: Any) -> list[Any]:
    """The values of a function besides its code: variables of the functions around it, and defaults."""
    if not isinstance(function, FunctionType):
        return []
    held = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    return [*held, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def locate_hook(function: Any, path: Path | None) -> str:
    """The line at which a hook is written, as in ``train.py, line 12``; its name if that is not known."""
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    if code is None:
        return type(function).__name__
    file = Path(code.co_filename)
    if path is not None and file.is_relative_to(path.parent):
        return f"{file.relative_to(path.parent)}, line {code.co_firstlineno}"
    return f"{file.name}, line {code.co_firstlineno}"


def refuse_accumulate_hooks(layer: nn.Module, label: str, path: Path | None) -> None:
    """Refuses hooks on gradients that are summed already.

    Raises:
        WorkloadError: a parameter has one: it would see the gradients of one machine's microbatches only.
    """
    for name, parameter in layer.named_parameters():
        for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
            raise WorkloadError(
                f"{locate_hook(hook, path)}: {label} has a post-accumulate hook on {name}, which would run "
                "before the gradients of all microbatches and machines are summed",
                hint="do it in the optimizer's step(), or in register_hook() if it is linear in the gradient",
            )


def carry_hooks(
    layer: nn.Module, tensors: Mapping[int, Tensor], built: nn.Module, memo: dict[int, Any], path: Path | None
) -> None:
    """Gives a copy the hooks of the layer's tensors, and lets its functions look at what the copy holds.

    Args:
        tensors: those of the layer, by id.
        built: the copy.
        memo: of the ``deepcopy`` that made it: what stands there in place of what, by id.
        path: the user's file, for lines in errors.

    Raises:
        WorkloadError: a function looks at a module or tensor that is not in the layer; names its line.
    """
    own = {id(value): value for value in layer.modules()}
    for key, tensor in tensors.items():
        new = memo.get(key)
        if isinstance(new, Tensor) and new.requires_grad and not tensor_hooks(new):  # of a shared one: once
            for hook in tensor_hooks(tensor):
                new.register_hook(_rebound(hook, memo, own, path))  # type: ignore[no-untyped-call]
    for module in built.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, FunctionType):
                vars(module)[name] = _rebound(value, memo, own, path)
            elif name.endswith("_hooks") and isinstance(value, dict):
                value.update({key: _rebound(hook, memo, own, path) for key, hook in value.items()})


def _rebound(function: Any, memo: dict[int, Any], own: Mapping[int, Any], path: Path | None) -> Any:
    """The function with the copy's modules and tensors in place of the layer's."""
    try:
        bound = getattr(function, "__self__", None)
        if isinstance(bound, nn.Module) and id(bound) in memo:
            return getattr(memo[id(bound)], function.__name__)
        if not isinstance(function, FunctionType):
            return function
        return _rebound_function(function, memo, own)
    except ForeignValueError as exc:
        raise WorkloadError(
            f"{locate_hook(function, path)}: a function that a layer keeps looks at {exc}, which the layer "
            "does not hold: it may be on another machine",
            hint="let it look at the layer's own tensors, for instance a buffer of the module it belongs to",
        ) from exc


def _rebound_function(function: FunctionType, memo: dict[int, Any], own: Mapping[int, Any]) -> FunctionType:
    def new(value: Any) -> Any:
        return _carried(value, memo, own)

    if not any(_holds_tensors(value) for value in held_values(function)):
        return function
    cells = [
        CellType(new(cell.cell_contents)) if _is_filled(cell) else cell for cell in function.__closure__ or ()
    ]
    rebound = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
    )
    rebound.__defaults__ = tuple(map(new, function.__defaults__)) if function.__defaults__ else None
    rebound.__kwdefaults__ = {k: new(v) for k, v in (function.__kwdefaults__ or {}).items()} or None
    vars(rebound).update(vars(function))
    return rebound


def _carried(value: Any, memo: dict[int, Any], own: Mapping[int, Any]) -> Any:
    """The value that stands in the copy in place of one that a function of the layer holds."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, nn.Module) and id(value) not in own:
        raise ForeignValueError(f"a {type(value).__name__}")
    if isinstance(value, Tensor) and value.device.type == "meta":
        raise ForeignValueError(f"a tensor of shape {list(value.shape)}")
    return copy.deepcopy(value, memo) if _holds_tensors(value) else value


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(item, Tensor | nn.Module) for item in _items_of(value))


def _items_of(value: Any) -> Iterator[Any]:
    """A value, and what lists, tuples and dicts in it hold."""
    yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    for item in inner:
        yield from _items_of(item)


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a variable that has no value yet
        return False
