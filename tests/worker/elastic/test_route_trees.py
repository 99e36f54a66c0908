"""Routes go on without those that have left."""

from __future__ import annotations

import itertools

import pytest
from tests.worker.sums import RouteEdges, ring, star

from skyctl.worker.elastic.route_trees import place_on, routes_among
from skyctl.worker.rank_order import RouteTree

CHAIN: list[RouteEdges] = [(1.0, 2, [(4, 3), (3, 2), (0, 1), (1, 2)], [(2, 1), (1, 0), (2, 3), (3, 4)])]


@pytest.mark.parametrize("routes", [ring(5), star(5), star(5, root=3), CHAIN], ids=str)
def test_all_that_are_left_send_up_and_get_the_sum(routes: list[RouteEdges]) -> None:
    trees = [RouteTree(share, root, tuple(up), tuple(down)) for share, root, up, down in routes]
    for count in range(1, 5):
        for members in itertools.combinations(range(5), count):
            for tree in routes_among(trees, members):
                assert tree.root in members
                assert {child for child, _ in tree.up} == set(members) - {tree.root}
                assert {child for _, child in tree.down} == set(members) - {tree.root}
                for way in (dict(tree.up), {child: parent for parent, child in tree.down}):
                    for rank in members:
                        at, passed = rank, 0
                        while at != tree.root:
                            at, passed = way[at], passed + 1
                            assert passed < 5
                places = {rank: place_on(tree, rank) for rank in members}
                assert places[tree.root].up_parent is None
                assert places[tree.root].down_parent is None
