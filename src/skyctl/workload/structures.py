"""Values with a structure: tensors (and None) nested in tuples and dicts, taken apart and put together.

Layers, losses and batches have values; stages send, receive and split flat tuples of tensors. A structure is
what is left of a value without its tensors, in JSON values, so that it can travel.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from skyctl.errors import WorkloadError

Value: TypeAlias = "Tensor | tuple[Value, ...] | dict[str, Value] | None"
"""The inputs and outputs of a layer, and the inputs and targets of a batch; None only within others."""

Structure: TypeAlias = "Mapping[str, Any] | None"
"""None for a tensor, ``{"tuple": [Structure, …]}``, ``{"dict": {key: Structure}}``, ``{"none": []}``."""

MOST_DEPTH = 16
"""How many tuples and dicts may be within one another; a list that holds itself ends here, too."""

_Path = tuple[str | int, ...]
"""The name of a value, then the keys and positions that lead into it."""


class StructureMismatchError(ValueError):
    """A value is not built as another one, or a tensor in it is of another kind.

    Attributes:
        place: where in the value, as in ``inputs["image"]``.
        received, wanted: what the value has there, and what the other one has, as in ``as a dict``.
    """

    def __init__(self, place: str, received: str, wanted: str) -> None:
        super().__init__(f"{place} comes {received}, not {wanted}")
        self.place, self.received, self.wanted = place, received, wanted


def check_value(value: Any, name: str, who: str) -> Value:
    """A value from a user's function: lists and named tuples become tuples, mappings become dicts.

    None may stand in the place of a part, as in ``(logits, None)``.

    Args:
        name: what the value is, as in ``inputs``.
        who: what gave it, as in ``train.py: data()``.

    Raises:
        WorkloadError: something in it is no tensor (the place is named), a key is no string, it holds no
            tensor at all, or is nested more than ``MOST_DEPTH`` deep.
    """
    if isinstance(value, Tensor):
        return value
    checked = _check(value, (name,), who)
    if not value_tensors(checked):
        raise WorkloadError(f"{who}: {name} is an empty {type(value).__name__}, it must hold a tensor")
    return checked


def _check(value: Any, path: _Path, who: str) -> Value:
    if isinstance(value, Tensor) or (value is None and len(path) > 1):
        return value
    if isinstance(value, tuple | list | Mapping) and len(path) > MOST_DEPTH:
        raise WorkloadError(f"{who}: {path[0]} is nested more than {MOST_DEPTH} deep")
    if isinstance(value, tuple | list):
        return tuple([_check(part, (*path, at), who) for at, part in enumerate(value)])
    if not isinstance(value, Mapping):
        raise WorkloadError(
            f"{who}: {_describe_path(path)} is of type {type(value).__name__}, not a tensor",
            hint=_way_out(value),
        )
    for key in value:
        if not isinstance(key, str):
            raise WorkloadError(
                f"{who}: {_describe_path(path)} has the key {str(key)[:80]}, a {type(key).__name__}; "
                "keys must be strings",
                hint="str(key), or a list in place of the dict",
            )
    return {key: _check(part, (*path, key), who) for key, part in value.items()}


def _way_out(value: object) -> str:
    if dataclasses.is_dataclass(value):
        return "give its fields as a dict: vars(it)"
    if value is None or isinstance(value, str | bytes):
        return "leave it out, or give its numbers as a tensor"
    return "a tensor, or tuples, lists and dicts of tensors; numbers of samples go into a tensor"


def flatten_value(value: Value) -> tuple[tuple[Tensor, ...], Structure]:
    """The tensors of a value that ``check_value`` gave, in order, and its structure."""
    if isinstance(value, Tensor):
        return (value,), None
    tensors: list[Tensor] = []
    structure = _take_apart(value, tensors)
    return tuple(tensors), structure


def _take_apart(value: Value, tensors: list[Tensor]) -> Structure:
    if isinstance(value, Tensor):
        tensors.append(value)
        return None
    if value is None:
        return {"none": []}
    if isinstance(value, dict):
        return {"dict": {key: _take_apart(part, tensors) for key, part in value.items()}}
    return {"tuple": [_take_apart(part, tensors) for part in value]}


def value_tensors(value: Value) -> tuple[Tensor, ...]:
    """The tensors of a value that ``check_value`` gave, in order."""
    return flatten_value(value)[0]


def flatten_as(value: Value, structure: Structure, name: str) -> tuple[Tensor, ...]:
    """The tensors of a checked value in the structure's order, whatever the order of its own dicts' keys.

    Args:
        name: what the value is, as in ``inputs``.

    Raises:
        StructureMismatchError: the value has other keys or parts than the structure.
    """
    if structure is None and isinstance(value, Tensor):
        return (value,)
    tensors: list[Tensor] = []
    _take_apart_as(value, structure, (name,), tensors)
    return tuple(tensors)


def _take_apart_as(value: Value, structure: Structure, path: _Path, tensors: list[Tensor]) -> None:
    if structure is None and isinstance(value, Tensor):
        tensors.append(value)
    elif structure is not None and "tuple" in structure and isinstance(value, tuple):
        parts = structure["tuple"]
        if len(value) != len(parts):
            words = f"with {len(value)} parts", f"with {len(parts)}"
            raise StructureMismatchError(_describe_path(path), *words)
        for at, (part, inner) in enumerate(zip(value, parts, strict=True)):
            _take_apart_as(part, inner, (*path, at), tensors)
    elif structure is not None and "dict" in structure and isinstance(value, dict):
        parts = structure["dict"]
        if value.keys() != parts.keys():
            raise _other_keys(value.keys(), parts.keys(), path)
        for key, inner in parts.items():
            _take_apart_as(value[key], inner, (*path, key), tensors)
    elif value is not None or structure is None or "none" not in structure:
        kinds = _kind_of(flatten_value(value)[1]), _kind_of(structure)
        raise StructureMismatchError(_describe_path(path), *(f"as {_ARTICLES[kind]}" for kind in kinds))


def _other_keys(have: Collection[str], wanted: Collection[str], path: _Path) -> StructureMismatchError:
    missing, added = sorted(set(wanted) - set(have)), sorted(set(have) - set(wanted))
    key = json.dumps((missing or added)[0])
    words = (f"without the key {key}", "with it") if missing else (f"with the key {key}", "without it")
    return StructureMismatchError(_describe_path(path), *words)


_ARTICLES = {"tensor": "a tensor", "tuple": "a tuple", "dict": "a dict", "none": "None"}


def _kind_of(structure: Structure) -> str:
    return "tensor" if structure is None else next(iter(structure))


def unflatten_value(tensors: Sequence[Tensor], structure: Structure) -> Value:
    """The value of that structure with these tensors, in tuples and dicts of its own.

    Raises:
        ValueError: they are more or fewer tensors than the structure has.
    """
    if structure is None:
        (tensor,) = tensors
        return tensor
    left = iter(tensors)
    try:
        value = _put_together(structure, left)
    except StopIteration:
        raise ValueError(f"{len(tensors)} tensors are too few for a value's structure") from None
    if next(left, None) is not None:
        raise ValueError(f"{len(tensors)} tensors are too many for a value's structure")
    return value


def _put_together(structure: Structure, left: Iterator[Tensor]) -> Value:
    if structure is None:
        return next(left)
    if "none" in structure:
        return None
    if "dict" in structure:
        return {key: _put_together(part, left) for key, part in structure["dict"].items()}
    return tuple([_put_together(part, left) for part in structure["tuple"]])


def map_tensors(function: Callable[[Tensor], Tensor], value: Value) -> Value:
    """A value with ``function`` of each tensor in its place, in tuples and dicts of its own."""
    if isinstance(value, Tensor):
        return function(value)
    if value is None:
        return None
    if isinstance(value, dict):
        return {key: map_tensors(function, part) for key, part in value.items()}
    return tuple([map_tensors(function, part) for part in value])


def copy_containers(value: Value) -> Value:
    """The same tensors in tuples and dicts of its own, for code that may take parts out of a dict."""
    return map_tensors(lambda tensor: tensor, value)


def tensor_places(structure: Structure, name: str) -> list[str]:
    """The place of each tensor of a value with that name and structure, as in ``inputs["image"][0]``."""
    if structure is None:
        return [name]
    ((_, parts),) = structure.items()
    inside = parts.items() if isinstance(parts, Mapping) else enumerate(parts)
    return [place for key, part in inside for place in tensor_places(part, _describe_path((name, key)))]


def describe_structure(structure: Structure, tensors: Iterator[str]) -> str:
    """The structure with these texts of its tensors, as in ``{"x": float32[2, 3], "ids": int64[2]}``."""
    if structure is None:
        return next(tensors)
    if "none" in structure:
        return "None"
    if "dict" in structure:
        parts = [f"{json.dumps(k)}: {describe_structure(p, tensors)}" for k, p in structure["dict"].items()]
        return f"{{{', '.join(parts)}}}"
    return f"({', '.join([describe_structure(part, tensors) for part in structure['tuple']])})"


def read_structure(values: Mapping[str, Any], key: str, tensors: int) -> Structure:
    """The structure of so many tensors that another process, or an earlier run, has written into ``values``.

    Raises:
        WorkloadError: it is missing, is no structure, or one of more or fewer tensors.
    """
    if key not in values:
        raise WorkloadError(f"a workload's description has no {key}")
    structure: Structure = values[key]
    if _count_tensors(structure, 1) != tensors:
        raise WorkloadError(f"a workload's description has {tensors} tensors and a {key} of another number")
    return structure


def _count_tensors(structure: Any, depth: int) -> int:
    if structure is None:
        return 1
    if isinstance(structure, Mapping) and len(structure) == 1 and depth <= MOST_DEPTH:
        ((kind, parts),) = structure.items()
        if kind == "none" and parts == []:
            return 0
        if kind == "tuple" and isinstance(parts, list):
            return sum(_count_tensors(part, depth + 1) for part in parts)
        if kind == "dict" and isinstance(parts, Mapping) and all(isinstance(key, str) for key in parts):
            return sum(_count_tensors(part, depth + 1) for part in parts.values())
    raise WorkloadError(
        f"a workload's description has a {type(structure).__name__} where a structure of tensors must be"
    )


def _describe_path(path: _Path) -> str:
    name, *keys = path
    return f"{name}{''.join(f'[{json.dumps(key)}]' for key in keys)}"
