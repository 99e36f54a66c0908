"""Many local workers: sixteen nodes of one machine train what one device trains (64: benchmarks/many.py)."""

from __future__ import annotations

import sys

import pytest

from skyctl.cli.options import DefaultedWorkloadOptions
from skyctl.jobs.node_sessions import connect_nodes, require_all
from skyctl.paper.paper_experiment import slowdown_factors
from skyctl.planner.api import plan
from skyctl.records.cluster import Cluster, Node
from skyctl.records.problem import Device, Layer, Problem
from skyctl.remote.base import ConnectOptions
from skyctl.run.callbacks import RunCallbacks
from skyctl.run.plan_runner import run_plan
from skyctl.run.run_options import RunOptions

WORKERS, ENCODERS, STEPS = 16, 40, 3
WORKLOAD = f"bert:layers={ENCODERS},hidden=16,heads=2,context=16"


def a_problem(factors: list[float]) -> Problem:
    """Equal layers; the devices' speeds as their nodes are slowed down. Not measured: that takes longest."""
    return Problem(
        layers=tuple(
            Layer(name=f"l{i}", flops=1e6, state_bytes=1e5, activation_bytes=1e4, output_bytes=4e3)
            for i in range(2 * ENCODERS + 2)
        ),
        devices=tuple(
            Device(id=f"w{i:02d}/cpu:0", flops_per_s=1e9 / factor, memory_bytes=None)
            for i, factor in enumerate(factors, start=1)
        ),
        microbatches=4,
        objective="bottleneck",
    )


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="local nodes are forked on Linux only")
def test_sixteen_workers_train_what_one_device_trains() -> None:
    factors = slowdown_factors(WORKERS + 1)
    nodes = tuple(
        Node(name=f"w{i:02d}", transport="local", threads=1, slowdown=factor)
        for i, factor in enumerate(factors, start=1)
    )
    cluster = Cluster(name="many", nodes=nodes)
    request, loaded = DefaultedWorkloadOptions(batch_size=4).make_request(WORKLOAD, microbatches=4)
    asked = a_problem(factors)
    everybody = plan(asked)
    assert everybody.certificate.status == "optimal"
    assert len(everybody.stages) == WORKERS
    alone = plan(asked, assign=[("w01/cpu:0", 0, len(asked.layers))])
    options = RunOptions(steps=STEPS, weights=False, ignore_changes=True)
    losses = []
    with connect_nodes(nodes, ConnectOptions()) as links:
        require_all(links.failures)
        for made in (everybody, alone):
            ready = made.model_copy(update={"workload": request.ref(loaded.digest)})
            done, _ = run_plan(ready, cluster, request, links.sessions, options, RunCallbacks())
            losses.append([step.loss for step in done.steps])
    assert len(losses[0]) == STEPS
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
