"""How a rank goes on from a checkpoint: shards, verified, into layers and an optimizer just built."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyctl.checkpoint import layout
from skyctl.checkpoint.shards import StageState
from skyctl.errors import RecordError
from skyctl.worker.checkpointing import Options, Origin


def resume(payload: Mapping[str, Any], state: StageState, origin: Origin) -> int:
    """Restores what the payload's ``resume`` names; returns the first step to make (0: from the start).

    What earlier attempts have written of later steps, in the folder that this run writes to, is removed.

    Raises:
        RecordError: a shard is missing, damaged, or of another model; named, with what is wrong.
    """
    told = payload.get("resume")
    if told is None:
        return 0
    step, folder = int(told["step"]), Path(told["folder"])
    if step > int(payload["steps"]):
        raise RecordError(f"the checkpoint is of step {step}, and the run has {payload['steps']} steps")
    wanted: Mapping[str, str] = told.get("layers") or {}
    for position, layer in enumerate(range(origin.start, origin.stop)):
        found = layout.fault(folder, step, layer, wanted.get(str(layer)))
        if found is not None:
            raise RecordError(
                f"layer {layer} ({origin.names[layer]}) can't go on from step {step}: {found}",
                hint=f"it was looked for in {folder}; take it from another node, or an earlier step",
            )
        state.read(position, layout.layer_path(folder, step, layer), origin.stamp(step, layer))
    options = Options.of(payload)
    if options is not None:  # before any rank is told to start, so that nobody writes there yet
        layout.clean(options.folder)
        layout.retain(options.folder, [kept for kept in layout.steps(options.folder) if kept <= step])
    return step
