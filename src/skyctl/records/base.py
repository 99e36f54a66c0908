"""The one base of every record, and reading one from JSON with a clear error."""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)
from pydantic._internal._model_construction import ModelMetaclass

from skyctl.errors import InputError, InvalidRecordError, RecordError

T = TypeVar("T")


def _tuple_from_list(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


Seq = Annotated[tuple[T, ...], BeforeValidator(_tuple_from_list)]
"""A tuple that may be given as a list, so that ``Problem(**json.loads(text))`` works in strict mode."""

Seconds = Annotated[float, Field(ge=0)]
MatrixSize = Annotated[
    tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]], BeforeValidator(_tuple_from_list)
]
"""Rows and columns."""
Bytes = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Index = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(min_length=1)]

MAX_FAULT_CHARS = 500
"""Of what is wrong with a field are shown: what stood there may be of any length."""
GIB = 2**30
"""Bytes of one, wherever memory is said in words."""


class _CheckedType(ModelMetaclass):
    """Makes a record, or says what is wrong in skyctl's words; what is within a record is its validator's."""

    if not TYPE_CHECKING:  # type checkers look at the fields

        def __call__(self, *args: Any, **values: Any) -> Any:
            with _in_our_words(self):
                return super().__call__(*args, **values)


@contextmanager
def _in_our_words(cls: type[Record]) -> Iterator[None]:
    """Raises InvalidRecordError where pydantic finds that ``cls`` can't be made of what was given."""
    try:
        yield
    except ValidationError as exc:
        raise InvalidRecordError(
            f"{cls.__name__}: {describe(exc, cls)}",
            errors=[dict(error) for error in exc.errors(include_url=False)],
            hint=f"correct what is named; {cls.__name__} has the fields {', '.join(cls.model_fields)}",
        ) from exc


def timestamp(unit: Literal["seconds", "milliseconds"] = "seconds") -> str:
    """This moment as records have it: ISO 8601 in UTC, to that unit."""
    return datetime.now(UTC).isoformat(timespec=unit)


class Record(BaseModel, metaclass=_CheckedType):
    """Frozen, strict, no unknown keys, no NaN or infinity. Unknown is None, never a made-up number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @classmethod
    def model_validate(cls, *args: Any, **options: Any) -> Self:
        """A record of a mapping, as pydantic's. Raises InvalidRecordError."""
        with _in_our_words(cls):
            return super().model_validate(*args, **options)

    @classmethod
    def model_validate_strings(cls, *args: Any, **options: Any) -> Self:
        """A record of a mapping of texts, as pydantic's. Raises InvalidRecordError."""
        with _in_our_words(cls):
            return super().model_validate_strings(*args, **options)

    @classmethod
    def model_validate_json(cls, *args: Any, **options: Any) -> Self:
        """A record of JSON text, as pydantic's. Raises InvalidRecordError."""
        with _in_our_words(cls):
            return super().model_validate_json(*args, **options)

    def __setattr__(self, name: str, value: Any) -> None:
        with _in_our_words(type(self)):
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        with _in_our_words(type(self)):
            super().__delattr__(name)


def require_record(value: object, cls: type[Record], function: str) -> None:
    """Raises InputError where a function of the Python API is given anything else than that record."""
    if not isinstance(value, cls):
        raise InputError(
            f"{function}() takes a {cls.__name__}, not a {type(value).__name__}",
            hint=f"make one: {cls.__name__}.model_validate(mapping) or .model_validate_json(text)",
        )


class FileRecord(Record):
    """A record that is a file of its own. Subclasses give ``kind`` and ``version`` with literal defaults.

    A file of another version is refused, but for older ones of a class with ``reads_older``.
    """

    reads_older: ClassVar[bool] = False

    def to_json(self) -> str:
        """The file's text: indented JSON, one final newline."""
        return self.model_dump_json(indent=2) + "\n"


R = TypeVar("R", bound=FileRecord)


_USES = {
    "skyctl/problem": "a problem is planned with skyctl plan --problem {file}; what trains is a workload, or "
    "a workload's plan",
    "skyctl/plan": "a plan is trained with skyctl launch {file}, and checked with skyctl verify {file}",
    "skyctl/profile": "a profile is planned from with skyctl plan WORKLOAD --profile {file}",
}
"""The use of a file of each kind, for whoever gave it in another one's place."""
_ANEW = {
    "skyctl/plan": "make it anew: skyctl plan WORKLOAD -o {file}",
    "skyctl/profile": "measure again: skyctl probe WORKLOAD",
    "skyctl/measurement": "start a run anew: skyctl launch PLAN",
    "skyctl/run": "go on with it with the skyctl that started it, or start anew: skyctl launch PLAN",
    "skyctl/setups": "remove it, and make it anew: skyctl setup",
    "skyctl/lab": "end the lab with the skyctl that made it, or remove {file}, and: skyctl lab up lab.yaml",
}
"""How to come to a file of this version, to whoever has one of another."""


