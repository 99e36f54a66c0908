"""``--init-from``: the weights that a model starts from, strict by name and shape, and sent by layer."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.workload.hf import hub_folders
from torch import Tensor, nn

from skyctl.checkpoint.node import safetensors
from skyctl.errors import WorkloadError
from skyctl.worker.checkpointer import save_weights
from skyctl.workload.shipped_weights import write_layer_weights
from skyctl.workload.starting_weights import find_stored_weights
from skyctl.workload.weight_files import weights_digest
from skyctl.workload.workload import Workload, load_workload
from skyctl.workload.workload_spec import WorkloadSpec

GPT = "gpt:layers=1,hidden=16,heads=2,context=8"
MODEL = "def model(): return [nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)]"


def state_of(workload: Workload) -> dict[str, Tensor]:
    """The whole model's values, by the names of weights.safetensors."""
    state = {}
    for index, layer in enumerate(workload.build(0, workload.layers)):
        names = workload.weight_names(index)
        state |= {names[own]: tensor.detach() for own, tensor in layer.state_dict().items()}
    return state


def same(state: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


def starting(spec: WorkloadSpec, path: Path) -> Workload:
    return load_workload(replace(spec, init_from=str(path), init_sha256=weights_digest(path)))


@pytest.fixture
def whole(user: Callable[..., Workload]) -> Workload:
    return user(MODEL)


def refused(whole: Workload, path: Path) -> WorkloadError:
    with pytest.raises(WorkloadError) as caught:
        starting(replace(whole.spec, boundaries=None), path)
    assert caught.value.exit_code == 2
    return caught.value


def test_what_a_run_ended_with(tmp_path: Path) -> None:
    spec = WorkloadSpec(GPT, seed=1)
    before = load_workload(spec)
    path = tmp_path / "weights.safetensors"
    save_weights(path, before.build(0, before.layers), 0, before.model)
    after = starting(replace(spec, seed=2), path)
    assert same(state_of(after), state_of(before))
    assert not same(state_of(load_workload(replace(spec, seed=2))), state_of(before))
    assert after.digest == before.digest  # plans made for it fit


@pytest.mark.parametrize("suffix", [".pt", ".pth"])
def test_a_plain_state_dict_of_torch(suffix: str, whole: Workload, tmp_path: Path) -> None:
    torch.manual_seed(5)
    mine = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)).double()
    torch.save(mine.state_dict(), tmp_path / f"mine{suffix}")
    weights = state_of(starting(replace(whole.spec, boundaries=None), tmp_path / f"mine{suffix}"))
    wanted = {name: tensor.to(weights[name].dtype) for name, tensor in mine.state_dict().items()}
    assert same(weights, wanted)


def test_each_node_is_sent_its_layers(whole: Workload, tmp_path: Path) -> None:
    values = {
        name: torch.randn_like(t) if t.is_floating_point() else t for name, t in state_of(whole).items()
    }
    safetensors.save(tmp_path / "w.safetensors", values)
    loaded = starting(replace(whole.spec, boundaries=None), tmp_path / "w.safetensors")
    stored = find_stored_weights(loaded.spec)
    assert stored is not None
    write_layer_weights(stored, [1, 2], tmp_path / "part")
    sent = safetensors.read_header(tmp_path / "part").tensors
    assert {name.partition(".")[0] for name in sent} == {"1", "2"}
    (tmp_path / "w.safetensors").unlink()  # a node has no such file
    node = load_workload(replace(loaded.spec, init_from=None, weights=str(tmp_path / "part")))
    for index, layer in enumerate(node.build(1, 3), 1):
        for own, tensor in layer.state_dict().items():
            assert torch.equal(tensor, values[f"{index}.{own}"])


def test_an_ordinary_modules_own_state_dict(user: Callable[..., Workload], tmp_path: Path) -> None:
    """Cut before it is matched: its layers hold tensors under the names that they have in the module."""
    plain = user(
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.one, self.two = nn.Linear(6, 5), nn.Linear(5, 4)\n"
        "    def forward(self, x): return self.two(torch.relu(self.one(x)))\n"
        "def model(): return Net()"
    )
    values = {name: torch.randn_like(tensor) for name, tensor in state_of(plain).items()}
    assert set(values) == {"one.weight", "one.bias", "two.weight", "two.bias"}
    torch.save(values, tmp_path / "w.pt")
    loaded = starting(replace(plain.spec, boundaries=None), tmp_path / "w.pt")
    assert same(state_of(loaded), values)
    safetensors.save(tmp_path / "w.safetensors", values)  # beside train.py, which has not opened it
    assert same(
        state_of(starting(replace(plain.spec, boundaries=None, example=None), tmp_path / "w.safetensors")),
        values,
    )
    stored = find_stored_weights(loaded.spec)
    assert stored is not None
    write_layer_weights(stored, range(loaded.layers), tmp_path / "part")
    node = load_workload(replace(loaded.spec, init_from=None, weights=str(tmp_path / "part")))
    assert same(state_of(node), values)


