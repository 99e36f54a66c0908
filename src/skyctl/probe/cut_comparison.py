"""Has one node train the workload whole, in plain torch, and cut into layers, before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import skyctl
from skyctl.errors import ProtocolError, WorkloadError
from skyctl.probe.device_measurement import ProbeProgress
from skyctl.probe.device_probes import DeviceProbe, DeviceProbes
from skyctl.probe.node.probe_requests import CompareRequest
from skyctl.records.base import GIB
from skyctl.records.profile import CutComparison, CutVerdict, Profile, ShapeProfile

STATE_COPIES = 5.0
"""So often weights, gradients and optimizer are held at once: of what trains, and of what has trained."""
LIMIT_S = 60.0
"""No further training is begun after so long: the model is too slow for this."""
DEADLINE_S = 900.0
"""A node that has not answered by then has failed."""


def known_comparison(earlier: Sequence[Profile], digest: str) -> CutComparison | None:
    """An earlier probe's comparison of the same files, by this version of skyctl; None: there is none."""
    for profile in earlier:
        work = profile.workload
        if work is None or work.digest != digest or work.comparison.skyctl != skyctl.__version__:
            continue
        if work.comparison.verdict in ("same", "unrepeatable"):
            return work.comparison
    return None


def compare_on_a_node(
    probes: DeviceProbes, shapes: Sequence[ShapeProfile], on_progress: ProbeProgress
) -> CutComparison:
    """Compares on the node with the most processors of those that can hold the model whole.

    Raises:
        WorkloadError: cut into layers it trains something else.
    """
    smallest = min(shapes, key=lambda shape: shape.microbatch_size)
    activation_bytes = sum(layer.activation_bytes + layer.workspace_bytes for layer in smallest.layers)
    needs_bytes = STATE_COPIES * sum(layer.state_bytes for layer in smallest.layers) + 2 * activation_bytes
    members = probes.alive()
    free_bytes = max((m.facts["memory_available_bytes"] for m in members), default=0)
    fitting = [m for m in members if m.facts["memory_available_bytes"] >= needs_bytes]
    if not fitting:
        return CutComparison(
            verdict="not compared",
            reason=f"whole, to be compared, it needs {needs_bytes / GIB:.1f} GiB on one node; the most that "
            f"one has free are {free_bytes / GIB:.1f} GiB",
        )
    member = max(fitting, key=lambda probe: (probe.facts["cpus"], probe.facts["memory_available_bytes"]))
    on_progress(member.node.name, "comparing the cut with the model", 0.0)
    probes.send(member, CompareRequest(smallest.microbatch_size, LIMIT_S))
    answers: list[dict[str, Any]] = []

    def heard(other: DeviceProbe, event: dict[str, Any]) -> None:
        if other is member and event.get("event") == "compared":
            if event.get("verdict", "same") not in get_args(CutVerdict):
                raise ProtocolError(
                    f"node {member.node.name} tells of no comparison that there is", node=member.node.name
                )
            answers.append(event)

    probes.wait([member], "compared", DEADLINE_S, heard)
    if not answers:
        return CutComparison(
            verdict="not compared",
            reason=f"node {member.node.name} failed while it compared",
            device=member.id,
        )
    answer = answers[0]
    if answer.get("error"):
        raise WorkloadError(answer["error"], hint=answer.get("hint"))
    return CutComparison(
        verdict=answer.get("verdict", "not compared"),
        reason=answer.get("reason"),
        seconds=answer.get("seconds", 0.0),
        device=member.id,
        skyctl=skyctl.__version__,
    )
