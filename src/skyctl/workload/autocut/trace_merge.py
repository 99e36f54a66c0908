"""One graph of calls from several traces: at several numbers of samples, in ``train()`` and in ``eval()``.

The traces must have the same calls. An argument that differs is a number that grows with the samples, or is
one thing in training and another in evaluation. An error refuses any other, with its line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from torch import Tensor

from skyctl.workload.autocut.call_graph import (
    ByMode,
    Call,
    ConstantRef,
    HeldRef,
    Rebuilt,
    SampleNumber,
    Trace,
    ValueRef,
)
from skyctl.workload.autocut.tracing_errors import CannotFollowError

FLOAT_TOLERANCE = 1e-9


@dataclass(frozen=True)
class ValueShape:
    """A flowing value's shape for any number of samples: each size is ``fixed + each * samples``."""

    sizes: tuple[SampleNumber, ...]


@dataclass(frozen=True)
class CallGraph:
    """A forward for any number of samples and for both modes.

    Attributes:
        trace: at the fewest samples, in training; its calls and output have merged arguments.
        shapes: of the flowing values.
    """

    trace: Trace
    shapes: tuple[ValueShape, ...]


class _DifferenceError(Exception):
    """Two traces differ; says in what."""


def merge_traces(traces: Sequence[Trace]) -> CallGraph:
    """The graph that all traces are runs of.

    Args:
        traces: at least two in each mode, at different numbers of samples.

    Raises:
        CannotFollowError: they are not runs of one graph; names the line and the innermost module.
    """
    training = sorted((t for t in traces if t.training), key=lambda t: t.samples)
    first = training[0]
    for other in traces:
        _check_same_calls(first, other)
    calls = []
    for index, call in enumerate(first.calls):
        runs = [t.calls[index] for t in traces]
        try:
            args = _merge([run.args for run in runs], traces)
            kwargs = _merge([run.kwargs for run in runs], traces)
        except _DifferenceError as exc:
            raise _cannot(call, f"{call.what}: {exc}") from exc
        calls.append(replace(call, args=args, kwargs=kwargs))
    try:
        output = _merge([t.output for t in traces], traces)
        if any(len(t.values[i].shape) != len(v.shape) for t in traces for i, v in enumerate(first.values)):
            raise _DifferenceError("a tensor has more dimensions in some runs than in others")
        shapes = [
            ValueShape(
                tuple(
                    _fitted([t.values[i].shape[d] for t in training], training) for d in range(len(v.shape))
                )
            )
            for i, v in enumerate(first.values)
        ]
    except _DifferenceError as exc:
        raise CannotFollowError(f"what it returns: {exc}", calls[-1].line if calls else "", "") from exc
    return CallGraph(replace(first, calls=tuple(calls), output=output), tuple(shapes))


def _check_same_calls(trace: Trace, other: Trace) -> None:
    why = f"with {other.samples} samples" if other.training == trace.training else "in eval()"
    for a, b in zip(trace.calls, other.calls, strict=False):
        same = (a.function, a.module, a.scopes) == (b.function, b.module, b.scopes)
        if not same:
            raise _cannot(a, f"here it calls {a.what}, but {b.what} ({b.line}) {why}")
        if len(a.outputs) != len(b.outputs):
            raise _cannot(a, f"{a.what} gives {len(a.outputs)} tensors, but {len(b.outputs)} {why}")
    if len(trace.calls) != len(other.calls):
        longer = max(trace, other, key=lambda t: len(t.calls))
        extra = longer.calls[min(len(trace.calls), len(other.calls))]
        where = (
            why
            if longer is other
            else "in train()"
            if not other.training
            else f"with {trace.samples} samples"
        )
        raise _cannot(extra, f"it calls {extra.what} only {where}")
    if trace.inputs != other.inputs or len(trace.values) != len(other.values):
        raise CannotFollowError(f"it has other values {why}", "", "")


def _cannot(call: Call, reason: str) -> CannotFollowError:
    return CannotFollowError(reason, call.line, call.scopes[-1][0] if call.scopes else "")


