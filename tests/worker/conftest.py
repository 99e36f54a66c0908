"""Fixtures of the worker's tests: processes that play ranks, and workloads to train."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.worker import driver as rank_driver
from tests.worker.expert_hosts import HostPool
from tests.worker.workloads import OPTIMIZERS, WORKLOAD


@pytest.fixture(scope="session")
def driver() -> ModuleType:
    """``driver.py`` of this folder."""
    return rank_driver


@pytest.fixture
def mortals(tmp_path: Path) -> Iterator[HostPool]:
    """Two hosts of experts that may be killed."""
    pool = HostPool(tmp_path, 2)
    try:
        yield pool
    finally:
        pool.close()


@pytest.fixture(scope="session")
def pool(driver: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Four processes, for all tests."""
    pool = driver.Pool(4, tmp_path_factory.mktemp("ranks"))
    try:
        yield pool
    finally:
        pool.close()


@pytest.fixture
def workload(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Writes a workload file, the one above with parts replaced, and gives its spec as a dict."""
    from skyctl.workload.workload_spec import WorkloadSpec

    def make(
        optimizer: str = "adamw", batch_size: int = 7, replace: tuple[str, str] = ("", "")
    ) -> dict[str, Any]:
        path = tmp_path / "train.py"
        path.write_text(WORKLOAD.replace("OPTIMIZER", OPTIMIZERS[optimizer]).replace(*replace))
        return WorkloadSpec(source=str(path), path=str(path), batch_size=batch_size, seed=3).to_dict()

    return make
