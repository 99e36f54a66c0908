"""An ordinary module as layers that compute the same, cut between its blocks.

Its forward is run on fake tensors, at several numbers of samples and in both modes (``tracer``); the runs are
made into one graph (``trace_merge``), which is cut where little is carried (``cut_positions``) into layers
that run its calls (``traced_layer``). Which modules to look into follows from what they hold: the model
itself, sequences, and whatever holds a list of modules that are made of others. A module that can't be
followed is one call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import nn

from skyctl.errors import WorkloadError
from skyctl.workload.autocut import traced_layer
from skyctl.workload.autocut.call_graph import Call, Trace, ValueRef, leaves_of
from skyctl.workload.autocut.cut_positions import CutFinder
from skyctl.workload.autocut.trace_merge import CallGraph, merge_traces
from skyctl.workload.autocut.tracer import Tracer
from skyctl.workload.autocut.tracing_errors import CannotFollowError
from skyctl.workload.autocut.value_fallback import ValueFallback
from skyctl.workload.data import BatchExample
from skyctl.workload.hooks import locate_hook, module_hooks
from skyctl.workload.layered_model import LayeredModel
from skyctl.workload.python_state import BUFFER, AttributeLines, changed_value, snapshot
from skyctl.workload.real_runs import TooLargeError, is_for_lack_of_values
from skyctl.workload.shape_inference import ShapeInference
from skyctl.workload.structures import flatten_value
from skyctl.workload.user_code import describe_exception, locate_error

TRAINING_SAMPLES, EVALUATION_SAMPLES = (4, 6, 8), (4, 6)
"""Numbers of samples at which the forward is traced: even, for models that pair them."""

WAY_OUT = "change that line, or let model() give a list of layers (docs/workloads.md#ordinary-modules)"
INTO_A_SUBMODULE = (
    "move that line into a submodule, which is called as a whole: its results must have the same shape "
    "whatever the values are"
)
UNTYING = (
    "all that runs between a parameter's uses stays in one layer: let them follow one another in forward(), "
    "or give each use a parameter of its own"
)


def cut_model(model: LayeredModel, example: BatchExample, count: int | None = None) -> LayeredModel:
    """An ordinary model's only layer cut into layers.

    Args:
        count: how many they are where it was planned; None: here is where it is planned.

    Raises:
        WorkloadError: it can't be cut; names the line and the reason.
    """
    assert model.path is not None
    whole = ShapeInference(model, example)
    fake = FakeModule(whole.fake_layers[0], lambda samples: whole.fake_batch(samples)[0], whole.fake_mode)
    try:
        names, layers = cut_module(model.layers[0], fake, model.path, model.source_name)
    except WorkloadError as exc:
        if not is_for_lack_of_values(exc):
            raise
        ValueFallback(model).install(fake.module)
        names, layers = cut_module(model.layers[0], fake, model.path, model.source_name)
    if count is not None and len(layers) != count:
        raise WorkloadError(
            f"{model.source_name}: its module is cut into {len(layers)} layers here, and into {count} where "
            "it was planned",
            hint="the packages that it is made of must have the same versions on both: see skyctl setup",
        )
    return replace(model, names=names, layers=layers)


@dataclass(frozen=True)
class FakeModule:
    """A module with fake tensors in the place of its own, and inputs for it.

    Attributes:
        inputs: gives a batch's inputs for a number of samples.
        mode: the fake tensor mode, to be entered around calls.
    """

    module: nn.Module
    inputs: Callable[[int], Any]
    mode: Any


def cut_module(model: nn.Module, fake: FakeModule, path: Path, who: str) -> tuple[list[str], list[nn.Module]]:
    """The layers of a module, with their names.

    Args:
        model: whose submodules and tensors the layers take, under their names.
        path: the user's file, for the lines in errors.
        who: what to call the model in errors.

    Raises:
        WorkloadError: it can't be cut; names the line and the reason.
    """
    try:
        graph = _find_graph(fake, path)
    except CannotFollowError as exc:
        if isinstance(exc.__cause__, TooLargeError):
            raise exc.__cause__ from exc
        place = f" ({exc.line})" if exc.line else ""
        raise WorkloadError(
            f"{who}: the {type(model).__name__} of model() can't be cut into layers: {exc.reason}{place}",
            hint=f"{INTO_A_SUBMODULE}; or {WAY_OUT}" if is_for_lack_of_values(exc) else WAY_OUT,
        ) from exc
    if not graph.trace.calls:
        raise WorkloadError(f"{who}: the {type(model).__name__} of model() calls nothing", hint=WAY_OUT)
    finder = CutFinder(graph, fake.module)
    positions = finder.positions()
    if not positions and finder.forbidden:
        why = next(iter(finder.forbidden.values()))
        raise WorkloadError(
            f"{who}: the {type(model).__name__} of model() can't be cut into layers: {why}", hint=UNTYING
        )
    return finder.names(positions), _make_layers(finder, positions, model)


def _find_graph(fake: FakeModule, path: Path) -> CallGraph:
    """The graph of the forward; modules that can't be followed are closed one after the other."""
    opened = {name for name, module in fake.module.named_modules() if is_opened(name, module)}
    hook = next(iter(module_hooks(fake.module, backward=True)), None)
    if hook is not None:
        reason = "it has a backward hook, which needs all of it on one machine"
        raise CannotFollowError(reason, locate_hook(hook, path), "")
    _refuse_counters(fake, opened, path)
    while True:
        try:
            traces = [_trace(fake, opened, path, samples, training=True) for samples in TRAINING_SAMPLES]
            traces += [_trace(fake, opened, path, samples, training=False) for samples in EVALUATION_SAMPLES]
            return merge_traces(traces)
        except CannotFollowError as exc:
            if not exc.scope or isinstance(exc.__cause__, TooLargeError):
                raise
            opened = {name for name in opened if name != exc.scope and not name.startswith(exc.scope + ".")}


