"""A run's trained weights written as people want them: one file, or a folder for ``transformers``."""

from __future__ import annotations

import tempfile
from pathlib import Path

from skyctl.checkpoint.launcher.stored_run import StoredRun
from skyctl.files import home, make_private
from skyctl.supervision.model_card import write_model_card
from skyctl.supervision.run_settings import request_of
from skyctl.workload.starting_weights import check_frozen_weights

STATE_DICT_SUFFIXES = (".pt", ".pth")
"""How the names of files end that are written as ``torch.save`` does it."""


def write_weights(
    source: Path,
    out: Path,
    run: StoredRun | None = None,
    *,
    merge: bool = False,
    step: int | None = None,
) -> Path:
    """Writes weights as people want them: what ``out`` is called says how.

    Args:
        source: a file like a run's weights.safetensors, or a folder with the shards of one step.
        out: of an ``hf:`` workload a new folder; else a file: ``.pt`` or ``.pth``, a plain state dict as
            torch saves it; anything else, safetensors.
        run: whose weights they are; None: a file is written, whatever the workload.
        merge: of a run with ``--lora``, write the model with the adapters merged into it.
        step: the weights are those after so many steps of the run; None: after its last.

    Returns:
        The path that was written.

    Raises:
        SkyctlError: the disk is full or not writable.
    """
    from skyctl.checkpoint.node import safetensors, weights_export  # late: they need torch

    if run is not None and run.state.workload.startswith("hf:"):
        kept = _write_hub_folder(source, out, run, merge=merge)
        write_model_card(out, run, run.state.step if step is None else step, merged=merge)
        return kept
    if out.suffix in STATE_DICT_SUFFIXES:
        with tempfile.TemporaryDirectory(prefix="export-", dir=make_private(home())) as folder:
            merged = Path(folder) / "weights.safetensors"
            write_weights(source, merged)
            safetensors.save_state_dict(merged, out)
    elif source.is_dir():
        weights_export.export_weights(source, out)
    else:
        safetensors.merge([source], out)
    return out


def _write_hub_folder(source: Path, out: Path, run: StoredRun, *, merge: bool) -> Path:
    from skyctl.workload.adapter_export import export_adapters  # late: they need torch
    from skyctl.workload.hf.export import export_model

    trained, init = run.plan.workload, run.state.init_from
    if trained is None or trained.lora is None:
        return export_model(source, run.state.workload, out)
    if merge:
        check_frozen_weights(request_of(run.state).spec)
    return export_adapters(
        source,
        run.state.workload,
        trained.lora,
        out,
        merge=merge,
        seed=trained.seed,
        init_from=Path(init.path) if init is not None else None,
    )


def export_last_weights(run: StoredRun, out: Path, *, merge: bool = False) -> Path | None:
    """Writes the weights that a run has ended with, which are on this machine (see ``write_weights``).

    Returns:
        The path that was written; None if the run has not ended well, or they are gone.
    """
    if run.state.status != "done" or not run.paths.weights.is_file():
        return None
    return write_weights(run.paths.weights, out, run, merge=merge)
