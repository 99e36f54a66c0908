"""Orders from the launcher to tasks: frozen records, checked where they arrive.

On the wire an order is a JSON object: ``order`` says its kind, ``code`` which skyctl has made it, and the
rest are its fields (``message_fields``). Launcher and node have the same code, so nothing may be missing and
nothing may be there that the record does not have. Each kind has one dataclass: a rank's and a helper's in
``worker.rank_order``, a replicator's in ``checkpoint.node.replicator_order``, a probe's in
``probe.node.probe_order``, those of ``setup`` in ``setup.node.setup_orders``, of ``check`` in
``check.check_orders``. A running task gets *requests*: the same, with their kind as ``op``.
Events, the other direction, are in ``task_events``. Needs the standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from skyctl.agent.message_fields import FieldError, read_fields, write_fields
from skyctl.agent.node_package import code_digest
from skyctl.errors import MismatchError, RecordError

T = TypeVar("T")
SHOWN_DIGITS = 12
"""Of a digest, in messages."""


def write_order(order: Any) -> dict[str, Any]:
    """The record as the JSON object that is sent; what has its default value is left out."""
    return {"order": order.kind, "code": code_digest()} | write_fields(order)


def read_order(kinds: Sequence[type[T]], message: Mapping[str, Any]) -> T:
    """The order that has arrived as its record.

    Args:
        kinds: the records of the orders that the task takes.

    Raises:
        MismatchError: another version of skyctl has made the order; both are named.
        RecordError: the order is of another kind, or a field is missing, unknown or wrong; it is named.
    """
    kind, code = message.get("order"), message.get("code")
    if code != code_digest():
        theirs = code[:SHOWN_DIGITS] if isinstance(code, str) else repr(code)[:60]
        raise MismatchError(
            f"the order ({kind!r:.60}) was made by the launcher's skyctl {theirs}, and skyctl "
            f"{code_digest()[:SHOWN_DIGITS]} runs here",
            hint="stop the run and begin it anew, or go on from its checkpoint: each node then gets the "
            "launcher's skyctl",
        )
    return _read(kinds, message, "order")


def write_request(request: Any) -> dict[str, Any]:
    """The record as the JSON object that is sent; what has its default value is left out."""
    return {"op": request.kind} | write_fields(request)


def read_request(kinds: Sequence[type[T]], message: Mapping[str, Any]) -> T:
    """The request that has arrived as its record.

    Args:
        kinds: the records of the requests that the task takes now.

    Raises:
        RecordError: the request is of another kind, or a field is missing, unknown or wrong; it is named.
    """
    return _read(kinds, message, "op")


def _read(kinds: Sequence[type[T]], message: Mapping[str, Any], key: str) -> T:
    """The message as one of the records; ``key``: the one that says its kind."""
    what = "order" if key == "order" else "request"
    by_kind: dict[str, type[T]] = {cls.kind: cls for cls in kinds}  # type: ignore[attr-defined]
    kind = message.get(key)
    cls = by_kind.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise RecordError(f"the {what} is {kind!r:.60}; this task takes {' or '.join(map(repr, by_kind))}")
    fields = {name: value for name, value in message.items() if name not in (key, "code")}
    try:
        return cls(**read_fields(cls, fields, exact=True))
    except FieldError as exc:
        raise RecordError(
            f"the {what} {kind!r} can't be followed: {exc}",
            hint="launcher and node have the same skyctl, so this is its fault: skyctl bug-report",
        ) from None