def test_all_that_does_not_fit_is_listed(whole: Workload, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    values = state_of(whole)
    del values["0.bias"], values["2.weight"]
    values |= {f"more.{n}": torch.zeros(1) for n in range(8)}
    values |= {"0.weight": torch.zeros(5, 7), "1.num_batches_tracked": torch.tensor(0.5)}
    safetensors.save(path, values)
    error = refused(whole, path)
    for words in (
        f"{path} does not fit train.py: it lacks 0.bias, 2.weight;",
        "it has what the model has not: more.0, more.1, more.2, more.3, more.4 and 3 more;",
        "of another shape: 0.weight is [5, 7], the model's is [5, 6];",
        "of another type: 1.num_batches_tracked is float32, the model's is int64",
    ):
        assert words in error.message
    assert "state_dict()" in (error.hint or "")


def test_what_people_save_instead(whole: Workload, tmp_path: Path) -> None:
    values = OrderedDict(state_of(whole))
    path = tmp_path / "w.pt"
    torch.save({"epoch": 3, "model": values}, path)
    error = refused(whole, path)
    assert "is no plain state dict: it holds epoch (int), model (OrderedDict)" in error.message
    assert "torch.save(checkpoint['model'], 'weights.pt')" in (error.hint or "")
    torch.save({f"module.{name}": tensor for name, tensor in values.items()}, path)
    assert "its names begin with 'module.'" in (refused(whole, path).hint or "")
    torch.save(nn.Linear(1, 1), path)
    assert "can't be read as weights" in refused(whole, path).message
    path.write_bytes(b"no archive")
    assert "can't be read as weights" in refused(whole, path).message
    (tmp_path / "empty").mkdir()
    assert "holds neither model.safetensors nor" in refused(whole, tmp_path / "empty").message


def test_weights_that_change_before_they_are_sent(whole: Workload, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    safetensors.save(path, state_of(whole))
    loaded = starting(replace(whole.spec, boundaries=None), path)
    safetensors.save(path, {name: tensor + 1 for name, tensor in state_of(whole).items()})
    with pytest.raises(WorkloadError, match="have changed since the run was to start from them"):
        find_stored_weights(loaded.spec)
    assert find_stored_weights(replace(loaded.spec, init_from=None)) is None


def test_a_layer_that_has_one_tensor_under_two_names(user: Callable[..., Workload], tmp_path: Path) -> None:
    """The safetensors library writes such a tensor once."""
    twice = user(
        "class Twice(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a = nn.Linear(6, 6)\n"
        "        self.b = self.a\n"
        "    def forward(self, x): return self.b(self.a(x))\n"
        "def model(): return [Twice(), nn.Linear(6, 4)]"
    )
    values = {name: torch.randn_like(t) for name, t in state_of(twice).items() if not name.startswith("0.b.")}
    safetensors.save(tmp_path / "w.safetensors", values)
    layer = starting(replace(twice.spec, boundaries=None), tmp_path / "w.safetensors").build(0, 1)[0]
    assert torch.equal(layer.b.weight, values["0.a.weight"])  # type: ignore[union-attr, arg-type]


def test_a_hugging_face_folder_and_a_run_of_it(tmp_path: Path) -> None:
    """Under the library's names and under those of a run's file; the rate is that of stored weights."""
    config = hub_folders.CONFIGS["llama"]
    bare = hub_folders.load(hub_folders.write(tmp_path / "bare", config))
    rate = bare.optimizer(bare.build(0, 1)[0].parameters()).param_groups[0]["lr"]
    folder = hub_folders.write(tmp_path / "stored", config)
    hub_folders.uncut(folder, seed=3).save_pretrained(str(folder), max_shard_size="20KB")
    stored = hub_folders.load(folder)
    asked = replace(bare.spec, boundaries=None)
    started = starting(asked, folder)
    assert same(state_of(started), state_of(stored))
    save_weights(tmp_path / "w.safetensors", stored.build(0, stored.layers), 0, stored.model)
    again = starting(asked, tmp_path / "w.safetensors")
    assert same(state_of(again), state_of(stored))
    node = load_workload(replace(again.spec, init_from=None))  # one that goes on from a checkpoint
    rates = {w.optimizer(w.build(0, 1)[0].parameters()).param_groups[0]["lr"] for w in (started, again, node)}
    assert rates == {5e-5}
    assert rate != 5e-5
    index = folder / "model.safetensors.index.json"
    named = json.loads(index.read_text())
    first = next(iter(named["weight_map"]))
    named["weight_map"]["more"] = named["weight_map"].pop(first)
    index.write_text(json.dumps(named))
    error = refused(bare, folder)
    assert f"it lacks {first}" in error.message
    assert "it has what the model has not: more" in error.message
