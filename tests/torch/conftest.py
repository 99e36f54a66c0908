"""The state that the tests of this process take for granted: it is no rank of anything."""

from __future__ import annotations

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a workload makes a process a world of one, and another file's tests may have done so here."""
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
