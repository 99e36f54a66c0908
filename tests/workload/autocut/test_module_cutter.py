"""Ordinary modules, as people write them, cut into layers that compute the same."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from skyctl.errors import WorkloadError
from skyctl.workload.autocut.module_cutter import bind_inputs
from skyctl.workload.costs import count_layer_costs
from skyctl.workload.workload import Workload

Make = Callable[..., Workload]

RESIDUAL = """
from torch.nn import functional as F
class Block(nn.Module):
    def __init__(self, width, stride=1):
        super().__init__()
        self.one = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.two = nn.Conv2d(width, width, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
    def forward(self, x):
        out = self.relu(self.norm(self.one(x)))
        out = self.two(out)
        out += x
        return self.relu(out)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.body = nn.Sequential(*(Block(8) for _ in range(3)))
        self.fc = nn.Linear(8, 4)
    def forward(self, x):
        B = x.shape[0]
        x = F.relu(self.stem(x.view(B, 1, 2, 3)))
        x = self.body(x)
        return self.fc(x.mean((2, 3)))
def model(): return Net()
"""

TRANSFORMER = """
from torch.nn import functional as F
class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
    def forward(self, x, mask):
        B, T, C = x.size()
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1)).masked_fill(mask == 0, float("-inf")).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(B, T, C))
class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    def forward(self, x, mask):
        x = x + self.attn(self.ln_1(x), mask)
        return x + self.mlp(self.ln_2(x))
class GPT(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(20, width), wpe=nn.Embedding(6, width),
            h=nn.ModuleList([Block(width, 2) for _ in range(3)]), ln_f=nn.LayerNorm(width)))
        self.lm_head = nn.Linear(width, 20, bias=False)
    def forward(self, idx):
        B, T = idx.shape
        assert T <= 6, "too long"
        pos = torch.arange(T, device=idx.device)
        mask = torch.tril(torch.ones(T, T, device=idx.device))
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)
        for block in self.transformer.h:
            x = block(x, mask)
        return self.lm_head(self.transformer.ln_f(x)).transpose(1, 2)
def model(): return GPT()
"""
TOKENS = """
def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(0, 20, (batch_size, 7), generator=g)
        yield ids[:, :-1], ids[:, 1:]
"""

UNET = """
from torch.nn import functional as F
class Double(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(a, b, 3, padding=1), nn.GroupNorm(1, b), nn.SiLU())
    def forward(self, x): return self.body(x)
class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inc, self.down1, self.down2 = Double(1, 8), Double(8, 16), Double(16, 16)
        self.up1, self.up2 = Double(32, 8), Double(16, 8)
        self.out = nn.Conv1d(8, 1, 1)
    def forward(self, x):
        a = self.inc(x[:, None])
        b = self.down1(F.max_pool1d(a, 2))
        c = self.down2(b)
        d = self.up1(torch.cat([c, b], dim=1))
        e = self.up2(torch.cat([F.interpolate(d, scale_factor=2), a], 1))
        return self.out(e).flatten(1)[:, :4]
def model(): return UNet()
"""

FUNCTIONS = """
from torch.nn import functional as F
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * 2
    @staticmethod
    def backward(ctx, grad): return grad * 3
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(6))
        self.unused = nn.Linear(2, 2)
        self.register_buffer("shift", torch.arange(6.0))
        self.register_buffer("seen", torch.zeros(()))
    def forward(self, x):
        B, C = x.shape
        self.seen += 1
        x = Double.apply(F.relu(self.a(x))) * self.scale + self.shift
        with torch.no_grad():
            centre = x.mean(0, keepdim=True) * (B / (B + 0.0))
        x = F.dropout(self.b(x - centre), 0.0, self.training)
        h = x.new_zeros(B, C)
        h[:, :3] = x[:, :3]
        y, z = (h + x).chunk(2, dim=1)
        return self.c(torch.cat((z, y), 1).reshape(B, -1) / B)[:, :4]