def _merge(values: Sequence[Any], traces: Sequence[Trace]) -> Any:
    """One value for all traces; walks as ``map_leaves`` does."""
    first = values[0]
    if any(type(v) is not type(first) for v in values):
        if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
            return _merge_leaf([float(v) for v in values], traces)
        return _by_mode(values, traces)
    if isinstance(first, Rebuilt):
        same = all(
            (v.cls, [n for n, _ in v.fields]) == (first.cls, [n for n, _ in first.fields]) for v in values
        )
        if not same:
            return _by_mode(values, traces)
        merged = [_merge([v.fields[k][1] for v in values], traces) for k in range(len(first.fields))]
        return Rebuilt(first.cls, tuple((n, m) for (n, _), m in zip(first.fields, merged, strict=True)))
    if isinstance(first, tuple | list):
        if any(len(v) != len(first) for v in values):
            return _by_mode(values, traces)
        items = [_merge(column, traces) for column in zip(*values, strict=True)]
        if hasattr(first, "_fields"):
            return type(first)(*items)
        return tuple(items) if isinstance(first, tuple) else items
    if isinstance(first, slice):
        ends = [(v.start, v.stop, v.step) for v in values]
        return slice(*(_merge(column, traces) for column in zip(*ends, strict=True)))
    if isinstance(first, Mapping):
        if any(v.keys() != first.keys() for v in values):
            return _by_mode(values, traces)
        return {key: _merge([v[key] for v in values], traces) for key in first}
    return _merge_leaf(values, traces)


def _merge_leaf(values: Sequence[Any], traces: Sequence[Trace]) -> Any:
    if all(_equal(v, values[0]) for v in values):
        return values[0]
    if not all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        return _by_mode(values, traces)
    by_mode = {}
    for mode in (True, False):
        mine = [(t, v) for t, v in zip(traces, values, strict=True) if t.training == mode]
        by_mode[mode] = _fitted([v for _, v in mine], [t for t, _ in mine])
    same = _simplified(by_mode[True]) == _simplified(by_mode[False])
    return (
        _simplified(by_mode[True])
        if same
        else ByMode(_simplified(by_mode[True]), _simplified(by_mode[False]))
    )


def _by_mode(values: Sequence[Any], traces: Sequence[Trace]) -> ByMode:
    """A value that is the same at all numbers of samples, but not in both modes."""
    kept = {}
    for mode in (True, False):
        mine = [v for t, v in zip(traces, values, strict=True) if t.training == mode]
        if not all(_equal(v, mine[0]) for v in mine):
            raise _DifferenceError(
                f"an argument is {mine[0]!r:.60} or {mine[-1]!r:.60}, by the number of samples"
            )
        kept[mode] = mine[0]
        if isinstance(mine[0], ValueRef | HeldRef | ConstantRef):
            raise _DifferenceError("it takes other tensors in train() than in eval()")
    return ByMode(kept[True], kept[False])


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, Tensor):
        return False
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    return bool(a == b) or (hasattr(a, "__dict__") and not callable(a) and vars(a) == vars(b))


def _fitted(values: Sequence[Any], traces: Sequence[Trace]) -> SampleNumber:
    """The line, or the hyperbola, through numbers of samples and values."""
    whole = all(isinstance(v, int) for v in values)
    points = [(t.samples, Fraction(v)) for t, v in zip(traces, values, strict=True)]
    (x0, y0), (x1, y1) = points[0], points[-1]
    each = (y1 - y0) / (x1 - x0)
    line = SampleNumber(y0 - each * x0, each, whole)
    inverse = SampleNumber(Fraction(0), y0 * x0, whole, inverse=True)
    for fit in (line, inverse):
        if all(math.isclose(fit.at(x), y, rel_tol=FLOAT_TOLERANCE) for x, y in points):
            return fit
    shown = ", ".join(f"{float(y):g} for {x} samples" for x, y in points)
    raise _DifferenceError(f"a number that does not grow in proportion to the samples: {shown}")


def _simplified(number: SampleNumber) -> Any:
    return number if number.each else number.at(1)
