"""The orders of ranks of plans of every form, as the launcher sends them: four ranks each."""

from __future__ import annotations

import json
from typing import Any

from skyctl.planner.api import plan
from skyctl.records.backend import Backend, BackendChoice
from skyctl.records.cluster import Cluster, Node
from skyctl.records.plan import Plan
from skyctl.records.problem import Problem
from skyctl.run.rank_spec import check_plan_fits, rank_specs
from skyctl.worker.rank_order import AnyRankOrder
from skyctl.workload.workload_spec import WorkloadSpec

from ..helpers.hybrid_plans import hybrid_plan, summed_at
from ..helpers.orders import sent_orders

LAYERS, MICROBATCHES = 7, 4
NAMES = tuple("abcd")
A, B, C, D = DEVICES = [f"{name}/cpu:0" for name in NAMES]
CLUSTER = Cluster(name="c", nodes=tuple(Node(name=name, transport="local", threads=1) for name in NAMES))
OWNERS = [["a"], ["b"], ["c", "d"]]
FORMS: dict[str, dict[str, Any]] = {
    "pipeline": {},
    "data": {"parallel": "data"},
    "hybrid": {"parallel": "data"},
    "delay": {"parallel": "data", "rhythm": {"delay": 1}},
    "rounds": {"parallel": "hybrid", "rhythm": {"local_steps": [2, 1, 2]}, "owners": OWNERS},
    "staleness": {"parallel": "data", "rhythm": {"staleness": 1}},
    "helper": {"parallel": "data", "helpers": [D]},
}
"""The fields from which each form is planned, beside layers and devices."""


def make_plan(form: str) -> Plan:
    """Of that form, on all four devices."""
    layer = {"flops": 1e9, "state_bytes": 1e4, "activation_bytes": 1e3, "output_bytes": 1e3}
    problem = {
        "version": 11,
        "layers": [{"name": f"l{number}", **layer} for number in range(LAYERS)],
        "devices": [{"id": name, "flops_per_s": 1e9, "memory_bytes": None} for name in DEVICES],
        "microbatches": MICROBATCHES,
        **FORMS[form],
    }
    made = json.loads(plan(Problem.model_validate(problem), strategy="even").to_json())
    if form == "hybrid":
        made = hybrid_plan(made, [([(A, 0, 3), (B, 3, 7)], 3), ([(C, 0, 5), (D, 5, 7)], 1)])
    if form == "helper":
        made = summed_at(made, D)
    return Plan.model_validate(made)


def orders(
    form: str, workload: Any, steps: int, *, encrypt: bool, backend: Backend = "skyctl"
) -> list[AnyRankOrder]:
    """By rank."""
    made = make_plan(form)
    if backend != "skyctl":
        chosen = BackendChoice(backend=backend, reason="asked")
        made = made.model_copy(update={"backend": chosen})
    check_plan_fits(made, CLUSTER)
    specs = rank_specs(
        made,
        CLUSTER,
        run_id="test",
        steps=steps,
        workload=dict.fromkeys(NAMES, WorkloadSpec.from_dict(workload)),
        addresses=dict.fromkeys(NAMES, "127.0.0.1"),
        weights=False,
    )
    return sent_orders(specs, encrypt=encrypt)
