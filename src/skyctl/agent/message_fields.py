"""The fields of messages between launcher and tasks: the values they may have, written and read as JSON.

Orders (``task_orders``) and events (``task_events``) are both made of them. Needs the standard library only.
A field's annotation says it all. ``Annotated`` narrows it: ``Within`` a number, ``MaxLength`` a text, a list
or a mapping, ``Matches`` a text; ``AnyNumber`` allows NaN and infinity. Without it a number must be finite,
and everything has a length that no honest event comes near: what a node sends is kept in memory and on disk.
"""

from __future__ import annotations

import ipaddress
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

MAX_TEXT_CHARS = 16 << 10
MAX_ITEMS = 100_000
MAX_WHOLE = 1 << 63
NUMBER_LIMIT = 10**8
"""Steps, layers and ranks are numbers below this."""


class FieldError(ValueError):
    """The fault in one field of a message."""


@dataclass(frozen=True)
class Within:
    """A number from ``low`` to ``high``, both included."""

    low: float
    high: float


@dataclass(frozen=True)
class AnyNumber:
    """NaN and infinity are values too: a loss that has diverged."""


@dataclass(frozen=True)
class MaxLength:
    """At most so many characters or items."""

    count: int


@dataclass(frozen=True)
class Matches:
    """A text that is wholly as the regular expression says."""

    pattern: str


@dataclass(frozen=True)
class Ipv4:
    """A text that is an IPv4 address."""


Seconds = Annotated[float, Within(0.0, 1e9)]
Bytes = Annotated[float, Within(0.0, 2.0**60)]
Index = Annotated[int, Within(0, NUMBER_LIMIT - 1)]
Count = Annotated[int, Within(1, NUMBER_LIMIT - 1)]
ByteCount = Annotated[int, Within(0, 1 << 60)]
Port = Annotated[int, Within(1, 65535)]
Address = Annotated[str, Ipv4()]
Label = Annotated[str, MaxLength(1000)]
"""A name, a version, a phase: something that goes into a line."""
Sha256 = Annotated[str, Matches("[0-9a-f]{64}")]
DeviceName = Annotated[str, Matches("[a-z]{1,20}(:[0-9]{1,3})?")]
"""A device as its node calls it, as in ``cuda:1`` or ``cpu``."""


def with_index(device: str) -> str:
    """``cpu`` → ``cpu:0``; a name that has its number stays as it is."""
    return device if ":" in device else f"{device}:0"


_Reader = Callable[[Any], Any]


def read_fields(cls: type, message: Mapping[str, Any], *, exact: bool = False) -> dict[str, Any]:
    """The values of a dataclass's fields from a JSON object.

    Args:
        exact: keys that the dataclass does not have are refused, within it too; else they are left out.

    Raises:
        FieldError: a key is missing, or its value is none that the field can have.
    """
    fields = {}
    readers = _readers(cls, exact)
    if exact and (unknown := message.keys() - {key for _, key, _, _ in readers}):
        raise FieldError(f"there is no field {min(unknown)!r:.60}")
    for name, key, reader, required in readers:
        if key in message:
            try:
                fields[name] = reader(message[key])
            except FieldError as exc:
                raise FieldError(f"{key}: {exc}") from None
        elif required:
            raise FieldError(f"no {key}")
    return fields


def write_fields(record: Any) -> dict[str, Any]:
    """A dataclass's fields as a JSON object, for ``read_fields``; what has its default value is left out."""
    cls: type = type(record)
    return {
        key: _plain(value)
        for name, key, default in _written(cls)
        if (value := getattr(record, name)) != default  # MISSING equals nothing
    }


@cache
def _written(cls: type) -> list[tuple[str, str, Any]]:
    """By field: its name, its key on the wire, and its default value."""
    keys: Mapping[str, str] = getattr(cls, "keys", {})
    return [(field.name, keys.get(field.name, field.name), field.default) for field in fields(cls)]


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):  # most are: asking for the rest takes longer
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return write_fields(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, Path):
        return str(value)
    return [_plain(part) for part in value] if isinstance(value, tuple) else value


def clean_text(text: str) -> str:
    """The text without halves of surrogate pairs, which JSON can hold and no file or terminal can."""
    return text.encode("utf-8", "replace").decode()


@cache
def _readers(cls: type, exact: bool) -> list[tuple[str, str, _Reader, bool]]:
    """By field: its name, its key on the wire, what reads its value, and whether it must be there."""
    hints = get_type_hints(cls, include_extras=True)
    keys: Mapping[str, str] = getattr(cls, "keys", {})
    return [
        (
            field.name,
            keys.get(field.name, field.name),
            _reader(hints[field.name], (), exact),
            field.default is MISSING and field.default_factory is MISSING,
        )
        for field in fields(cls)
    ]


