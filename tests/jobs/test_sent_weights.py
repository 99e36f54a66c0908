"""Stored weights that a node has itself are read there; what only looks like them is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from skyctl.agent.task_orders import write_order
from skyctl.checkpoint.node import safetensors
from skyctl.errors import WorkloadError
from skyctl.jobs import sent_weights
from skyctl.records.cluster import Node
from skyctl.remote.base import ConnectOptions
from skyctl.remote.session_factory import open_session
from skyctl.workload import held_weights
from skyctl.workload.held_weights import FindWeights, WantedFile, digest_pieces, possible_places
from skyctl.workload.shipped_weights import ShippedWeights
from skyctl.workload.stored_weights import StoredWeights, WeightNaming

NAMES = [{"weight": "a"}, {"weight": "b"}]


def write(path: Path, fill: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    safetensors.save(path, {"a": torch.full((4,), 1.0), "b": torch.full((4,), fill)})
    return path


def stored(path: Path) -> StoredWeights:
    return StoredWeights(dict.fromkeys("ab", path), NAMES, WeightNaming(NAMES))


@pytest.mark.parametrize(
    ("layers", "fill", "in_place"), [([0, 1], 2.0, True), ([0, 1], 3.0, False), ([0], 3.0, True)]
)
def test_a_file_counts_for_the_values_that_the_node_needs_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: list[int], fill: float, in_place: bool
) -> None:
    """The node's file has the same name, size and header in any case."""
    own, theirs = write(tmp_path / "own.safetensors", 2.0), write(tmp_path / "theirs.safetensors", fill)
    monkeypatch.setattr(sent_weights, "possible_places", lambda _path: (str(theirs),))
    with open_session(Node(name="n", transport="local"), ConnectOptions(grace_s=0.3)) as session:
        told: list[str] = []
        paths = sent_weights.send_weights({"n": session}, stored(own), {"n": layers}, told.append)
        weights = ShippedWeights(Path(paths["n"]))
        read = {index: weights.layer(index) for index in (0, 1)}
        assert [list(values) for values in read.values()] == [["weight"], ["weight"][: len(layers) - 1]]
        assert read[0]["weight"].tolist() == [1.0] * 4
        if len(layers) > 1:
            assert read[1]["weight"].tolist() == [2.0] * 4
        assert told == []  # it is this machine
        write(theirs, 5.0)
        if in_place:
            with pytest.raises(WorkloadError, match="has changed since it was compared"):
                _ = read[0]["weight"]
        else:
            assert read[0]["weight"].tolist() == [1.0] * 4


def test_tensors_that_only_the_launcher_has_are_sent_beside_those_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, other = write(tmp_path / "both.safetensors", 2.0), write(tmp_path / "other.safetensors", 7.0)
    monkeypatch.setattr(sent_weights, "possible_places", lambda path: (str(path),) if path == both else ())
    adapters = StoredWeights({"b": other}, [{}, NAMES[1]], WeightNaming([{}, NAMES[1]]))
    with open_session(Node(name="n", transport="local"), ConnectOptions(grace_s=0.3)) as session:
        over = adapters.over(stored(both))
        paths = sent_weights.send_weights({"n": session}, over, {"n": [0, 1]}, lambda _text: None)
        weights = ShippedWeights(Path(paths["n"]))
        assert [weights.layer(i)["weight"].tolist()[0] for i in (0, 1)] == [1.0, 7.0]
        both.unlink()
        assert weights.layer(1)["weight"].tolist() == [7.0] * 4


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        (".cache/huggingface/hub", {}),
        ("cache/huggingface/hub", {"XDG_CACHE_HOME": "cache"}),
        ("hf/hub", {"HF_HOME": "hf"}),
        ("own", {"HF_HUB_CACHE": "own"}),
    ],
)
def test_a_node_looks_below_its_home_and_in_its_hub_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, variables: dict[str, str]
) -> None:
    inner = "models--org--tiny/snapshots/0123/model.safetensors"
    here = write(tmp_path / "here" / "cache" / inner, 2.0)
    monkeypatch.setenv("HOME", str(tmp_path / "here"))
    places = possible_places(here)
    assert places == (str(here), f"~/cache/{inner}", inner)
    for variable in ("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, str(tmp_path / "there" / value))
    monkeypatch.setenv("HOME", str(tmp_path / "there"))
    pieces = ((0, 8), (here.stat().st_size - 4, here.stat().st_size))

    def ask() -> list[dict[str, object] | None]:
        wanted = WantedFile(places[1:], here.stat().st_size, pieces)
        files: list[dict[str, object] | None] = held_weights.main(write_order(FindWeights((wanted,))), None)[  # type: ignore[arg-type]
            "files"
        ]
        return files

    assert ask() == [None]
    there = write(tmp_path / "there" / name / inner, 2.0)
    (found,) = ask()
    assert found is not None
    assert (found["path"], found["sha256"]) == (str(there), digest_pieces(here, pieces))
    there.write_bytes(there.read_bytes() + b"\0")
    assert ask() == [None]
