"""The planner's question: layers, devices, links. Model of time and memory: ``docs/contract.md``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from skyctl.records.base import (
    Bytes,
    Count,
    FileRecord,
    Index,
    MatrixSize,
    Name,
    Positive,
    Record,
    Seconds,
    Seq,
)
from skyctl.records.cluster import node_of
from skyctl.records.rhythm import Rhythm
from skyctl.records.sync_format import WEIGHT_FORMATS, SyncFormat, powersgd_rank

LARGEST = 1e300
"""Totals above this (seconds of a step, bytes of the model) overflow when computed with."""
MOST_MICROBATCHES = 100_000
"""A step is played microbatch by microbatch: with more, planning takes minutes, whatever its time limit."""
MOST_WINDOW = 1_000_000
MOST_LISTED = 12
"""How many devices an error lists when a name matches none of them."""

Schedule = Literal["sequential", "gpipe", "1f1b", "eager-1f1b", "zero-bubble"]
Objective = Literal["iteration", "bottleneck"]
LinkDtype = Literal["float32", "bfloat16", "int8"]
Parallel = Literal["pipeline", "data", "hybrid"]
SyncRoutes = Literal["auto", "ring", "star", "server", "trees"]
MOST_UNCERTAINTY = 10.0
Uncertainty = Annotated[float, Field(ge=0, le=MOST_UNCERTAINTY)]
"""A relative standard uncertainty: 0.1 means that two figures of three are within about a tenth."""


class Layer(Record):
    """The costs of one layer per microbatch. ``flops``: forward and backward together.

    ``deferred_bytes``: what is kept more, until they are computed, where weight gradients are put off.
    ``gradient_bytes``: of its trained parameters' gradients in float32. None: a quarter of ``state_bytes``.
    ``gradient_matrices``: (rows, columns) of its trained parameters of two dimensions or more, rows being the
    first dimension. None: not known.
    """

    name: Name
    flops: float = Field(ge=0)
    state_bytes: Bytes
    activation_bytes: Bytes
    output_bytes: Bytes
    workspace_bytes: Bytes = 0.0
    deferred_bytes: Bytes = 0.0
    gradient_bytes: Bytes | None = None
    gradient_matrices: Seq[MatrixSize] | None = None


class Device(Record):
    """A device and what it can hold; ``memory_bytes`` None: unlimited.

    On top of its layers a microbatch takes ``handling_s`` there, ``neighbour_s`` for each neighbouring stage,
    and ``action_s`` in its forward and backward themselves. Half of that is forward, and half backward.
    ``step_s``: what a step takes there once, to begin and to end it (``Problem.with_steps_spread``).

    ``time_uncertainty``, ``overhead_uncertainty``: how far the seconds of its layers, and those on top of
    them, may be from what a run takes, as a relative standard uncertainty (JCGM 100). None: nobody knows.

    ``reduce_byte_s``, ``message_byte_s``: processor seconds to add a byte of a received gradient to its own,
    and to send or to receive a byte.

    ``step_factors``: how uneven its steps are: what they took in its layers ÷ their median, ascending and
    equally likely. None are given: all alike, as far as is known.
    """

    id: Name
    flops_per_s: Positive
    memory_bytes: Bytes | None
    reserved_bytes: Bytes = 0.0
    handling_s: Seconds = 0.0
    neighbour_s: Seconds = 0.0
    action_s: Seconds = 0.0
    step_s: Seconds = 0.0
    time_uncertainty: Uncertainty | None = None
    overhead_uncertainty: Uncertainty | None = None
    reduce_byte_s: Seconds = 0.0
    message_byte_s: Seconds = 0.0
    step_factors: Seq[Positive] = ()


class Tie(Record):
    """Layers that share trained parameters; ``bytes``: of these parameters' gradients in float32.

    If the layers lie in several stages, each stage holds a copy, and every step sums the gradients.
    """

    layers: Seq[Index] = Field(min_length=2)
    bytes: Bytes


class LayerTimes(Record):
    """Measured seconds per layer on one device; ``optimizer_s`` per step, the others per microbatch.

    ``weight_s``: the part of a backward that only weight gradients need (None: not known). ``split_s``: what
    a backward takes under ``zero-bubble``, both parts together (None: ``backward_s``).
    """

    forward_s: Seq[Seconds]
    backward_s: Seq[Seconds]
    optimizer_s: Seq[Seconds]
    weight_s: Seq[Seconds] | None = None
    split_s: Seq[Seconds] | None = None


class Link(Record):
    """A directed link between two devices; where there is none, messages take no time.

    ``dtype``: what numbers are sent as (None: as they are); ``sent_share``: bytes on the link for a byte of a
    layer's output. ``uncertainty``: of a message's seconds, as a device's ``time_uncertainty``.
    """

    source: Name
    target: Name
    latency_s: Seconds
    bandwidth_bytes_per_s: Positive
    dtype: LinkDtype | None = None
    sent_share: Positive = 1.0
    uncertainty: Uncertainty | None = None


class SharedResource(Record):
    """A resource that several links share (uplink, NIC): every message over one of ``links`` occupies it."""

    name: Name
    bandwidth_bytes_per_s: Positive
    links: Seq[Seq[Name]]


class Problem(FileRecord):
    """The planner's whole input: everything that a plan depends on, and nothing else.

    Files of older versions are read, too: each version so far only added fields that may be left out.

    ``recompute``: a stage may keep only its layers' inputs and compute the rest again in the backward.
    ``parallel``: one pipeline over the devices, or ``data``: every device that takes part holds all layers,
    and their gradients are summed in ``sync_format``; ``hybrid``: several pipelines side by side, each with
    cuts of its own. ``ties``: layers that share parameters, in their order.
    ``sync``: over which routes they are summed; ``auto``: the fastest of a ring, a star and, where
    they save a twentieth of a step, packed trees. ``server``: a star whose root may be a helper.
    ``helpers``: devices that hold nothing, and that routes may go over with ``auto``, ``server`` and
    ``trees``; None: any that holds nothing may help.
    ``rhythm``: when what is summed takes effect.
    ``sync_uncompressed_steps``: with ``powersgd:R``, how many of a run's first steps are summed in float32.
    ``owners``: in rounds, the nodes of each owner of data; its own data is trained on by these alone, by one
    pipeline over all of them or fewer. None: all pipelines share the same batches.
    """

    reads_older: ClassVar[bool] = True
    kind: Literal["skyctl/problem"] = "skyctl/problem"
    version: Literal[14] = 14
    layers: Seq[Layer] = Field(min_length=1)
    devices: Seq[Device] = Field(min_length=1)
    times: dict[str, LayerTimes] = Field(default_factory=dict)
    links: Seq[Link] = ()
    shared: Seq[SharedResource] = ()
    first_stage: Seq[Name] | None = None
    last_stage: Seq[Name] | None = None
    microbatches: Count
    receive_window: Index = 0
    schedule: Schedule = "1f1b"
    objective: Objective = "iteration"
    recompute: bool = False
    parallel: Parallel = "pipeline"
    sync_format: SyncFormat = "float32"
    sync: SyncRoutes = "auto"
    helpers: Seq[Name] | None = None
    ties: Seq[Tie] = ()
    rhythm: Rhythm = Rhythm()
    sync_uncompressed_steps: Index = 0
    owners: Seq[Seq[Name]] | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_older(cls, raw: Any) -> Any:
        newest = cls.model_fields["version"].default
        given = raw.get("version") if isinstance(raw, dict) else None
        if isinstance(given, int) and not isinstance(given, bool) and 1 <= given < newest:
            return {**raw, "version": newest}
        return raw

    @model_validator(mode="after")
    def _consistent(self) -> Problem:
        ids = [device.id for device in self.devices]
        device_ids = set(ids)
        if len(device_ids) != len(ids):
            raise ValueError(f"duplicate device {next(i for i in ids if ids.count(i) > 1)!r}")
        for device, times in self.times.items():
            _need(device, device_ids, "times")
            _check_times(device, times, len(self.layers))
        pairs: set[tuple[str, str]] = set()
        for link in self.links:
            if link.source not in device_ids or link.target not in device_ids:
                _need(link.source, device_ids, "links")
                _need(link.target, device_ids, "links")
            if link.source == link.target:
                raise ValueError(f"a link of {link.source!r} to itself")
            if (link.source, link.target) in pairs:
                raise ValueError(f"duplicate link {link.source!r} → {link.target!r}")
            pairs.add((link.source, link.target))
        for resource in self.shared:
            where = f"shared {resource.name!r}"
            for pair in resource.links:
                if len(pair) != 2:
                    raise ValueError(f"{where}: a link is [source, target], not {list(pair)}")
                for end in pair:
                    _need(end, device_ids, where)
                if pair[0] == pair[1]:
                    raise ValueError(f"{where}: a link of {pair[0]!r} to itself")
        for field in ("first_stage", "last_stage", "helpers"):
            for device in getattr(self, field) or ():
                _need(device, device_ids, field)
        for tie in self.ties:
            if list(tie.layers) != sorted(set(tie.layers)) or tie.layers[-1] >= len(self.layers):
                raise ValueError(
                    f"ties: layers must ascend below {len(self.layers)}, they are {list(tie.layers)}"
                )
        _compressible(self)
        _check_rounds(self)
        _computable(self)
        return self

    def alone_s(self, device: Device) -> float:
        """Seconds of one microbatch through all layers on that device, with no neighbours."""
        times = self.times.get(device.id)
        if times is None:
            layers_s = sum(layer.flops for layer in self.layers) / device.flops_per_s
        else:
            layers_s = sum(times.forward_s) + sum(times.backward_s)
        return layers_s + device.handling_s + device.action_s + device.step_s / self.microbatches

    def with_steps_spread(self) -> Problem:
        """The same problem without ``step_s``: what a step takes once is part of other times.

        A stage of one pipeline has all of a step's microbatches, and takes as much longer for each. Of
        several pipelines each has a few of them, and pays once all the same: the optimizers of the first and
        of the last layer take half as much longer each. So who holds all layers pays all, and the two ends of
        a longer pipeline half. A device whose layers have no ``times`` takes longer by microbatch.
        """
        if not any(device.step_s for device in self.devices):
            return self
        times, devices = dict(self.times), []
        for device in self.devices:
            layer_times, more_s = times.get(device.id), 0.0
            if layer_times is None or self.parallel == "pipeline":
                more_s = device.step_s / self.microbatches
            else:
                longer = [*layer_times.optimizer_s]
                longer[0] += device.step_s / 2
                longer[-1] += device.step_s / 2
                times[device.id] = layer_times.model_copy(update={"optimizer_s": tuple(longer)})
            update = {"step_s": 0.0, "handling_s": device.handling_s + more_s}
            devices.append(device.model_copy(update=update))
        return self.model_copy(update={"times": times, "devices": tuple(devices)})


def _check_times(device: str, times: LayerTimes, layers: int) -> None:
    for field in ("forward_s", "backward_s", "optimizer_s", "weight_s", "split_s"):
        given = getattr(times, field)
        if given is not None and len(given) != layers:
            raise ValueError(f"times of {device!r}: {field} has {len(given)} values for {layers} layers")
    whole = times.backward_s if times.split_s is None else times.split_s
    for i, (part, both) in enumerate(zip(times.weight_s or (), whole, strict=False)):
        if part > both:
            raise ValueError(
                f"times of {device!r}: weight_s[{i}] is {part:g}, more than the whole backward of {both:g}"
            )


def _compressible(problem: Problem) -> None:
    """Raises ValueError where sums are to be compressed and the problem does not say what that takes."""
    if powersgd_rank(problem.sync_format) is None:
        if problem.sync_uncompressed_steps:
            raise ValueError("sync_uncompressed_steps is of the sync_format powersgd:R")
        return
    if not problem.rhythm.is_synchronous:
        raise ValueError(f"sync_format {problem.sync_format} goes with a synchronous rhythm only")
    for layer in problem.layers:
        if layer.gradient_matrices is None or layer.gradient_bytes is None:
            raise ValueError(
                f"sync_format {problem.sync_format} needs the gradient_bytes and gradient_matrices of every "
                f"layer, and {layer.name!r} has none (a plan from a new profile has them: skyctl probe)"
            )
        matrices = 4.0 * sum(rows * columns for rows, columns in layer.gradient_matrices)
        if matrices > layer.gradient_bytes * (1 + 1e-9):
            raise ValueError(
                f"layer {layer.name!r}: its gradient_matrices have {matrices:.6g} bytes in float32, and its "
                f"gradient_bytes are {layer.gradient_bytes:.6g}"
            )


def _check_rounds(problem: Problem) -> None:
    """Raises ValueError where local steps do not go with the rest of a problem, or its owners' nodes."""
    rhythm, owners = problem.rhythm, problem.owners
    if not rhythm.is_rounds:
        if owners is not None:
            raise ValueError("owners are of a problem whose rhythm has local_steps")
        return
    if problem.parallel == "pipeline" or (problem.parallel == "hybrid" and owners is None):
        raise ValueError(
            "local steps without owners are of devices that hold all layers each: parallel 'data'"
        )
    if problem.sync_format not in WEIGHT_FORMATS:
        raise ValueError(f"weights are averaged as {', '.join(WEIGHT_FORMATS)}, not as {problem.sync_format}")
    if problem.sync in ("server", "trees") or problem.helpers:
        raise ValueError(
            "weights are averaged over a ring or a star of those that hold them, without helpers"
        )
    if owners is None:
        if isinstance(rhythm.local_steps, tuple):
            raise ValueError("a number of local steps for each owner is of a problem with owners")
        if (
            rhythm.clients_per_round is not None
            or rhythm.drop_stragglers
            or rhythm.round_deadline_s is not None
        ):
            raise ValueError("clients, stragglers and deadlines are of a problem with owners")
        return
    _check_owners(problem, owners)


