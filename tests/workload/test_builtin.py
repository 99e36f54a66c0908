from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import skyctl
from skyctl.errors import WorkloadError
from skyctl.workload.workload import Workload, load_workload
from skyctl.workload.workload_spec import make_spec

NEEDED_BY_TORCH = {
    "torch", "torchgen", "functorch", "typing_extensions", "sympy", "mpmath", "networkx", "jinja2",
    "markupsafe", "filelock", "fsspec", "nvidia", "triton",
}  # fmt: skip
SMALL = "gpt:layers=2,hidden=32,heads=4,context=16"


def run(workload: Workload, steps: int, cuts: tuple[int, ...] = ()) -> list[float]:
    """Losses of training on one device, the layers built in pieces."""
    edges = [0, *cuts, workload.layers]
    layers = [layer for a, b in itertools.pairwise(edges) for layer in workload.build(a, b)]
    optimizer = workload.optimizer([p for layer in layers for p in layer.parameters()])
    losses = []
    batches = workload.batches()
    for _ in range(steps):
        x, targets = next(batches)
        for layer in layers:
            x = layer(x)
        loss = workload.loss(x, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_layers_and_boundaries() -> None:
    workload = load_workload(make_spec(SMALL, batch_size=8))
    assert workload.names == [
        "embedding", "block.0.attention", "block.0.mlp", "block.1.attention", "block.1.mlp", "head",
    ]  # fmt: skip
    inputs, inside, outputs = (workload.boundary(i, 3)[0] for i in (0, 2, 6))
    assert (inputs.shape, inputs.dtype, inputs.requires_grad) == ((3, 16), "int64", False)
    assert (inside.shape, inside.dtype, inside.requires_grad) == ((3, 16, 32), "float32", True)
    assert outputs.shape == (3, 16, 256)
    assert inside.nbytes == 3 * 16 * 32 * 4
    assert workload.structure(0) is None
    with pytest.raises(WorkloadError, match=r"\[3, 9\).*6"):
        workload.build(3, 9)


def test_learns() -> None:
    losses = run(load_workload(make_spec(SMALL, batch_size=8, learning_rate=3e-3)), 40)
    assert losses[0] == pytest.approx(5.55, abs=0.1)
    assert losses[-1] < 4.0


def test_plan_does_not_matter() -> None:
    workload = load_workload(make_spec(SMALL, batch_size=4, seed=5))
    assert (
        run(workload, 3) == run(workload, 3, cuts=(1, 4)) == run(load_workload(workload.spec), 3, cuts=(3,))
    )


def test_weights_depend_on_seed_and_index_only() -> None:
    workload = load_workload(make_spec(SMALL, seed=1))
    deeper = load_workload(make_spec(SMALL.replace("layers=2", "layers=4"), seed=1))
    other = load_workload(make_spec(SMALL, seed=2))
    state = torch.get_rng_state()
    whole = workload.build(0, 6)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    part = workload.build(3, 5)
    for name, weight in part[0].state_dict().items():
        assert torch.equal(weight, whole[3].state_dict()[name])
    weight = part[0].state_dict()["qkv.weight"]
    assert torch.equal(weight, deeper.build(3, 4)[0].state_dict()["qkv.weight"])
    assert not torch.equal(weight, other.build(3, 4)[0].state_dict()["qkv.weight"])
    assert not torch.equal(weight, whole[1].state_dict()["qkv.weight"])


def test_batches() -> None:
    workload = load_workload(make_spec(SMALL, batch_size=6, seed=3))
    inputs, targets = next(workload.batches())
    assert inputs.shape == targets.shape == (6, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    part, _ = next(workload.batches(0, 2, 5))
    assert torch.equal(part, inputs[2:5])
    stream = workload.batches()
    third = [next(stream) for _ in range(3)][2][0]
    assert torch.equal(next(workload.batches(2))[0], third)
    assert not torch.equal(third, inputs)
    with pytest.raises(WorkloadError, match=r"\[2, 9\)"):
        next(workload.batches(0, 2, 9))


def test_bert(tmp_path: Path) -> None:
    text = tmp_path / "it's a text.txt"
    text.write_bytes(bytes(range(1, 101)) * 3)
    spec = make_spec("bert:layers=1,hidden=16,heads=2,context=11", batch_size=32, data_path=str(text))
    workload = load_workload(spec)
    assert workload.names[-1] == "head"
    assert workload.boundary(4, 5)[0].shape == (5, 2)
    inputs, labels = next(workload.batches())
    assert inputs.shape == (32, 11)
    assert set(labels.tolist()) == {0, 1}
    follows = (inputs[:, 6] - inputs[:, 5]) % 100 == 1
    assert torch.equal(follows[labels == 1], torch.ones_like(follows[labels == 1]))
    assert run(workload, 2)[0] == pytest.approx(0.69, abs=0.05)


def test_short_text(tmp_path: Path) -> None:
    (tmp_path / "s.txt").write_bytes(b"too short")
    workload = load_workload(make_spec(SMALL, data_path=str(tmp_path / "s.txt")))
    with pytest.raises(WorkloadError, match=r"has 9 bytes.*at least 17"):
        next(workload.batches())


def test_random_inputs() -> None:
    workload = load_workload(make_spec(SMALL, batch_size=4, random_inputs=True))
    inputs, _ = next(workload.batches())
    assert inputs.shape == (4, 16)
    assert int(inputs.max()) < 256
    assert torch.equal(inputs, next(load_workload(workload.spec).batches())[0])


def test_digest() -> None:
    digest = load_workload(make_spec(SMALL, batch_size=4, seed=1)).digest
    assert (
        load_workload(make_spec("gpt:hidden=32,heads=4,context=16,layers=2", batch_size=8)).digest == digest
    )
    assert load_workload(make_spec(SMALL.replace("layers=2", "layers=3"))).digest != digest


def test_runs_with_torch_alone(tmp_path: Path) -> None:
    """A node: an environment that holds torch and what torch itself needs, no numpy, no pydantic."""
    site = Path(sysconfig.get_paths()["purelib"])
    for entry in site.iterdir():
        top = entry.name.split("-")[0].split(".")[0]
        if top in NEEDED_BY_TORCH:
            (tmp_path / entry.name).symlink_to(entry)
    spec = load_workload(make_spec(SMALL, batch_size=2)).spec
    script = (
        "import sys, json, importlib.util, warnings\n"
        "warnings.filterwarnings('ignore', message='Failed to initialize NumPy')\n"
        "assert not any(importlib.util.find_spec(n) for n in ('numpy', 'pydantic', 'yaml', 'rich'))\n"
        "from skyctl.workload.workload import load_workload\n"
        "from skyctl.workload.workload_spec import WorkloadSpec\n"
        "from skyctl.checkpoint.node.safetensors import load as read, save\n"
        "w = load_workload(WorkloadSpec.from_dict(json.loads(sys.argv[1])))\n"
        "assert 'mode' not in w.shapes.__dict__, 'a node with the boundaries needs no fake tensors'\n"
        "layers = w.build(0, w.layers)\n"
        "x, y = next(w.batches())\n"
        "for layer in layers: x = layer(x)\n"
        "loss = w.loss(x, y); loss.backward()\n"
        "w.optimizer([p for layer in layers for p in layer.parameters()]).step()\n"
        "save(sys.argv[2], layers[0].state_dict()); read(sys.argv[2])\n"
        "print(loss.item())\n"
    )
    package = str(Path(next(iter(skyctl.__path__))).parent)
    done = subprocess.run(
        [sys.executable, "-S", "-c", script, json.dumps(spec.to_dict()), str(tmp_path / "w.safetensors")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([package, str(tmp_path)]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(5.55, abs=0.2)
