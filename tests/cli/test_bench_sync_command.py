"""``skyctl bench-sync``: real sums between local nodes, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.helpers.commands import Done, run_briefly
from tests.learning.profiles import device, profile

from skyctl.cli.option_values import parse_bytes, parse_sync_list
from skyctl.errors import InputError, NodeError
from skyctl.jobs.sum_benchmark import plan_sums
from skyctl.records.plan import WorkloadRef
from skyctl.records.profile import NodeFailure

NODES = (
    "name: three\nnodes:\n"
    "  - {name: a, transport: local, threads: 1}\n"
    "  - {name: b, transport: local, threads: 1}\n"
    "  - {name: c, transport: local, threads: 1}\n"
)


def bench(folder: Path, *words: str) -> Done:
    (folder / "cluster.yaml").write_text(NODES)
    return run_briefly(folder, "bench-sync", *words, SKYCTL_HOME=str(folder / "state"))


@pytest.mark.slow
def test_sums_are_predicted_and_measured(tmp_path: Path) -> None:
    done = bench(tmp_path, "--bytes", "400kB", "--sync", "ring,star", "--repeat", "2", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["bytes"], document["nodes"], document["helpers"], document["repeat"]) == (
        400_000,
        ["a", "b", "c"],
        [],
        2,
    )
    ring, star = document["rows"]
    assert (ring["sync"], ring["kind"], ring["routes"]) == ("ring", "ring", 3)
    assert (star["sync"], star["kind"], star["routes"]) == ("star", "star", 1)
    for row in (ring, star):
        assert row["nbytes"] == 400_000
        assert row["predicted_s"] > 0
        assert row["measured_s"] > 0
        assert row["rate_mbit"] == pytest.approx(3.2 / row["measured_s"])
        assert row["error"] is None
    assert ring["measured_s"] != star["measured_s"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--bytes", "10 apples"), "no size"),
        (("--bytes", "10"), "4 each"),
        (("--sync", "ring,tree"), "--sync"),
        (("--limit", "a"), "two nodes"),
        (("--helper", "a", "--helper", "b"), "two nodes"),
    ],
)
def test_what_can_not_be_summed_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    skyctl: Callable[..., tuple[int, str, str]],
    words: tuple[str, ...],
    message: str,
) -> None:
    (tmp_path / "cluster.yaml").write_text(NODES)
    monkeypatch.chdir(tmp_path)
    code, _, err = skyctl("bench-sync", *words)
    assert code == 2
    assert message in err


@pytest.mark.parametrize("lost", ["c", "helper"])
def test_a_node_that_was_lost_while_it_was_probed_is_named(lost: str) -> None:
    failure = NodeFailure(node=lost, error="its connection ended", hint="see whether it sleeps, then again")
    probed = profile(device("a", 1.0), device("b", 1.0)).model_copy(update={"failures": (failure,)})
    ref = WorkloadRef(source="sums", digest="w", batch_size=3, dtype="float32", seed=0)
    replicas = ["a", "b", "c"] if lost == "c" else ["a", "b"]
    with pytest.raises(NodeError, match=f"node {lost} was not measured: its connection ended") as refused:
        plan_sums(probed, ref, replicas, ["ring"], helpers=["helper"])
    assert refused.value.exit_code == 4
    assert refused.value.hint == "see whether it sleeps, then again: skyctl bench-sync --refresh"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("40000000", 40_000_000),
        ("10MB", 10_000_000),
        ("1.5 kB", 1500),
        ("64MiB", 64 << 20),
        ("2G", 2 * 10**9),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes("--bytes", text) == size


@pytest.mark.parametrize("text", ["", "MB", "-1", "1e6", "10TB", "10 i", "1 M B"])
def test_what_is_no_size_is_named(text: str) -> None:
    with pytest.raises(InputError, match="--bytes"):
        parse_bytes("--bytes", text)


def test_ways_to_sum() -> None:
    assert parse_sync_list("ring, trees,ring") == ("ring", "trees")
    with pytest.raises(InputError, match="--sync"):
        parse_sync_list("ring,")
