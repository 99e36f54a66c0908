"""Deferred initialisation: the same models as without it, and never more memory than the layers wanted."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from skyctl.errors import WorkloadError
from skyctl.workload.deferred_init import deferred_initialization, derived_seed, is_deferred, tensors_of
from skyctl.workload.workload import Workload

Make = Callable[..., Workload]


class SeededDraws(TorchDispatchMode):
    """Gives each operation that draws random numbers the seed that it has on the tape."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.draws = seed, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws += 1
            torch.manual_seed(derived_seed(self.seed, f"draw {self.draws}"))
        return func(*args, **(kwargs or {}))


def real(layer: nn.Module, record: Any) -> dict[str, Tensor]:
    names = dict(layer.named_parameters()) | dict(layer.named_buffers())
    late = {n: t for n, t in names.items() if is_deferred(t)}
    values = record.materialize(list(late.values()))
    return {**names, **dict(zip(late, values, strict=True))}


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.free = nn.Parameter(torch.randn(4, 4) * 0.02)
        self.blocks = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in torch.linspace(0, 0.1, 3).tolist())
        self.rates = [x.item() for x in torch.linspace(0, 0.1, 3)]
        self.register_buffer("mask", torch.tril(torch.ones(5, 5)).view(1, 5, 5))
        self.register_buffer("table", torch.tensor([1.0, 2.0]).repeat(2))
        for block in self.blocks:
            nn.init.trunc_normal_(block.weight, std=0.3)
        nn.init.orthogonal_(self.free)
        with torch.no_grad():
            self.blocks[1].weight.data.mul_(2).add_(self.mask[0, :4, :4])
            self.blocks[2].weight[0] = 7


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(5, 3),
        lambda: nn.Sequential(nn.Embedding(9, 4, padding_idx=2), nn.LayerNorm(4)),
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)),
        lambda: nn.MultiheadAttention(8, 2),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False),
        lambda: nn.LSTM(3, 4),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)),
        Custom,
    ],
)
def test_same_as_without(make: Callable[[], nn.Module]) -> None:
    with deferred_initialization(3) as record:
        late = make()
    assert any(is_deferred(p) for p in late.parameters())
    values = real(late, record)
    with SeededDraws(3):
        plain = make()
    expected = dict(plain.named_parameters()) | dict(plain.named_buffers())
    assert set(values) == set(expected)
    for name, value in expected.items():
        assert torch.equal(values[name], value), name
        assert values[name].stride() == value.stride()
    if isinstance(plain, Custom):
        assert late.rates == plain.rates


def test_values_on_demand_and_generators() -> None:
    with deferred_initialization(1) as record:
        weight = torch.empty(4)
        weight.uniform_(2, 3, generator=torch.Generator().manual_seed(1))
        assert bool((weight > 1).all())
        assert torch.equal(torch.nonzero(weight > 1)[:, 0], torch.arange(4))
        kept = weight.clone()
        weight.zero_()
        kept[1:3].fill_(9)
    (value,) = record.materialize([kept])
    assert value[1:3].tolist() == [9, 9]
    assert 2 <= value[0] <= 3
    assert is_deferred(kept)


