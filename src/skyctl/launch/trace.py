"""What the ranks of a run recorded, brought here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from skyctl.errors import SkyctlError
from skyctl.launch.run import Run
from skyctl.remote.session import Session


def gather_traces(run: Run, sessions: Mapping[str, Session]) -> list[dict[str, Any]]:
    """Fetches every rank's record (``worker.recorder``), in the ranks' order; nothing stays beside it.

    Raises:
        SkyctlError: a rank's record did not come or can't be read.
    """
    remote = run.traces()
    out: list[dict[str, Any]] = []
    for spec in run.specs:
        part = run.paths.trace_part(spec.rank)
        try:
            if spec.rank not in remote:
                raise SkyctlError(f"rank {spec.rank} on {spec.device} recorded nothing")
            sessions[spec.node].fetch(remote[spec.rank], part)
            out.append(json.loads(part.read_text(encoding="utf-8")))
        except (OSError, ValueError) as exc:
            raise SkyctlError(
                f"can't read what rank {spec.rank} on {spec.device} recorded: {exc}",
                hint="free some space, or set SKYCTL_HOME to another disk",
            ) from exc
        finally:
            part.unlink(missing_ok=True)
    return out