def _check_owners(problem: Problem, owners: Sequence[Sequence[str]]) -> None:
    """Raises ValueError where an owner's node has no device, or two owners have the same."""
    rhythm = problem.rhythm
    there = {node_of(device.id) for device in problem.devices}
    named = [node for owner in owners for node in owner]
    if not owners or not all(owners):
        raise ValueError("owners: each has one node or more, and there is one owner at least")
    for node in named:
        if node not in there:
            raise ValueError(f"owners names node {node!r}, which has no device in devices")
    if len(set(named)) < len(named):
        twice = next(node for node in named if named.count(node) > 1)
        raise ValueError(f"owners: node {twice!r} belongs to two owners")
    if rhythm.clients_per_round is not None and rhythm.clients_per_round > len(owners):
        raise ValueError(f"{rhythm.clients_per_round} clients a round, and there are {len(owners)} owners")
    if isinstance(rhythm.local_steps, tuple) and len(rhythm.local_steps) != len(owners):
        raise ValueError(f"{len(rhythm.local_steps)} numbers of local steps for {len(owners)} owners")


def _need(device: str, device_ids: set[str], where: str) -> None:
    if device not in device_ids:
        there = sorted(device_ids)
        more = f" and {len(there) - MOST_LISTED} more" if len(there) > MOST_LISTED else ""
        raise ValueError(
            f"{where} names device {device!r}, which is not in devices: "
            f"{', '.join(there[:MOST_LISTED])}{more}"
        )


