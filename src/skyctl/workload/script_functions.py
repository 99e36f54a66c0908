"""The functions of the user's file as they are called: with the script's arguments, and what else they take.

``train.py,width=512`` calls ``model(width=512)``; other functions that have a parameter of that name get it,
too. Signatures are looked at once, when the file is loaded. No torch here.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from skyctl.errors import WorkloadError

Function = Callable[..., Any]

_GIVEN = {
    **{"model": 0, "data": 2, "validation": 2, "example": 1, "loss": 2, "metrics": 2},
    **{"optimizer": 1, "lr_scheduler": 1, "local_steps": 2},
}
"""How many values a function is given by position; only parameters after them can be the script's."""
_SECOND = {"optimizer": "named", "lr_scheduler": "steps"}
"""The value that these functions get in addition, if they ask for a second one; its usual name."""
_PASSED_TO_DATA = ("start", "stop", "owner")
"""Parameters of data() and validation() by which they are told which samples, and whose, are asked for."""
_KINDS: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str}
_KIND_NAMES = {int: "a whole number", float: "a number", bool: "True or False", str: "a text"}
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def bind_functions(
    functions: Mapping[str, Function], arguments: Mapping[str, str], path: Path
) -> dict[str, Function]:
    """The user's functions with the script's arguments bound to them.

    ``optimizer`` and ``lr_scheduler`` can then always be called with two values, ``metrics`` with two.

    Args:
        functions: by name, ``model`` among them.
        arguments: by name, the values as typed.
        path: the user's file.

    Raises:
        WorkloadError: no function takes an argument, ``model`` lacks one, a value is none that a parameter
            can have, or a function's signature is wrong; names the line of the function.
    """
    signatures = {name: _signature(function) for name, function in functions.items()}
    takers = {name: _own_parameters(name, signature) for name, signature in signatures.items()}
    _check_names(arguments, takers, signatures["model"], path)
    bound: dict[str, Function] = {}
    for name, function in functions.items():
        values = {
            key: _parse_value(key, text, [takers[name][key], takers["model"].get(key)], path)
            for key, text in arguments.items()
            if key in takers[name]
        }
        if name == "model":
            values |= {
                key: _parse_value(key, text, [], path)
                for key, text in arguments.items()
                if key not in values and _takes_any(signatures[name])
            }
            _check_complete(function, signatures[name], values, path)
        bound[name] = functools.partial(function, **values) if values else function
        if name in _SECOND:
            bound[name] = _with_second_value(name, bound[name], _signature(bound[name]), function, path)
            if bound[name] is not function:
                functools.update_wrapper(bound[name], function, (), ())  # so that errors can name its line
        elif name == "metrics":
            _check_takes_two(bound[name], function, path)
    return bound


def locate_function(function: Function, path: Path) -> str:
    """The line at which the user's function begins, as in ``train.py, line 12``; if unknown, the file."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    file = Path(code.co_filename) if code is not None else None
    if code is None or file is None or not file.is_relative_to(path.parent):
        return path.name
    return f"{file.relative_to(path.parent)}, line {code.co_firstlineno}"


def _signature(function: Function) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # a builtin that does not tell
        return None


def _own_parameters(name: str, signature: inspect.Signature | None) -> dict[str, inspect.Parameter]:
    """By name, the parameters of a function that the script's arguments may be given to."""
    if signature is None:
        return {}
    parameters = list(signature.parameters.values())
    own = [p for p in parameters[_GIVEN.get(name, 0) :] if p.kind in _NAMED]
    passed = _PASSED_TO_DATA if name in ("data", "validation") else ()
    return {p.name: p for p in own if p.name not in passed}


def _takes_any(signature: inspect.Signature | None) -> bool:
    return signature is None or any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())


def _check_names(
    arguments: Mapping[str, str],
    takers: Mapping[str, Mapping[str, inspect.Parameter]],
    model: inspect.Signature | None,
    path: Path,
) -> None:
    """Refuses an argument that no function takes."""
    taken = list(dict.fromkeys(key for own in takers.values() for key in own))
    for key in arguments:
        if key not in taken and not _takes_any(model):
            close = difflib.get_close_matches(key, taken, n=1, cutoff=0.5)
            guess = f" (did you mean {close[0]!r}?)" if close else ""
            takes = ", ".join(takers["model"]) or "no argument"
            raise WorkloadError(f"{path.name}: model() has no parameter {key!r}{guess}; it takes {takes}")