class Copies(nn.Module):
    """Weights that come from each other, from NumPy, from a value that is read, from a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(4, 4)
        self.teacher = copy.deepcopy(self.student)
        self.scaled = nn.Linear(4, 4, bias=False)
        with torch.no_grad():
            self.scaled.weight /= self.scaled.weight.norm().item()
            self.student.bias.mul_(2)
        self.given = nn.Embedding(3, 2)
        self.given.weight.data = torch.from_numpy(np.random.randn(3, 2).astype(np.float32))
        own = torch.Generator().manual_seed(5)
        self.drawn = nn.Parameter(torch.randn(3, generator=own))
        self.drawn_next = nn.Parameter(torch.empty(3).uniform_(generator=own))


def test_values_agree_whoever_asks_for_them() -> None:
    state = np.random.get_state()[1].tolist()
    with deferred_initialization(3) as record:
        late = Copies()
    assert np.random.get_state()[1].tolist() == state
    with deferred_initialization(3) as other:
        again = Copies()
    student, teacher = real(late.student, record), real(late.teacher, record)
    assert torch.equal(student["weight"], teacher["weight"])
    assert torch.equal(student["bias"], 2 * teacher["bias"])
    assert abs(real(late.scaled, record)["weight"].norm().item() - 1) < 1e-5
    assert torch.equal(real(late.given, record)["weight"], real(again.given, other)["weight"])
    generator = torch.Generator().manual_seed(5)
    (drawn, drawn_next) = record.materialize([late.drawn, late.drawn_next])
    assert torch.equal(drawn, torch.randn(3, generator=generator))
    assert torch.equal(drawn_next, torch.empty(3).uniform_(generator=generator))


def test_loaded_weights(tmp_path: Any) -> None:
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "w.pt")
    with deferred_initialization(1) as record:
        layer = nn.Linear(3, 2)
        layer.load_state_dict(torch.load(tmp_path / "w.pt"))
    assert torch.equal(real(layer, record)["weight"], torch.load(tmp_path / "w.pt")["weight"])


def test_tensors_of_finds_plain_attributes() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nested = {"a": [torch.ones(2), (torch.ones(3),)]}
            self.inner = nn.Linear(2, 2)

    assert sorted(t.numel() for t in tensors_of(Odd())) == [2, 2, 3, 4]


class Peak(TorchDispatchMode):
    """The most bytes of real tensors alive that were made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.counted: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta" and type(tensor) is not FakeTensor:
                storage = tensor.untyped_storage()
                if storage._cdata not in self.counted:
                    self.counted.add(storage._cdata)
                    self.now += storage.nbytes()
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())
        return out

    def gone(self, key: int, nbytes: int) -> None:
        self.counted.discard(key)
        self.now -= nbytes


def test_only_the_wanted_layers_get_memory(user: Make) -> None:
    body = (
        "class Block(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.w = nn.Parameter(torch.randn(256, 256) * 0.02)\n"
        "        self.mask = torch.tril(torch.ones(16, 16))\n"
        "        self.register_buffer('b', torch.zeros(256))\n"
        "    def forward(self, x): return x @ self.w + self.b + self.mask.sum()\n"
        "def model():\n"
        "    layers = [nn.Linear(6, 256), *(Block() for _ in range(20)), nn.Linear(256, 4)]\n"
        "    for l in layers[1:-1]: nn.init.normal_(l.w, std=0.1)\n"
        "    return layers\n"
    )
    layer_bytes = 256 * 256 * 4
    with Peak() as peak:
        workload = user(body)
        assert peak.most < layer_bytes / 2, "loading a workload takes no memory for its layers"
        built = workload.build(3, 5)
        assert 2 * layer_bytes <= peak.most < 4.5 * layer_bytes
        built += workload.build(5, 6)
        assert peak.now < 3.5 * layer_bytes
    assert built[0].w.std().item() == pytest.approx(0.1, rel=0.05)
    assert isinstance(built[0].w, nn.Parameter)
    assert built[0].mask.sum() == 136
    assert built[0](torch.zeros(2, 256)).shape == (2, 256)
    assert not torch.equal(built[0].w, built[1].w)


def test_shared_inside_a_layer(user: Make) -> None:
    workload = user(
        "class Tied(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__(); self.a = nn.Linear(6, 6); self.b = nn.Linear(6, 6, bias=False)\n"
        "        self.b.weight = self.a.weight\n"
        "    def forward(self, x): return self.b(self.a(x))\n"
        "def model(): return [Tied(), nn.Linear(6, 4)]\n"
    )
    tied = workload.build(0, 1)[0]
    assert tied.a.weight is tied.b.weight
    assert len(list(tied.parameters())) == 2


def test_tensor_without_values(user: Make) -> None:
    with pytest.raises(WorkloadError, match="meta device, without values"):
        user("W = torch.empty(6, 4, device='meta')\ndef model():\n  l = nn.Linear(6, 4)\n"
             "  l.register_buffer('w', W)\n  return [l]\n")  # fmt: skip


def test_batch_norm_counts_from_zero(user: Make) -> None:
    workload = user("def model(): return [nn.Linear(6, 4), nn.BatchNorm1d(4)]\n")
    norm = workload.build(1, 2)[0]
    assert norm.num_batches_tracked == 0
    norm(torch.randn(3, 4))
    assert workload.build(1, 2)[0].num_batches_tracked == 0
    assert norm.num_batches_tracked == 1


def test_code_that_asks_where_tensors_are_made_finds_the_meta_device() -> None:
    """As transformers does in ``from_pretrained``, which leaves values for later there."""
    with deferred_initialization(0):
        assert torch.tensor([]).device.type == "cpu"
        with torch.device("meta"):
            assert torch.tensor([]).device.type == "meta"
            assert torch.ones(2).device.type == "cpu"