def _refuse_counters(fake: FakeModule, opened: set[str], path: Path) -> None:
    """Runs the forward twice alike.

    Raises:
        CannotFollowError: the second run changes a number of an opened module again, of which layers would
            have one value for ever; names the line. Modules called as a whole keep and change their own.
    """
    lines = AttributeLines(path.parent)
    kept: list[dict[tuple[int, str], Any]] = []
    with lines.noted():
        for _ in range(2):
            with suppress(CannotFollowError):  # it is told by those who need the graph
                _trace(fake, opened, path, TRAINING_SAMPLES[0], training=True)
            kept.append(snapshot([fake.module.get_submodule(name) for name in opened], path.parent))
    changed = changed_value(kept[0], kept[1], fake.module, lines)
    if changed is not None:
        line, what = changed
        reason = f"{what}: on another machine, or after a resume, it is another number ({BUFFER})"
        raise CannotFollowError(reason, line, "")


def is_opened(name: str, module: nn.Module) -> bool:
    """Whether to look into a module: a sequence, or one that holds a list of modules made of others.

    One with a backward hook is called as a whole.
    """
    if name and module_hooks(module, backward=True):
        return False
    if not name or type(module).forward is nn.Sequential.forward:
        return True
    return any(
        any(True for _ in child.children()) and any(True for _ in child.parameters())
        for inner in module.modules()
        if isinstance(inner, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        for child in inner.children()
    )


def _trace(fake: FakeModule, opened: set[str], path: Path, samples: int, *, training: bool) -> Trace:
    fake.module.train(training)
    inputs = fake.inputs(samples)
    args, kwargs = bind_inputs(fake.module.forward, inputs)
    tracer = Tracer(fake.module, opened, path)
    try:
        with fake.mode:
            return tracer.run(fake.module, flatten_value(inputs)[0], args, kwargs, samples)
    except CannotFollowError:
        raise
    except Exception as exc:
        line = locate_error(exc, path) or ""
        raise CannotFollowError(f"its forward fails: {describe_exception(exc)}", line, "") from exc


def bind_inputs(forward: Callable[..., Any], inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) with which a forward takes a batch's inputs.

    A tuple is spread over its parameters if it has as many, a dict by name if it has these; else the
    forward is given the whole.
    """
    parameters = list(inspect.signature(forward).parameters.values())
    by_name = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    kinds = {p.kind for p in parameters}
    if isinstance(inputs, dict) and (inputs.keys() <= by_name or inspect.Parameter.VAR_KEYWORD in kinds):
        return (), dict(inputs)
    takes_any = inspect.Parameter.VAR_POSITIONAL in kinds
    if isinstance(inputs, tuple) and (takes_any or len(by_place) >= len(inputs)):
        return inputs, {}
    return (inputs,), {}


def _make_layers(finder: CutFinder, positions: Sequence[int], model: nn.Module) -> list[nn.Module]:
    graph, calls = finder.graph, finder.calls
    modes = traced_layer.ModuleModes.read(model)
    bounds = [0, *positions, len(calls)]
    layers: list[nn.Module] = []
    seen: set[str] = set()
    for start, stop in pairwise(bounds):
        inputs = finder.carried(start)
        last = stop == len(calls)
        outputs = None if last else finder.carried(stop)
        returned = graph.trace.output if last else None
        own = [call for index, call in enumerate(calls[start:stop], start) if not finder.shape_only[index]]
        wanted = _value_numbers(own) | set(outputs or ())
        wanted |= {leaf.number for leaf in leaves_of(returned) if isinstance(leaf, ValueRef)}
        chosen = _with_shape_only(finder, start, stop, wanted)
        count = _sample_count(graph, inputs)
        program = traced_layer.make_program(chosen, inputs, outputs, returned, count)
        layers.append(traced_layer.make_layer(program, model, graph.trace.constants, seen, modes))
    for name in traced_layer.unused_weights(model, layers):
        traced_layer.place_tensor(layers[-1], name, model, seen)
    return layers


def _value_numbers(calls: Sequence[Call]) -> set[int]:
    return {leaf.number for call in calls for leaf in call.refs() if isinstance(leaf, ValueRef)}


def _with_shape_only(finder: CutFinder, start: int, stop: int, wanted: set[int]) -> list[Call]:
    """The calls [start, stop) of a layer, and those before it that make what depends on shapes alone."""
    chosen: list[Call] = []
    storages = {finder.values[number].storage for number in wanted}
    for index in range(stop - 1, -1, -1):
        call = finder.calls[index]
        if finder.shape_only[index]:
            if not (wanted & set(call.outputs) or storages & call.writes):
                continue
            new = _value_numbers([call])
            wanted |= new
            storages |= {finder.values[number].storage for number in new}
        elif index < start:
            continue
        chosen.append(call)
    return chosen[::-1]


def _sample_count(graph: CallGraph, inputs: Sequence[int]) -> traced_layer.SampleCount:
    return next(
        traced_layer.SampleCount(place, dimension, size)
        for place, number in enumerate(inputs)
        for dimension, size in enumerate(graph.shapes[number].sizes)
        if size.each
    )
