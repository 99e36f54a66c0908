"""Files of a run's ranks, brought here from their nodes: trained weights, and the trace of what they did."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyctl.agent.task_events import read_as_json
from skyctl.compare import chrome_trace, timeline
from skyctl.compare.charts.timeline_charts import plot_trace
from skyctl.errors import ProtocolError, RecordError, SkyctlError
from skyctl.files import RunPaths, write_atomic
from skyctl.remote.agent_session import Session
from skyctl.run.attempt_state import AttemptState
from skyctl.run.callbacks import RunCallbacks
from skyctl.run.rank_spec import RankSpec, holding_specs
from skyctl.worker.rank_order import RankOrder
from skyctl.worker.trace.trace_document import TraceDocument, trace_limit_bytes


def gather_weights(state: AttemptState, paths: RunPaths, sessions: Mapping[str, Session]) -> Path:
    """Fetches every rank's part and merges them into the run's one safetensors file.

    Raises:
        ProtocolError: what a node has sent are not its rank's layers' weights.
        SkyctlError: a part did not come, or can't be written.
    """
    from skyctl.checkpoint.node.safetensors import merge, read_header  # torch: too large for who only watches

    parts: list[Path] = []
    first = state.specs[min(state.results)].pipeline  # where ranks may leave, that is not always 0
    try:
        for rank, result in sorted(state.results.items()):
            spec = state.specs[rank]
            if spec.pipeline != first:
                continue  # another pipeline's are the same
            if result.weights is None:
                raise ProtocolError(f"node {spec.node} has no weights of rank {rank}", node=spec.node)
            parts.append(paths.weights_part(rank))
            sessions[spec.node].fetch(result.weights, parts[-1], sum(spec.shard_limits.values()))
            _check_weights(parts[-1], spec)
        own_names = all(read_header(part).metadata.get("own_names") == "True" for part in parts)
        merge(
            parts,
            paths.weights,
            named=lambda _, name: name.partition(".")[2] if own_names else name,
            shared=own_names,
        )
        return paths.weights
    except OSError as exc:
        raise SkyctlError(
            f"cannot write the trained weights to {paths.weights}: {exc.strerror or exc}",
            hint="free some space, or set SKYCTL_HOME to another disk",
        ) from exc
    finally:
        for part in parts:
            part.unlink(missing_ok=True)


def _check_weights(path: Path, spec: RankSpec) -> None:
    """Raises ProtocolError where a file has not the weights of just this rank's layers."""
    from skyctl.checkpoint.node.safetensors import read_header

    layers = spec.layers
    try:
        header = read_header(path)
    except RecordError as exc:
        why = exc.message.replace(str(path), "the file")
    else:
        indexes = {name.partition(".")[0] for name in header.tensors}
        indexes |= {key.removeprefix("layer.") for key in header.metadata if key.startswith("layer.")}
        if indexes <= set(map(str, layers)):
            return
        why = f"they are of layers {', '.join(sorted(indexes))[:60]}"
    raise ProtocolError(
        f"node {spec.node} sent something else than the weights of layers [{layers.start}, {layers.stop}): "
        f"{why}",
        node=spec.node,
    )


def gather_traces(
    state: AttemptState, paths: RunPaths, sessions: Mapping[str, Session]
) -> list[dict[str, Any]]:
    """Fetches every rank's record (``worker.trace_recorder``), in the ranks' order; nothing stays beside it.

    Raises:
        SkyctlError: a rank's record did not come or can't be read.
    """
    results = state.results
    first = state.specs[0].order
    assert isinstance(first, RankOrder), "helpers come last"
    limit = trace_limit_bytes(first.microbatches)
    out: list[dict[str, Any]] = []
    for spec in state.specs:
        part = paths.trace_part(spec.rank)
        try:
            result = results.get(spec.rank)
            if result is None or result.trace is None:
                raise SkyctlError(f"rank {spec.rank} on {spec.device} recorded nothing")
            sessions[spec.node].fetch(result.trace, part, limit)
            document = json.loads(part.read_text(encoding="utf-8"))
            out.append(_plain_trace(document, spec))
        except (OSError, ValueError, RecursionError) as exc:
            raise SkyctlError(
                f"can't read what rank {spec.rank} on {spec.device} recorded: {exc}",
                hint="free some space, or set SKYCTL_HOME to another disk",
            ) from exc
        finally:
            part.unlink(missing_ok=True)
    return out


def _plain_trace(document: Any, spec: RankSpec) -> dict[str, Any]:
    """A rank's trace as JSON values of the right types. Raises ProtocolError for anything else."""
    message = {"event": TraceDocument.kind, **document} if isinstance(document, dict) else {}
    return read_as_json(TraceDocument, message, spec.node)


def write_trace(
    state: AttemptState,
    paths: RunPaths,
    sessions: Mapping[str, Session],
    simulated: timeline.Timeline,
    callbacks: RunCallbacks,
) -> str | None:
    """Writes ``trace.json`` and ``trace.svg``; the first one's path.

    ``simulated``: the plan's step. Training is done by then: what goes wrong here is a note, and no reason to
    lose it.
    """
    callbacks.phase("gathering the trace")
    devices = [spec.device for spec in holding_specs(state.specs)]
    clocks = [spec.order.world.clock_of for spec in state.specs]
    try:
        traces = gather_traces(state, paths, sessions)
        measured = timeline.measured_timeline(traces, devices, clocks)
        if not measured.steps:
            raise SkyctlError("the ranks have no step in common in what they recorded")
        made = chrome_trace.trace_document(measured, simulated, run_id=paths.run_id)
        write_atomic(paths.trace, json.dumps(made, separators=(",", ":"), ensure_ascii=False) + "\n")
    except SkyctlError as exc:
        callbacks.note(f"no trace: {exc}")
        return None
    try:
        plot_trace(measured, simulated, paths.trace_picture)
    except SkyctlError as exc:
        callbacks.note(f"no picture of the trace: {exc}")
    return str(paths.trace)
