"""Bringing the ranks' records here: all of them or an error that names the rank, and nothing left over."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyctl.errors import SkyctlError
from skyctl.files import RunPaths
from skyctl.run.artifacts import gather_traces
from skyctl.worker.rank_events import RankResult

from ..helpers.orders import rank_spec


def run(traces: dict[int, str]) -> Any:
    specs = [rank_spec(rank, f"n{rank}") for rank in range(2)]
    results = {rank: RankResult(1, trace=path) for rank, path in traces.items()}
    return SimpleNamespace(specs=specs, paths=RunPaths.new(), results=results)


def sessions(texts: dict[str, str]) -> Any:
    def fetch(remote: str, local: Path, _most_bytes: int) -> None:
        local.write_text(texts[remote])

    return {f"n{rank}": SimpleNamespace(fetch=fetch) for rank in range(2)}


def test_in_the_ranks_order() -> None:
    steps = [{"step": rank, "start_s": 0.0, "end_s": 1.0, "spans": []} for rank in range(2)]
    texts = {f"/t{rank}": json.dumps({"clocks": {}, "steps": [steps[rank]]}) for rank in range(2)}
    done = run({1: "/t1", 0: "/t0"})
    assert [document["steps"] for document in gather_traces(done, done.paths, sessions(texts))] == [
        [steps[0]],
        [steps[1]],
    ]
    assert sorted(path.name for path in done.paths.folder.iterdir()) == ["attempts", "logs"]


@pytest.mark.parametrize(
    ("traces", "text", "words"),
    [
        ({0: "/t0"}, "{}", "rank 1 on n1/cpu:0 recorded nothing"),
        ({0: "/t0", 1: "/t1"}, "{", "can't read what rank 1 on n1/cpu:0 recorded"),
    ],
)
def test_what_is_missing_or_damaged_is_named(traces: dict[int, str], text: str, words: str) -> None:
    done = run(traces)
    with pytest.raises(SkyctlError, match=words):
        gather_traces(done, done.paths, sessions({"/t0": '{"clocks": {}, "steps": []}', "/t1": text}))
    assert sorted(path.name for path in done.paths.folder.iterdir()) == ["attempts", "logs"]
