"""The averaging benchmark: its ring is one, a peer that can't be had is said so, and it runs."""

import json
import subprocess
import sys
from pathlib import Path

import averaging
import pytest
from runs.averaging_rank import ring_routes

from skyctl.records.sync import Route, SyncGroup


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_a_rings_routes_are_paths_to_their_roots(count):
    """Each rank's place agrees with the others', and every route is a tree up and one down."""
    places = [ring_routes(rank, count) for rank in range(count)]
    routes = []
    for number in range(count):
        own = [place[number] for place in places]
        up = [[str(r), str(p.up_parent)] for r, p in enumerate(own) if p.up_parent is not None]
        down = [[str(p.down_parent), str(r)] for r, p in enumerate(own) if p.down_parent is not None]
        assert sorted(up) == sorted([str(c), str(r)] for r, p in enumerate(own) for c in p.up_children)
        assert sorted(down) == sorted([str(r), str(c)] for r, p in enumerate(own) for c in p.down_children)
        (root,) = [str(r) for r, p in enumerate(own) if p.up_parent is None]
        routes.append(Route(share=own[0].share, root=root, up=up, down=down))
    assert SyncGroup(start=0, stop=1, routes=routes)
    assert sorted(route.root for route in routes) == sorted(map(str, range(count)))


def test_an_environment_that_can_not_be_made_is_said_so(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(averaging.PeerError, match="venv"):
        averaging.hivemind_python(file)


@pytest.mark.slow
def test_it_runs():
    done = subprocess.run(
        [sys.executable, str(Path(averaging.__file__)), "--turns", "2"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert row["skyctl"]["turns"] == row["gloo"]["turns"] == 2
    assert "--peers" in row["hivemind"]["unavailable"]
