"""Patterns of node names."""

from __future__ import annotations

import pytest

from skyctl.errors import InputError
from skyctl.inventory.node_patterns import match_nodes, select_nodes
from skyctl.records.cluster import Cluster, Node

CLUSTER = Cluster(
    name="c",
    nodes=tuple(Node(name=n) for n in ("gpu-1", "gpu-2", "tower", "two words", "laptop")),
    groups={"fast": ("gpu-1", "tower"), "slow": ("laptop",)},
)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("tower", ["tower"]),
        ("laptop,gpu-1", ["gpu-1", "laptop"]),
        ("gpu-*", ["gpu-1", "gpu-2"]),
        ("fast", ["gpu-1", "tower"]),
        ("f*", ["gpu-1", "tower"]),
        ("all,!fast", ["gpu-2", "two words", "laptop"]),
        ("!fast", ["gpu-2", "two words", "laptop"]),
        ("!gpu-2,fast", ["gpu-1", "tower"]),
        ("gpu-*,&fast", ["gpu-1"]),
        ("two words", ["two words"]),
        (" tower , slow ", ["tower", "laptop"]),
        ("gpu-[2-9]", ["gpu-2"]),
        ("*", ["gpu-1", "gpu-2", "tower", "two words", "laptop"]),
    ],
)
def test_match(pattern: str, names: list[str]) -> None:
    assert list(match_nodes(CLUSTER, pattern)) == names


@pytest.mark.parametrize(
    "pattern", ["towr", "tower,nope", "all,!nope", "tower,!all", "", " , ", "!", "TOWER"]
)
def test_nothing_matched_names_what_there_is(pattern: str) -> None:
    with pytest.raises(
        InputError, match=r"\(nodes: gpu-1, gpu-2, tower, two words, laptop; groups: fast, slow\)"
    ):
        match_nodes(CLUSTER, pattern)


def test_select_keeps_order_and_what_is_left_of_groups() -> None:
    assert select_nodes(CLUSTER, None) is CLUSTER
    small = select_nodes(CLUSTER, "laptop,gpu-1")
    assert [node.name for node in small.nodes] == ["gpu-1", "laptop"]
    assert small.groups == {"fast": ("gpu-1",), "slow": ("laptop",)}
    Cluster.model_validate(small.model_dump())