def model(): return Net()
"""

NETS = {
    "residual": (RESIDUAL, None, ["stem", "body.0", "body.1", "body.2", "fc"]),
    "transformer": (
        TRANSFORMER,
        TOKENS,
        ["transformer.wte", "transformer.h.0", "transformer.h.1", "transformer.h.2", "lm_head"],
    ),
    "unet": (UNET, None, ["inc", "down1", "down2", "up1", "up2", "out"]),
    "functions": (FUNCTIONS, None, ["a", "mul", "b", "c"]),
}


def original(workload: Workload) -> nn.Module:
    """The user's own module with the weights that the layers start with."""
    assert workload.model.path is not None
    spec = importlib.util.spec_from_file_location("user_train", workload.model.path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model: nn.Module = module.model()
    values = {}
    for index, layer in enumerate(workload.build(0, workload.layers)):
        names = workload.weight_names(index)
        values |= {names[own]: tensor for own, tensor in layer.state_dict().items()}
    model.load_state_dict(values, strict=True)
    return model


def run(layers: list[nn.Module], value: Any) -> Any:
    for layer in layers:
        value = layer(value)
    return value


@pytest.mark.parametrize("name", NETS)
def test_layers_compute_what_the_module_does(user: Make, name: str) -> None:
    body, data, names = NETS[name]
    workload = user(body, **({} if data is None else {"data": data}))
    assert workload.names == names
    layers, whole = workload.build(0, workload.layers), original(workload)
    for samples in (8, 3):
        inputs, targets = next(workload.batches(0, 0, samples))
        ours, theirs = run(layers, inputs), whole(inputs)
        assert torch.equal(ours, theirs)
        workload.loss(ours, targets).backward()
        workload.loss(theirs, targets).backward()
    mine = {}
    for index, layer in enumerate(layers):
        mine |= {workload.weight_names(index)[n]: p.grad for n, p in layer.named_parameters()}
    for own, parameter in whole.named_parameters():
        assert (mine[own] is None) == (parameter.grad is None), own
        if parameter.grad is not None:
            assert torch.allclose(mine[own], parameter.grad, atol=1e-6), own
    for module in (*layers, whole):
        module.eval()
    inputs, _ = next(workload.batches())
    assert torch.equal(run(layers, inputs), whole(inputs))


def test_a_forward_that_returns_none_beside_its_outputs(user: Make) -> None:
    """As nanoGPT's does where it is given no targets."""
    text = TRANSFORMER.replace(".transpose(1, 2)\ndef model", ".transpose(1, 2), None\ndef model")
    assert text != TRANSFORMER
    text += "def loss(outputs, targets): return F.cross_entropy(outputs[0], targets)\n"
    workload = user(text, data=TOKENS)
    value: Any = next(workload.batches(0))[0]
    for layer in workload.build(0, workload.layers):
        value = layer(value)
    logits, nothing = value
    assert nothing is None
    assert logits.requires_grad


def test_what_a_cut_carries_is_counted(user: Make) -> None:
    workload = user(UNET)
    costs = {cost.name: cost.output_bytes for cost in count_layer_costs(workload, 2)}
    assert costs["inc"] == 2 * 8 * 6 * 4
    assert costs["down1"] == 2 * (8 * 6 + 16 * 3) * 4, "its own output, and the skip of inc"
    assert costs["up2"] == 2 * 8 * 6 * 4


def test_masks_are_made_where_they_are_needed(user: Make) -> None:
    workload = user(TRANSFORMER, data=TOKENS)
    for index in range(1, 5):
        assert [t.shape for t in workload.boundary(index, 3)] == [(3, 6, 16)]


NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
    def forward(self, x):
        {body}
def model(): return Net()
"""


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "x = self.a(x)\n        return self.c(self.b(x) if x.sum() > 0 else x)",
            ["line 16", "depends on the values"],
        ),
        ("return self.c(self.b(x) if self.training else self.a(x))", ["line 15", "in eval()"]),
        ("self.kept = self.a(x)\n        return self.c(self.b(self.kept))", ["line 15", "self.kept"]),
        ("return self.a(self.b(self.a(x)))[:, :4]", ["line 15", "a.weight", "a parameter of its own"]),
        ("return self.c(self.missing(x))", ["line 15", "missing"]),
        ("return self.c(self.b(self.a(x).view(8, -1)))", ["line 15"]),
        ("return self.c(self.a(x)[x[:, 0] > 0])", ["line 15", "how large a tensor is depends on the values"]),
        (
            "x = self.a(x)\n        return self.c(self.b(x) ** (x.shape[0] ** 2))",
            ["line 16", "in proportion"],
        ),
    ],
)
def test_what_cannot_be_cut_names_its_line(user: Make, body: str, words: list[str]) -> None:
    with pytest.raises(WorkloadError) as caught:
        user(NET.format(body=body))
    text = f"{caught.value.message} {caught.value.hint}"
    assert all(word in text for word in words), text


def test_layers_share_a_parameter_of_two_names(user: Make) -> None:
    body = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)])
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.table.weight
    def forward(self, x):
        x = self.table(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)
def model(): return Net()
"""
    workload = user(body, data=TOKENS)
    last = workload.layers - 1
    assert last >= 2
    assert [shared.uses for shared in workload.shared_parameters] == [
        ((0, "table.weight"), (last, "head.weight"))
    ]
    layers = workload.build(0, workload.layers)
    assert layers[0].table.weight is layers[last].head.weight  # type: ignore[union-attr]
    names = [name for index in range(workload.layers) for name in workload.weight_names(index).values()]
    assert len(names) == len(set(names))


def test_a_module_that_can_not_be_followed_is_one_layer(user: Make) -> None:
    body = """
class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)])
    def forward(self, x):
        self.kept = self.parts[0](x)
        return self.parts[1](self.kept)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.odd, self.last = nn.Linear(6, 6), Odd(), nn.Linear(6, 4)
    def forward(self, x):
        return self.last(self.odd(self.first(x)))
def model(): return Net()
"""
    assert user(body).names == ["first", "odd", "last"]


def test_inputs_go_where_the_forward_has_parameters_for_them() -> None:
    a, b = torch.zeros(1), torch.ones(1)

    def forward(x: Any) -> None: ...

    def two(x: Any, y: Any = None) -> None: ...

    def keywords(**given: Any) -> None: ...

    assert bind_inputs(forward, (a, b)) == (((a, b),), {})
    assert bind_inputs(two, (a, b)) == ((a, b), {})
    assert bind_inputs(two, {"x": a, "y": b}) == ((), {"x": a, "y": b})
    assert bind_inputs(forward, {"image": a}) == (({"image": a},), {})
    assert bind_inputs(keywords, {"image": a}) == ((), {"image": a})
    assert bind_inputs(forward, a) == ((a,), {})


def test_no_trace_is_left(user: Make, tmp_path: Path) -> None:
    call, apply = nn.Module.__call__, torch.autograd.Function.__dict__["apply"]
    with pytest.raises(WorkloadError):
        user(NET.format(body="raise ValueError('no')"))
    assert nn.Module.__call__ is call
    assert torch.autograd.Function.__dict__["apply"] is apply
    assert torch.backends.mha.get_fastpath_enabled()
