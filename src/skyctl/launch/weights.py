"""The trained weights, gathered from the ranks' nodes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from skyctl.errors import SkyctlError
from skyctl.launch.run import Run
from skyctl.remote.session import Session


def gather_weights(run: Run, sessions: Mapping[str, Session]) -> Path | None:
    """Fetches every rank's part and merges them into the run's one safetensors file."""
    from skyctl.checkpoint.safetensors import merge

    parts: list[Path] = []
    try:
        for rank, remote in sorted(run.weights().items()):
            part = run.paths.weights_part(rank)
            parts.append(part)
            sessions[run.specs[rank].node].fetch(remote, part)
        if not parts:
            return None
        merge(parts, run.paths.weights)
        return run.paths.weights
    except OSError as exc:
        raise SkyctlError(
            f"cannot write the trained weights to {run.paths.weights}: {exc.strerror or exc}",
            hint="free some space, or set SKYCTL_HOME to another disk",
        ) from exc
    finally:
        for part in parts:
            part.unlink(missing_ok=True)
