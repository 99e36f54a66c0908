"""What a run's ranks leave on their nodes, brought here: trained weights, and the trace of what they did."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyctl.compare import chrome_trace, timeline
from skyctl.compare.charts.timeline_charts import plot_trace
from skyctl.errors import SkyctlError
from skyctl.files import write_atomic
from skyctl.remote.agent_session import Session
from skyctl.run.callbacks import RunCallbacks
from skyctl.run.rank_group import RankGroup
from skyctl.schedule.simulation_input import SimulationInput


def gather_weights(ranks: RankGroup, sessions: Mapping[str, Session]) -> Path | None:
    """Fetches every rank's part and merges them into the run's one safetensors file."""
    from skyctl.checkpoint.safetensors import merge

    parts: list[Path] = []
    try:
        for rank, result in sorted(ranks.results().items()):
            if result.weights is not None:
                parts.append(ranks.paths.weights_part(rank))
                sessions[ranks.specs[rank].node].fetch(result.weights, parts[-1])
        if not parts:
            return None
        merge(parts, ranks.paths.weights)
        return ranks.paths.weights
    except OSError as exc:
        raise SkyctlError(
            f"cannot write the trained weights to {ranks.paths.weights}: {exc.strerror or exc}",
            hint="free some space, or set SKYCTL_HOME to another disk",
        ) from exc
    finally:
        for part in parts:
            part.unlink(missing_ok=True)


def gather_traces(ranks: RankGroup, sessions: Mapping[str, Session]) -> list[dict[str, Any]]:
    """Fetches every rank's record (``worker.trace_recorder``), in the ranks' order; nothing stays beside it.

    Raises:
        SkyctlError: a rank's record did not come or can't be read.
    """
    results = ranks.results()
    out: list[dict[str, Any]] = []
    for spec in ranks.specs:
        part = ranks.paths.trace_part(spec.rank)
        try:
            result = results.get(spec.rank)
            if result is None or result.trace is None:
                raise SkyctlError(f"rank {spec.rank} on {spec.device} recorded nothing")
            sessions[spec.node].fetch(result.trace, part)
            out.append(json.loads(part.read_text(encoding="utf-8")))
        except (OSError, ValueError) as exc:
            raise SkyctlError(
                f"can't read what rank {spec.rank} on {spec.device} recorded: {exc}",
                hint="free some space, or set SKYCTL_HOME to another disk",
            ) from exc
        finally:
            part.unlink(missing_ok=True)
    return out


def write_trace(
    ranks: RankGroup, sessions: Mapping[str, Session], simulation: SimulationInput, callbacks: RunCallbacks
) -> str | None:
    """Writes ``trace.json`` and, where matplotlib is installed, ``trace.png``; the first one's path.

    Training is done by then: what goes wrong here is a note, and no reason to lose it.
    """
    callbacks.phase("gathering the trace")
    devices = [spec.device for spec in ranks.specs]
    try:
        measured = timeline.measured_timeline(gather_traces(ranks, sessions), devices)
        simulated = timeline.simulated_timeline(simulation, devices)
        made = chrome_trace.trace_document(measured, simulated, run_id=ranks.paths.run_id)
        write_atomic(ranks.paths.trace, json.dumps(made, separators=(",", ":"), ensure_ascii=False) + "\n")
    except SkyctlError as exc:
        callbacks.note(f"no trace: {exc}")
        return None
    try:
        plot_trace(measured, simulated, ranks.paths.trace_picture)
    except SkyctlError as exc:
        callbacks.note(f"no picture of the trace: {exc}")
    return str(ranks.paths.trace)