def _computable(problem: Problem) -> None:
    """Raises ValueError where sums and quotients of the problem's numbers are too large for a float."""
    m = problem.microbatches
    for field, limit in (("microbatches", MOST_MICROBATCHES), ("receive_window", MOST_WINDOW)):
        if getattr(problem, field) > limit:
            raise ValueError(f"{field} may be at most {limit}")
    for device in problem.devices:
        times = problem.times.get(device.id)
        seconds = problem.alone_s(device) + 2 * device.neighbour_s
        seconds += sum(times.optimizer_s) if times is not None else 0.0
        if m * seconds > LARGEST:
            raise ValueError(
                f"device {device.id!r}: a step of all layers takes {m * seconds:.3g} s: too large"
            )
    largest = max(1.0, *(layer.output_bytes for layer in problem.layers))
    limit_s = LARGEST / (2 * m * len(problem.layers))
    for link in problem.links:
        seconds = link.sent_share * largest / link.bandwidth_bytes_per_s + link.latency_s
        if seconds > limit_s:
            raise ValueError(f"{_name_of(link)}: a message takes {seconds:.3g} s: too large")
    most = max((link.sent_share for link in problem.links), default=1.0)
    for resource in problem.shared:
        seconds = max(1.0, most) * largest / resource.bandwidth_bytes_per_s
        if seconds > limit_s:
            raise ValueError(f"{_name_of(resource)}: a message takes {seconds:.3g} s: too large")
    if problem.parallel != "pipeline":
        _sums_computable(problem)
    each = (
        layer.state_bytes
        + m * (layer.activation_bytes + layer.deferred_bytes)
        + layer.workspace_bytes
        + layer.output_bytes
        for layer in problem.layers
    )
    if max(1, 2 * problem.receive_window) * sum(each) > LARGEST:
        raise ValueError("the layers' bytes add up to more than can be computed with")


def _sums_computable(problem: Problem) -> None:
    """Raises ValueError where summing all gradients takes more seconds than can be computed with."""
    gradients = sum(
        layer.state_bytes if layer.gradient_bytes is None else layer.gradient_bytes
        for layer in problem.layers
    )
    limit_s = LARGEST / max(4 * len(problem.devices) ** 2 * gradients, 1 / LARGEST)
    too_much = f"{gradients:.3g} bytes of gradients are too much to compute with"
    if limit_s < 1:
        raise ValueError(f"the layers' gradients: {too_much}")
    lines: tuple[Link | SharedResource, ...] = (*problem.links, *problem.shared)
    for line in lines:
        if 1 / line.bandwidth_bytes_per_s > limit_s:
            raise ValueError(f"{_name_of(line)}: {too_much}")
    for device in problem.devices:
        if device.reduce_byte_s + device.message_byte_s > limit_s:
            raise ValueError(f"device {device.id!r}: {too_much}")


def _name_of(line: Link | SharedResource) -> str:
    """How an error names a link or a shared resource."""
    if isinstance(line, SharedResource):
        return f"shared {line.name!r}"
    return f"link {line.source!r} → {line.target!r}"