def _check_complete(
    function: Function, signature: inspect.Signature | None, values: Mapping[str, Any], path: Path
) -> None:
    """Refuses a ``model`` with parameters that have neither a default nor an argument."""
    parameters = signature.parameters.values() if signature is not None else ()
    missing = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind in (*_POSITIONAL, p.KEYWORD_ONLY) and p.name not in values
    ]
    if missing:
        raise WorkloadError(
            f"{locate_function(function, path)}: model() needs {', '.join(missing)}, which "
            f"{'have' if len(missing) > 1 else 'has'} no default",
            hint=f"{path.name},{','.join(f'{name}=VALUE' for name in missing)}, or give a default",
        )


def _with_second_value(
    name: str, bound: Function, signature: inspect.Signature | None, function: Function, path: Path
) -> Function:
    """``bound`` as a function of two values, of which it gets the second only where it asks for one.

    It asks with a second parameter that has no default, or with one of the usual name.
    """
    parameters = list(signature.parameters.values()) if signature is not None else []
    first, rest = parameters[:1], parameters[1:]
    needed = [p for p in rest if p.default is p.empty and p.kind in (*_POSITIONAL, p.KEYWORD_ONLY)]
    takes_first = signature is None or any(p.kind in (*_POSITIONAL, p.VAR_POSITIONAL) for p in first)
    if not takes_first or len(needed) > 1:
        given = {"optimizer": "parameters", "lr_scheduler": "optimizer"}[name]
        raise WorkloadError(
            f"{locate_function(function, path)}: {name}{signature} can't be called: it is given {given} and, "
            f"where it has a second parameter, {_SECOND[name]}",
            hint=f"def {name}({given}): … or def {name}({given}, {_SECOND[name]}): …",
        )
    second = next((p for p in rest if p in needed or (p.name == _SECOND[name] and p.kind in _NAMED)), None)
    if second is None:
        return lambda value, _second: bound(value)
    if second.kind is second.POSITIONAL_ONLY:
        return bound
    key = second.name
    return lambda value, more: bound(value, **{key: more})


def _check_takes_two(bound: Function, function: Function, path: Path) -> None:
    signature = _signature(bound)
    try:
        if signature is not None:
            signature.bind(None, None)
    except TypeError as exc:
        raise WorkloadError(
            f"{locate_function(function, path)}: metrics{signature} can't be called with (outputs, targets): "
            f"{exc}",
            hint="def metrics(outputs, targets): return {'accuracy': …}",
        ) from exc


def _parse_value(key: str, text: str, same_named: list[inspect.Parameter | None], path: Path) -> Any:
    """An argument's value as its parameter's annotation or default says, else a number where it is one.

    Args:
        same_named: the parameters that may tell its type, the first that does counts.
    """
    parameters = [p for p in same_named if p is not None]
    if text == "None" and any(_can_be_none(p) for p in parameters):
        return None
    kind = next((stated for p in parameters if (stated := _kind_of(p)) is not None), None)
    if kind is None:
        return _parse_literal(text)
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        return kind(text)
    except (KeyError, ValueError):
        raise WorkloadError(
            f"{path.name}: {key} must be {_KIND_NAMES[kind]}, not {text!r:.80}",
            hint=f"as in {path.name},{key}={ {int: '512', float: '0.5', bool: 'True'}[kind] }",
        ) from None


def _parse_literal(text: str) -> Any:
    """A whole number, a finite number, True or False; else the text itself."""
    if text in ("True", "False"):
        return text == "True"
    with suppress(ValueError):
        return int(text)
    with suppress(ValueError):
        if math.isfinite(number := float(text)):
            return number
    return text


def _annotations(parameter: inspect.Parameter) -> list[Any]:
    """The types that an annotation allows: the members of a union, each a type or a name."""
    annotation = parameter.annotation
    if annotation is parameter.empty:
        return []
    if isinstance(annotation, str):
        text = annotation.removeprefix("typing.").removeprefix("t.")
        if text.startswith("Optional["):
            text = text.removeprefix("Optional[").removesuffix("]") + " | None"
        return [part.strip() for part in text.split("|")]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return list(typing.get_args(annotation))
    return [annotation]


def _can_be_none(parameter: inspect.Parameter) -> bool:
    return parameter.default is None or any(
        hint in (None, types.NoneType, "None") for hint in _annotations(parameter)
    )


def _kind_of(parameter: inspect.Parameter) -> type | None:
    """The type that a parameter's values have, of int, float, bool and str; None: it does not say."""
    allowed = [hint for hint in _annotations(parameter) if hint not in (None, types.NoneType, "None")]
    if len(allowed) == 1:
        name = allowed[0] if isinstance(allowed[0], str) else getattr(allowed[0], "__name__", "")
        return _KINDS.get(name)
    if allowed:
        return None
    return _KINDS.get(type(parameter.default).__name__)
