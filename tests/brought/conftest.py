"""Makes ``benchmarks/porting`` importable, and gives two nodes of this machine to commands."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.brought.cases import CASES
from tests.helpers.commands import Skyctl
from tests.worker.driver import Pool

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

NODES = """\
name: brought
nodes:
  - {name: n1, transport: local, threads: 1}
  - {name: n2, transport: local, threads: 1}
"""


@pytest.fixture(scope="session")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Skyctl]:
    """skyctl with a cluster of two nodes; its links are measured once for all tests of a process."""
    folder = tmp_path_factory.mktemp("brought")
    cluster = folder / "cluster.yaml"
    cluster.write_text(NODES)
    made = Skyctl(folder, folder / "state", cluster)
    yield made
    made.end()


@pytest.fixture(scope="session")
def ranks_of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Two processes that play ranks, for all tests of a process."""
    with _ranks(tmp_path_factory.mktemp("ranks")) as pool:
        yield pool


@pytest.fixture
def two_ranks(ranks_of_all: Pool, path: Path, tmp_path: Path) -> Iterator[Pool]:
    """The same two processes for all files, but others for one that leaves its traces in them."""
    if not CASES[path.stem].stains:
        yield ranks_of_all
        return
    with _ranks(tmp_path) as pool:
        yield pool


@contextmanager
def _ranks(folder: Path) -> Iterator[Pool]:
    pool = Pool(2, folder, warnings="ignore")  # what a user's code warns of is no error
    try:
        yield pool
    finally:
        pool.close()
