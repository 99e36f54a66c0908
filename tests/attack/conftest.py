"""Ranks as real processes, and whoever is against them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.faults.conftest import another, here, probed  # noqa: F401 - fixtures of a whole command
from tests.worker import driver as rank_driver
from tests.worker.conftest import workload  # noqa: F401 - a fixture


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Four processes that play ranks: two pairs that share none, and one between them."""
    pool = rank_driver.Pool(4, tmp_path_factory.mktemp("ranks"))
    try:
        yield pool
    finally:
        pool.close()
