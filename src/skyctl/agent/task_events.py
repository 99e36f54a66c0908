"""What a task on a node tells the launcher: frozen records, checked where they arrive.

On the wire an event is a JSON object whose ``event`` says its kind. Each kind has one dataclass: a rank's
in ``worker.rank_events``, a replicator's in ``checkpoint.replicator_events``, what every task prints here.
(How a task failed is read by ``remote.remote_task``.) The node builds the record and sends ``to_message``
of it, the launcher reads it with ``read_event``. Needs the standard library only.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from skyctl.errors import RunError

T = TypeVar("T")
_Reader = Callable[[Any], Any]


@dataclass(frozen=True)
class LogEvent:
    """Lines that the task printed."""

    kind: ClassVar[str] = "log"
    text: str


def read_event(cls: type[T], message: Mapping[str, Any], node: str) -> T:
    """The message as a record; keys that the record does not have are left out.

    Raises:
        RunError: a key is missing or has a value of another type; it names the node, the event and the field.
    """
    try:
        return cls(**_values(cls, message))
    except _FieldError as exc:
        kind = message.get("event")
        raise RunError(
            f"node {node} sent {kind!r} with {exc}",
            hint="something on that node writes into skyctl's own connection, or it runs another skyctl",
        ) from None


def to_message(event: Any) -> dict[str, Any]:
    """The record as the JSON object that is sent; what has its default value is left out."""
    keys: Mapping[str, str] = getattr(event, "keys", {})
    values = {field: getattr(event, field.name) for field in fields(event)}
    return {"event": event.kind} | {
        keys.get(field.name, field.name): _plain(value)
        for field, value in values.items()
        if field.default is MISSING or value != field.default
    }


class _FieldError(ValueError):
    """What is wrong with one field of a message."""


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _values(cls: type, message: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, key, reader, required in _readers(cls):
        if key in message:
            try:
                found[name] = reader(message[key])
            except _FieldError as exc:
                raise _FieldError(f"{key}: {exc}") from None
        elif required:
            raise _FieldError(f"no {key}")
    return found


@cache
def _readers(cls: type) -> list[tuple[str, str, _Reader, bool]]:
    """By field: its name, its key on the wire, what reads its value, and whether it must be there."""
    hints = get_type_hints(cls)
    keys: Mapping[str, str] = getattr(cls, "keys", {})
    return [
        (
            field.name,
            keys.get(field.name, field.name),
            _reader(hints[field.name]),
            field.default is MISSING and field.default_factory is MISSING,
        )
        for field in fields(cls)
    ]


def _reader(hint: Any) -> _Reader:
    """What turns a JSON value into one of that type; it raises _FieldError for any other value."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: value
    if origin in (Union, types.UnionType):
        inner = _reader(next(arg for arg in args if arg is not types.NoneType))
        return lambda value: None if value is None else inner(value)
    if origin is tuple:
        item = _reader(args[0])
        return lambda value: tuple(item(one) for one in _of(list, value))
    if origin is not None and issubclass(origin, Mapping):
        key, item = (int if args[0] is int else str), _reader(args[1])
        return lambda value: {_key(key, name): item(one) for name, one in _of(dict, value).items()}
    if is_dataclass(hint):
        return lambda value: hint(**_values(hint, _of(dict, value)))  # type: ignore[operator,arg-type]
    if hint is float:
        return lambda value: float(_of((int, float), value))
    return lambda value: _of(hint, value)


def _of(wanted: Any, value: Any) -> Any:
    if isinstance(value, wanted) and not (isinstance(value, bool) and wanted is not bool):
        return value
    name = "number" if isinstance(wanted, tuple) else wanted.__name__
    raise _FieldError(f"{value!r:.60} is no {name}")


def _key(wanted: Callable[[str], Any], name: str) -> Any:
    try:
        return wanted(name)
    except ValueError:
        raise _FieldError(f"{name!r:.60} is no number") from None
