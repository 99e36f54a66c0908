"""Which step, from where, and whose copies: small cases by hand, and properties of random ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from skyctl.checkpoint.node.layout import HeldShard
from skyctl.checkpoint.node.recovery import (
    RestorePoint,
    ShardSource,
    ShardTransfer,
    newest_restore_point,
    place_replicas,
    plan_transfers,
)

A, B = "a" * 64, "b" * 64


def held(sha256: str = A, *, attempt: int = 0, own: bool = True, size_bytes: int = 10) -> HeldShard:
    return HeldShard(sha256, size_bytes, attempt, own)


def test_the_newest_step_that_is_there_in_full() -> None:
    holdings = {
        "n1": {60: {0: held(), 1: held()}, 80: {0: held(), 1: held()}},
        "n2": {60: {2: held(), 0: held(own=False)}},
    }
    chosen = newest_restore_point(holdings, 3)
    assert chosen is not None
    assert (chosen.step, chosen.disagreeing) == (60, ())
    assert chosen.layers[0].nodes == ("n1", "n2")
    assert chosen.sha256s(1, 3) == {1: A, 2: A}
    assert newest_restore_point(holdings, 4) is None
    assert newest_restore_point({}, 1) is None
    holdings["n2"][80] = {2: held()}
    assert newest_restore_point(holdings, 3).step == 80  # type: ignore[union-attr]
    assert newest_restore_point(holdings, 3, at_most=79).step == 60  # type: ignore[union-attr]


def test_attempts_are_never_mixed() -> None:
    holdings = {"n1": {60: {0: held(), 1: held()}}, "n2": {60: {1: held(B, attempt=1)}}}
    chosen = newest_restore_point(holdings, 2)
    assert chosen is not None
    assert (chosen.attempt, chosen.layers[1].sha256) == (0, A)
    holdings["n3"] = {60: {0: held(B, attempt=1)}}
    chosen = newest_restore_point(holdings, 2)
    assert chosen is not None
    assert (chosen.attempt, chosen.layers[0].nodes, chosen.layers[1].nodes) == (1, ("n3",), ("n2",))


def test_a_later_attempts_steps_count_before_those_it_has_left_behind() -> None:
    """A node that comes back may make a step whole that the run has long gone on without."""
    holdings = {
        "back again": {100: {0: held(), 1: held()}, 60: {0: held(), 1: held()}},
        "n2": {80: {0: held(B, attempt=1), 1: held(B, attempt=1)}},
    }
    chosen = newest_restore_point(holdings, 2)
    assert chosen is not None
    assert (chosen.step, chosen.attempt) == (80, 1)
    del holdings["n2"][80][1]
    assert newest_restore_point(holdings, 2).step == 100  # type: ignore[union-attr]


def test_nodes_that_disagree_are_told_and_the_owner_counts() -> None:
    holdings = {
        "n1": {60: {0: held(A)}},
        "n2": {60: {0: held(B, own=False)}},
        "n3": {60: {0: held(B, own=False)}},
    }
    chosen = newest_restore_point(holdings, 1)
    assert chosen is not None
    assert chosen.layers[0] == ShardSource(A, 10, ("n1",))
    assert len(chosen.disagreeing) == 2
    assert "layer 0 of step 60: n2 has bbbbbbbbbbbb…, n1 aaaaaaaaaaaa…, which counts" in chosen.disagreeing
    del holdings["n1"]
    holdings["n4"] = {60: {0: held(A, own=False)}}
    chosen = newest_restore_point(holdings, 1)
    assert chosen is not None
    assert chosen.layers[0].nodes == ("n2", "n3"), "else the one on more nodes"


def test_files_come_over_fast_links() -> None:
    layers = {n: ShardSource(str(n), 100, ("near", "far")) for n in range(4)} | {
        4: ShardSource("4", 7, ("near", "new"))
    }
    chosen = RestorePoint(60, 0, layers)
    rates = {("near", "new"): 10.0, ("far", "new"): 1.0}
    plan = plan_transfers(chosen, {"new": range(5), "near": [0]}, rates)
    assert plan["near"] == []
    assert [(pull.source, pull.layer) for pull in plan["new"]] == [("near", n) for n in range(4)]
    equal = plan_transfers(chosen, {"new": range(5)})
    assert sorted(pull.source for pull in equal["new"]) == ["far", "far", "near", "near"]
    assert equal["new"][0] == ShardTransfer("far", 0, "0", 100)


@given(
    st.dictionaries(
        st.integers(0, 9),
        st.tuples(st.integers(1, 10**9), st.sets(st.sampled_from("abcd"), min_size=1)),
        min_size=1,
    ),
    st.dictionaries(st.sampled_from("abcde"), st.sets(st.integers(0, 9))),
    st.dictionaries(st.tuples(st.sampled_from("abcde"), st.sampled_from("abcde")), st.floats(0, 1e9)),
)
def test_every_file_that_is_needed_comes_once_from_who_has_it(
    layers: dict[int, tuple[int, set[str]]],
    wanted: dict[str, set[int]],
    rates: dict[tuple[str, str], float],
) -> None:
    sources = {n: ShardSource(str(n), size, tuple(sorted(nodes))) for n, (size, nodes) in layers.items()}
    needs = {node: {n for n in numbers if n in sources} for node, numbers in wanted.items()}
    plan = plan_transfers(RestorePoint(1, 0, sources), needs, rates)
    assert plan.keys() == needs.keys()
    for node, given_pulls in plan.items():
        assert sorted(p.layer for p in given_pulls) == sorted(
            n for n in needs[node] if node not in sources[n].nodes
        )
        assert all(p.source in sources[p.layer].nodes for p in given_pulls)


def test_copies_go_round_the_line() -> None:
    assert place_replicas(["a", "b", "c"]) == {"a": ["c"], "b": ["a"], "c": ["b"]}
    assert place_replicas(["a"]) == {"a": []}
    assert place_replicas(["a", "b", "b"], 3) == {"a": ["b"], "b": ["a"]}
    assert place_replicas(["a", "b", "c"], 3, writers=["a"]) == {"a": [], "b": ["a"], "c": ["a"]}


@given(st.lists(st.integers(0, 20), min_size=1, unique=True), st.integers(1, 4))
def test_every_nodes_state_is_on_so_many(numbers: list[int], replicas: int) -> None:
    nodes = [str(number) for number in numbers]
    copies = place_replicas(nodes, replicas)
    for owner in nodes:
        holders = [node for node, owners in copies.items() if owner in owners]
        assert owner not in holders
        assert len(holders) == min(replicas, len(nodes)) - 1
    assert max(map(len, copies.values())) - min(map(len, copies.values())) == 0
