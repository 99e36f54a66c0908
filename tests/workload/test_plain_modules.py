"""The module that model() gives runs as Python: compiled and scripted ones are taken as they are written."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from skyctl.errors import WorkloadError
from skyctl.workload.costs import count_layer_costs
from skyctl.workload.workload import Workload

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

NET = """
@torch.jit.script
def squash(x, bias):
    return torch.tanh(x + bias)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.bias = nn.Linear(6, 6), nn.Parameter(torch.zeros(6))
    def forward(self, x): return squash(self.linear(x), self.bias)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(6, 4)
        self.blocks[0] = CHANGED(self.blocks[0])
    def forward(self, x):
        for block in self.blocks: x = block(x)
        return self.head(x)
"""


@pytest.mark.parametrize("given", ["Net()", "[CHANGED(Block()), Block(), nn.Linear(6, 4)]"])
@pytest.mark.parametrize("changed", ["torch.jit.script", "torch.compile"])
def test_modules_train_as_they_are_written(user: Callable[..., Workload], given: str, changed: str) -> None:
    body = f"{NET}\ndef model(): return {given}\n".replace("CHANGED", changed)
    workload = user(body)
    assert all(cost.flops > 0 for cost in count_layer_costs(workload, 2))
    inputs, targets = next(workload.batches(0, 0, 8))
    layers = workload.build(0, workload.layers)
    workload.loss(nn.Sequential(*layers)(inputs), targets).backward()
    assert all(p.grad is not None for layer in layers for p in layer.parameters())
    assert bool(workload.notes) == (changed == "torch.compile")
    assert torch.compile.__module__ == "torch"
    assert isinstance(torch.jit.script(nn.Linear(1, 1)), torch.jit.ScriptModule)


def test_weights_of_a_compiled_module_have_the_names_that_torch_gives_them(
    user: Callable[..., Workload],
) -> None:
    workload = user(f"{NET}\ndef model(): return torch.compile(Net())\n".replace("CHANGED", "torch.compile"))
    names = {name for index in range(workload.layers) for name in workload.weight_names(index).values()}
    assert {"_orig_mod.blocks.0._orig_mod.bias", "_orig_mod.head.weight"} <= names


def test_torchscript_without_its_code_is_refused_by_its_name(
    user: Callable[..., Workload], tmp_path: Path
) -> None:
    torch.jit.save(torch.jit.script(nn.Linear(6, 6)), tmp_path / "old.pt")
    load = f"torch.jit.load({str(tmp_path / 'old.pt')!r})"
    for given, place in (
        (f"nn.Sequential(nn.Tanh(), {load})", " (1)"),
        (f"[nn.Tanh(), {load}]", " (1)"),
        (load, ""),
    ):
        with pytest.raises(WorkloadError, match="which can't be cut") as caught:
            user(f"def model(): return {given}\n")
        assert f"model() gives TorchScript{place}, which" in str(caught.value)
        assert "plain module" in str(caught.value.hint)


def test_a_transformers_model_gives_no_cache(user: Callable[..., Workload]) -> None:
    pytest.importorskip("transformers")
    data = (
        "from transformers import GPT2Config, GPT2Model\n"
        "def data(batch_size, seed):\n"
        "    while True: yield torch.zeros(batch_size, 5, dtype=torch.int64), torch.zeros(batch_size)\n"
    )
    body = (
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        sizes = dict(vocab_size=8, n_positions=8, n_embd=8, n_layer=2, n_head=2)\n"
        "        self.body = GPT2Model(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))\n"
        "        self.config = {'use_cache': True}\n"
        "    def forward(self, ids): return self.body(ids)\n"
        "def loss(outputs, targets): return outputs['last_hidden_state'].mean()\n"
        "def model(): return Net()\n"
    )
    workload = user(body, data=data)
    assert workload.layers > 1
    assert [note for note in workload.notes if "use_cache" in note]