def parse(cls: type[R], text: str | bytes, source: str) -> R:
    """Reads one file's text as ``cls``.

    Args:
        text: the JSON.
        source: what to call it in an error (a path).

    Raises:
        RecordError: not JSON, another kind or version, or fields that do not fit.
    """
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise RecordError(f"{source} is not JSON: {exc}") from exc
    kind = cls.model_fields["kind"].default
    if not isinstance(raw, dict):
        raise RecordError(
            f"{source} must hold a JSON object of kind {kind!r}, it holds a {type(raw).__name__}"
        )
    if raw.get("kind") != kind:
        actual = raw.get("kind")
        use = _USES.get(actual) if isinstance(actual, str) else None
        raise RecordError(
            f"{source} must be of kind {kind!r}, its kind is {actual!r}",
            hint=use.format(file=shlex.quote(source)) if use is not None else None,
        )
    _require_version(cls, raw.get("version"), source)
    try:
        return cls.model_validate_json(text)
    except InvalidRecordError as exc:
        raise RecordError(f"{source}: {describe(exc, cls)}") from exc


def _require_version(cls: type[FileRecord], version: object, source: str) -> None:
    """Raises RecordError where a file is of a version that this skyctl does not read."""
    kind, newest = cls.model_fields["kind"].default, cls.model_fields["version"].default
    if cls.reads_older:
        if isinstance(version, int) and version > newest:
            raise RecordError(
                f"{source} is {kind} version {version}; this skyctl reads up to version {newest}",
                hint="upgrade skyctl, or write the file in a version that this one reads",
            )
    elif version is None or (isinstance(version, int) and version != newest):
        given = "without a version" if version is None else f"version {version}"
        anew = _ANEW.get(kind, "make it anew with this skyctl").format(file=shlex.quote(source))
        raise RecordError(f"{source} is {kind} {given}; this skyctl reads version {newest} only", hint=anew)


def describe(
    exc: InvalidRecordError | ValidationError, cls: type[Record] | None = None, limit: int = 5
) -> str:
    """A validation error in words, a line a fault: where, what is wrong, what stood there.

    ``cls``: what was read; then an unknown field's likely meaning is named.
    """
    errors: Sequence[Any] = _without_consequences(exc.errors(include_url=False))
    lines = [_line(e, cls)[:MAX_FAULT_CHARS] for e in errors[:limit]]
    if len(errors) > limit:
        lines.append(f"and {len(errors) - limit} more")
    return "; ".join(lines)


def _without_consequences(errors: Sequence[Any]) -> Sequence[Any]:
    """The faults without lists that are too short only because faults in them were left out."""
    places = [error["loc"] for error in errors]
    return [
        error
        for error in errors
        if error["type"] != "too_short"
        or not any(len(at) > len(error["loc"]) and at[: len(error["loc"])] == error["loc"] for at in places)
    ]


def _line(error: Any, cls: type[Record] | None) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{where}: {_unknown(error['loc'], cls)}"
    message = str(error["msg"]).removeprefix("Value error, ")
    value = error.get("input")
    shown = f" (it is {value!r})" if isinstance(value, str | int | float | bool) or value is None else ""
    if error["type"] == "missing":
        message = "is missing"
    elif error["type"] == "frozen_instance":
        message = "a record can't be changed; make another with model_copy(update=…)"
    elif error["type"] in ("too_short", "string_too_short") and not value:
        message = f"must hold at least {error['ctx']['min_length']}, it is empty"
        shown = ""
    if error["type"] in ("missing", "frozen_instance") or not where:
        shown = ""
    return f"{where}: {message}{shown}" if where else message


def _unknown(loc: tuple[int | str, ...], cls: type[Record] | None) -> str:
    name = str(loc[-1])
    fields = list(_at(cls, loc[:-1]).model_fields) if cls is not None else []
    near = difflib.get_close_matches(name, fields, n=1)
    if near:
        return f"{name!r} is not a field; did you mean {near[0]!r}?"
    return f"{name!r} is not a field" + (f"; there are {', '.join(fields)}" if fields else "")


def _at(cls: type[Record], path: tuple[int | str, ...]) -> type[Record]:
    """The record at that place of a record's JSON."""
    for part in path:
        if part in cls.model_fields:
            cls = _record_in(cls.model_fields[str(part)].annotation) or cls
    return cls


def _record_in(annotation: Any) -> type[Record] | None:
    if isinstance(annotation, type) and issubclass(annotation, Record):
        return annotation
    return next((record_type for part in get_args(annotation) if (record_type := _record_in(part))), None)
