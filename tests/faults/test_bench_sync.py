"""``skyctl bench-sync`` struck in the middle of its sums: who is named, and that nothing is left."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

from ..helpers import processes, runs
from ..helpers.commands import Command, Skyctl

pytestmark = pytest.mark.slow
FOREVER = ("--repeat", "1000000")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Skyctl]:
    """Two nodes that are probed once; a node's processes have its name in ``WHO``."""
    folder = tmp_path_factory.mktemp("summing")
    (folder / "work").mkdir()
    made = Skyctl(folder / "work", folder / "state")
    made.env["XDG_CACHE_HOME"] = str(folder / "cache")
    node = "  - {{name: {0}, transport: local, threads: 1, env: {{WHO: {1}-{0}}}}}\n"
    lines = "".join(node.format(name, folder.name) for name in "ab")
    (made.folder / "cluster.yaml").write_text(f"name: here\nnodes:\n{lines}")
    yield made
    made.end()


def summing(two: Skyctl) -> tuple[Command, int]:
    """The command, once its ranks have summed some times, and the process of the rank on node b."""
    before = runs.runs_of(two)
    child = two.start("bench-sync", "--bytes", "400kB", "--sync", "ring", *FOREVER, "--json")

    def rank() -> int:
        assert child.process.poll() is None, child.text
        (folder,) = runs.runs_of(two) - before
        if len((folder / "metrics.jsonl").read_text().splitlines()) < 3:
            return 0
        of_b = processes.marked(f"WHO={two.state.parent.name}-b")
        (found,) = [pid for pid in of_b if "skyctl.worker.rank" in processes.command(pid)]
        return found

    found: int = processes.until(rank, lambda: child.text)
    return child, found


def nothing_is_left(two: Skyctl) -> None:
    assert processes.left_of_state(two.state) == []
    assert processes.after_a_moment(lambda: runs.left_behind(two)) == []
    assert list((two.state.parent / "cache").glob("skyctl/sessions/s-*")) == []


def test_a_rank_that_is_killed_is_named(two: Skyctl) -> None:
    child, rank = summing(two)
    os.kill(rank, signal.SIGKILL)
    done = child.end(1)
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["sync"], row["measured_s"], row["rate_mbit"]) == ("ring", None, None)
    assert "rank 1 on b/cpu:0 (node b, " in row["error"]
    assert "was ended by SIGKILL" in row["error"]
    nothing_is_left(two)


def test_a_node_whose_agent_is_killed_is_named(two: Skyctl) -> None:
    child, rank = summing(two)
    os.kill(processes.parent(rank), signal.SIGKILL)
    error = json.loads(child.end(4).stdout)["error"]
    assert (error["node"], error["exit_code"]) == ("b", 4)
    assert "node b was lost" in error["message"]
    nothing_is_left(two)


def test_it_is_interrupted(two: Skyctl) -> None:
    child, _ = summing(two)
    child.interrupt()
    error = json.loads(child.end(130).stdout)["error"]
    assert error["exit_code"] == 130
    assert "interrupted" in error["message"]
    nothing_is_left(two)