def _reader(hint: Any, limits: tuple[Any, ...], exact: bool) -> _Reader:
    """The function that reads a JSON value as that type; it raises FieldError for any other value."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: value
    if origin is Annotated:
        return _reader(args[0], (*args[1:], *limits), exact)
    if origin in (Union, types.UnionType):
        inner = _reader(next(arg for arg in args if arg is not types.NoneType), limits, exact)
        return lambda value: None if value is None else inner(value)
    if origin is tuple and Ellipsis not in args:
        return _tuple_reader(args, exact)
    if origin in (tuple, Sequence):
        return _list_reader(args[0], limits, exact)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping_reader(args, limits, exact)
    if is_dataclass(hint):
        return lambda value: hint(**read_fields(hint, _of(dict, value), exact=exact))  # type: ignore[operator,arg-type]
    if hint in (int, float):
        return _number_reader(hint, limits)
    if hint in (str, Path):
        text = _text_reader(limits)
        return text if hint is str else lambda value: Path(text(value))
    return lambda value: _of(hint, value)


def _tuple_reader(args: tuple[Any, ...], exact: bool) -> _Reader:
    items = [_reader(arg, (), exact) for arg in args]

    def read(value: Any) -> Any:
        if len(_of(list, value)) != len(items):
            raise FieldError(f"{len(value)} items, not {len(items)}")
        return tuple(item(part) for item, part in zip(items, value, strict=True))

    return read


def _list_reader(hint: Any, limits: tuple[Any, ...], exact: bool) -> _Reader:
    most = _limit(MaxLength, limits, MaxLength(MAX_ITEMS)).count
    item = _reader(hint, (), exact)
    return lambda value: tuple(item(part) for part in _short(_of(list, value), most))


def _mapping_reader(args: tuple[Any, ...], limits: tuple[Any, ...], exact: bool) -> _Reader:
    most = _limit(MaxLength, limits, MaxLength(MAX_ITEMS)).count
    key = _read_index if args[0] is int else _reader(args[0], (), exact)
    item = _reader(args[1], (), exact)
    return lambda value: {key(name): item(part) for name, part in _short(_of(dict, value), most).items()}


def _number_reader(kind: type, limits: tuple[Any, ...]) -> _Reader:
    span = _limit(Within, limits, Within(-MAX_WHOLE, MAX_WHOLE) if kind is int else None)
    any_number = _limit(AnyNumber, limits, None) is not None
    types_ = int if kind is int else (int, float)

    def read(value: Any) -> Any:
        try:
            number = kind(_of(types_, value))
        except OverflowError:
            raise FieldError(f"a number of {len(str(value))} digits") from None
        if not (any_number or isinstance(number, int) or math.isfinite(number)):
            raise FieldError(f"{number} is no number")
        if span is not None and not span.low <= number <= span.high:
            raise FieldError(f"{str(number)[:60]} is not from {span.low:g} to {span.high:g}")
        return number

    return read


def _text_reader(limits: tuple[Any, ...]) -> _Reader:
    most = _limit(MaxLength, limits, MaxLength(MAX_TEXT_CHARS)).count
    wanted = _limit(Matches, limits, None)
    address = _limit(Ipv4, limits, None) is not None

    def read(value: Any) -> str:
        text = clean_text(_short(_of(str, value), most))
        if wanted is not None and not re.fullmatch(wanted.pattern, text):
            raise FieldError(f"{text!r:.60} is not of the form {wanted.pattern}")
        if address:
            try:
                ipaddress.IPv4Address(text)
            except ValueError:
                raise FieldError(f"{text!r:.60} is no IPv4 address") from None
        return text

    return read


def _limit(kind: type, limits: tuple[Any, ...], default: Any) -> Any:
    """The innermost limit of that kind, or the default."""
    return next((limit for limit in limits if isinstance(limit, kind)), default)


def _short(value: Any, most: int) -> Any:
    if len(value) > most:
        what = "characters" if isinstance(value, str) else "items"
        raise FieldError(f"{len(value)} {what}, more than {most}")
    return value


def _of(wanted: Any, value: Any) -> Any:
    if isinstance(value, wanted) and not (isinstance(value, bool) and wanted is not bool):
        return value
    name = "number" if isinstance(wanted, tuple) else wanted.__name__
    shown = type(value).__name__ if isinstance(value, dict | list) else repr(value)[:60]
    raise FieldError(f"{shown} is no {name}")


def _read_index(name: str) -> int:
    if not re.fullmatch("[0-9]{1,8}", name):
        raise FieldError(f"{name!r:.60} is no number")
    return int(name)
