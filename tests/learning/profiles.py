"""Profiles made by hand: three blocks of two kinds of layers on devices of given speed."""

from __future__ import annotations

from typing import Any

from tests.helpers.bare_records import OF_DEVICE, OF_PROFILE, OF_WORKLOAD

from skyctl.jobs.training_request import TrainingRequest
from skyctl.records.cluster import Node
from skyctl.records.profile import (
    DeviceProfile,
    LayerCosts,
    LayerTiming,
    LinkProfile,
    Profile,
    ShapeProfile,
    WorkloadProfile,
)
from skyctl.workload.workload_spec import make_spec


def timing(signature: str, seconds: float, size: int = 2) -> LayerTiming:
    return LayerTiming(
        signature=signature,
        microbatch_size=size,
        forward_s=seconds,
        backward_s=2 * seconds,
        optimizer_s=seconds / 10,
        spread=0.01,
        repeats=5,
    )


def costs(name: str, signature: str) -> LayerCosts:
    return LayerCosts(
        name=name,
        signature=signature,
        flops=3e6,
        state_bytes=1e6,
        activation_bytes=1e5,
        output_bytes=1e4,
        workspace_bytes=0.0,
        deferred_bytes=5e4,
        gradient_bytes=2.5e5,
        gradient_matrices=(),
    )


def device(
    node: str, speed: float, memory: float = 1e9, timings: tuple[LayerTiming, ...] = ()
) -> DeviceProfile:
    return DeviceProfile(
        id=f"{node}/cpu:0",
        node=node,
        name="cpu",
        threads=1,
        slowdown=1.0,
        memory_bytes=memory,
        memory_from="free memory",
        reserved_bytes=0.0,
        flops_per_s=1e9 / speed,
        timings=timings or (timing("attention", 0.01 * speed), timing("mlp", 0.02 * speed)),
        **OF_DEVICE,
    )


def profile(*devices: DeviceProfile, links: tuple[LinkProfile, ...] = ()) -> Profile:
    layers = tuple(costs(f"block.{i}.{kind}", kind) for i in range(3) for kind in ("attention", "mlp"))
    return Profile(
        cluster="c",
        cluster_digest="d",
        created="2026-01-01T00:00:00Z",
        nodes=(),
        devices=devices,
        links=links,
        workload=WorkloadProfile(
            source="gpt:…",
            digest="w",
            batch_size=8,
            dtype="float32",
            shapes=(ShapeProfile(microbatch_size=2, microbatches=4, layers=layers),),
            **OF_WORKLOAD,
        ),
        **OF_PROFILE,
    )


def ask(microbatches: int | None = None) -> tuple[TrainingRequest, str]:
    return TrainingRequest(make_spec("gpt:layers=3", batch_size=8), microbatches), "w"


def nodes(*names: str, **settings: Any) -> list[Node]:
    return [Node(name=name, transport="local", **settings) for name in names]
