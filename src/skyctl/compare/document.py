"""``comparison.json``, and what ``skyctl compare --json`` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from skyctl.compare.rows import Row
from skyctl.compare.sweeps import Sweep
from skyctl.records.base import FileRecord, Seq, since


class Comparison(FileRecord):
    """``files``: what was written beside it (plots, plans, report), by what it is; ``verdict``: in words."""

    kind: Literal["skyctl/comparison"] = "skyctl/comparison"
    version: Literal[2] = 2
    cluster: str | None = None
    workload: str | None = None
    rows: Seq[Row]
    files: dict[str, str] = Field(default_factory=dict)
    sweeps: Seq[Sweep] = since(2, ())
    verdict: str | None = since(2, None)


def document(
    compared: Sequence[Row],
    *,
    cluster: str | None = None,
    workload: str | None = None,
    files: Mapping[str, str] | None = None,
    sweeps: Sequence[Sweep] = (),
    verdict: str | None = None,
) -> dict[str, Any]:
    """What ``--json`` prints."""
    record = Comparison(
        cluster=cluster,
        workload=workload,
        rows=tuple(compared),
        files=dict(files or {}),
        sweeps=tuple(sweeps),
        verdict=verdict,
    )
    return record.model_dump(mode="json")
