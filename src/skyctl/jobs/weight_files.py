"""A run's trained weights written as people want them: one file, or a folder for ``transformers``."""

from __future__ import annotations

import tempfile
from pathlib import Path

from skyctl.checkpoint.launcher.stored_run import StoredRun
from skyctl.files import home, make_private

STATE_DICT_SUFFIXES = (".pt", ".pth")
"""How the names of files end that are written as ``torch.save`` does it."""


def write_weights(source: Path, out: Path, workload: str = "") -> Path:
    """Writes weights as people want them: what ``out`` is called says how.

    Args:
        source: a file like a run's weights.safetensors, or a folder with the shards of one step.
        out: of an ``hf:`` workload a new folder; else a file: ``.pt`` or ``.pth``, a plain state dict as
            torch saves it; anything else, safetensors.
        workload: what was trained, as it was typed; "": the file, whatever the workload.

    Returns:
        What was written.

    Raises:
        SkyctlError: the disk is full or not writable.
    """
    from skyctl.checkpoint.node import safetensors, weights_export  # late: they need torch

    if workload.startswith("hf:"):
        from skyctl.workload.hf.export import export_model

        return export_model(source, workload, out)
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


def export_last_weights(run: StoredRun, out: Path) -> Path | None:
    """Writes the weights that a run has ended with, which are on this machine (see ``write_weights``).

    Returns:
        What was written; None where the run has not ended well, or they are gone.
    """
    if run.state.status != "done" or not run.paths.weights.is_file():
        return None
    return write_weights(run.paths.weights, out, run.state.workload)
