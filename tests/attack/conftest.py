"""Ranks as real processes, whoever is against them, and the table of what came of it over each backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.attack.backends import BACKENDS, GLOO, Over, Row, row_of, write_report
from tests.faults.conftest import another, here, probed  # noqa: F401 - fixtures of a whole command
from tests.helpers.processes import PATIENCE_S
from tests.worker import driver as rank_driver
from tests.worker.conftest import workload  # noqa: F401 - a fixture

ROWS = pytest.StashKey[list[Row]]()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Four processes that play ranks: two pairs that share none, and one between them."""
    pool = rank_driver.Pool(4, tmp_path_factory.mktemp("ranks"))
    try:
        yield pool
    finally:
        pool.close()


@pytest.fixture
def fresh_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Four that are this test's alone, whose end may be that they stall or die."""
    pool = rank_driver.Pool(4, tmp_path_factory.mktemp("ranks"))
    pool.stall_s = PATIENCE_S  # they begin with the test
    try:
        yield pool
    finally:
        pool.close()


@pytest.fixture(params=BACKENDS)
def over(request: pytest.FixtureRequest) -> Over:
    """The backend that carries the tensors of the test's runs."""
    return Over(request.param)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Promises that do not hold over Gloo are tried there all the same, and may fail."""
    for item in items:
        mark, spec = item.get_closest_marker("unpromised"), getattr(item, "callspec", None)
        if mark is not None and spec is not None and spec.params.get("over") == GLOO:
            item.add_marker(pytest.mark.xfail(reason=mark.args[0], strict=False))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if Path(__file__).parent in item.path.parents and report.when == "call":
        row = row_of(item, getattr(item, "funcargs", {}).get("over"), report)
        item.config.stash.setdefault(ROWS, []).append(row)
        if row.backend:  # at once: what has come of it is there if the tests are cut off
            write_report([row])
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Of runs over backends, not of the quick tests that are part of every run of the tests."""
    rows = config.stash.get(ROWS, [])
    if any(row.backend for row in rows):
        terminalreporter.write_line(f"what came of it over each backend: {write_report(rows)}")
