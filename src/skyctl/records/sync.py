"""The sums that pipelines side by side make once a step, and the routes of these sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from skyctl.records.base import Count, Index, Name, Record, Seconds, Seq
from skyctl.records.pipeline import Pipeline
from skyctl.records.problem import Problem
from skyctl.records.sync_format import SyncFormat, powersgd_rank


class Route(Record):
    """The way of a share of a group's bytes: partial sums go up a tree to the root, the sum comes down one.

    Attributes:
        share: of the bytes, in (0, 1].
        up: directed pairs (child, parent); every device of the route but the root is a child once.
        down: directed pairs (parent, child), likewise.
    """

    share: Annotated[float, Field(gt=0, le=1)]
    root: Name
    up: Seq[Seq[Name]]
    down: Seq[Seq[Name]]

    @model_validator(mode="after")
    def _trees(self) -> Route:
        _check_tree(self.root, self.up, "up", child=0)
        _check_tree(self.root, self.down, "down", child=1)
        return self


class SyncGroup(Record):
    """Layers [start, stop) that several pipelines hold, a device each, and how their gradients are summed."""

    start: Index
    stop: Count
    routes: Seq[Route] = Field(min_length=1)

    @model_validator(mode="after")
    def _whole(self) -> SyncGroup:
        total = sum(route.share for route in self.routes)
        if abs(total - 1.0) > 1e-9:
            raise ValueError(f"the shares of a sync group's routes sum to {total:g}, not to 1")
        return self


class Sync(Record):
    """The values that pipelines sum once a step, in which numbers, and in pieces of how many bytes.

    ``of``: gradients, or with local steps ``weights``, times each pipeline's samples.
    ``uncompressed_steps``: with ``powersgd:R``, how many of a run's first steps are summed in float32.
    """

    of: Literal["gradients", "weights"] = "gradients"
    format: SyncFormat = "float32"
    chunk_bytes: Count = 262144
    groups: Seq[SyncGroup] = Field(min_length=1)
    uncompressed_steps: Index = 0

    @model_validator(mode="after")
    def _compresses(self) -> Sync:
        if self.uncompressed_steps and powersgd_rank(self.format) is None:
            raise ValueError("uncompressed_steps is of the format powersgd:R")
        return self


class LinkPrice(Record):
    """The price of a second of a directed link."""

    source: Name
    target: Name
    price: Annotated[float, Field(ge=0)]


class ProcessorPrice(Record):
    """The price of a second of a helper's processor."""

    device: Name
    price: Annotated[float, Field(ge=0)]


class RoutePrices(Record):
    """Prices of what routes use, and the bound on routes among some replicas that they prove.

    No routes use less in all, weighted by price, than the cheapest tree does, and what is used most is used
    at least as much as the weighted mean.

    Attributes:
        devices: the replicas; routes go over no others but those that may help them.
        byte_s: seconds that a byte of gradient takes at least on the busiest link, shared resource or
            helper's processor.
        links: prices of links; 0 for those that are not listed.
        shared: by shared resource of the problem, in its order; 0 beyond them.
        processors: prices of helpers' processors; 0 for those that are not listed.
    """

    devices: Seq[Name] = Field(min_length=2)
    byte_s: Seconds
    links: Seq[LinkPrice] = ()
    shared: Seq[Annotated[float, Field(ge=0)]] = ()
    processors: Seq[ProcessorPrice] = ()


def _check_tree(root: str, edges: tuple[tuple[str, ...], ...], name: str, *, child: int) -> None:
    """Raises ValueError where ``edges`` are no tree of which every way leads to ``root``."""
    parents: dict[str, str] = {}
    for edge in edges:
        if len(edge) != 2 or edge[0] == edge[1]:
            raise ValueError(f"{name}: an edge names two devices, not {list(edge)}")
        if edge[child] == root or edge[child] in parents:
            raise ValueError(f"{name}: {edge[child]!r} has more than one parent, or is the root")
        parents[edge[child]] = edge[1 - child]
    leading = {root}
    for device in parents:
        at, way = device, []
        while at not in leading:
            way.append(at)
            at = parents.get(at, "")
            if not at or len(way) > len(parents):
                raise ValueError(f"{name}: no way leads from {device!r} to the root {root!r}")
        leading.update(way)


def check_sync(sync: Sync | None, pipelines: Sequence[Pipeline], problem: Problem) -> None:
    """Raises ValueError where what the pipelines sum is not what they hold together."""
    if sync is None:
        if len(pipelines) > 1:
            raise ValueError("several pipelines need a sync: nothing says how their gradients are summed")
        return
    device_ids = {device.id for device in problem.devices}
    stages = [stage for pipeline in pipelines for stage in pipeline.stages]
    at = 0
    for group in sync.groups:
        if group.start != at or group.stop <= group.start:
            raise ValueError(f"sync groups must follow each other: one is [{group.start}, {group.stop})")
        at = group.stop
        replicas = {s.device for s in stages if s.start < group.stop and s.stop > group.start}
        for route in group.routes:
            for edges in (route.up, route.down):
                there = {route.root} | {device for edge in edges for device in edge}
                if not replicas <= there:
                    raise ValueError(
                        f"a route leaves out {sorted(replicas - there)[0]!r}, which holds the layers"
                    )
                if not there <= device_ids:
                    raise ValueError(
                        f"a route names {sorted(there - device_ids)[0]!r}, which is not in the problem"
                    )
    if at != len(problem.layers):
        raise ValueError(f"sync groups cover {at} layers, the problem has {len(problem.layers)}")
