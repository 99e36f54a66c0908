"""One layer's state as a file: everything of it comes back, and what is not of it is refused by name."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from skyctl.checkpoint.node import safetensors
from skyctl.checkpoint.node.atomic_file import FileDigest
from skyctl.checkpoint.node.shards import ShardStamp, StageState
from skyctl.errors import RecordError, SkyctlError, WorkloadError
from skyctl.workload.mixed_precision import master_of

STAMP = ShardStamp("run", 6, 0, "0.Net", 1, "0123456789abcdef", "float32", 3)


class Net(nn.Module):
    """Parameters (one of two names), buffers of both kinds, one that grows, and more state of its own."""

    def __init__(self, memory: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.same = self.linear
        self.convolution = nn.Conv2d(1, 2, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.register_buffer("constant", torch.ones(50), persistent=False)
        self.memory = memory

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = torch.cat([self.seen, self.seen[-1:] + 1])
        x = self.norm(self.linear(x)) + self.frozen + self.seen[-1] / 10
        return self.convolution(x.view(-1, 1, 2, 3)).mean(1).view(-1, 6) * self.constant[:6]

    def get_extra_state(self) -> Any:
        return self.memory

    def set_extra_state(self, state: Any) -> None:
        self.memory = state


class Warming(torch.optim.SGD):
    """Counts in its groups, as schedule-free optimizers do, and moves its own rate."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] = 0.01 * group["count"]
        return super().step(closure)


class Nested(torch.optim.SGD):
    """Keeps lists and dicts of tensors for each parameter."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("kept", {"lists": [torch.zeros(2), (1, None, True)], 3: "text", "n": 0})
                state["kept"]["lists"][0] += 1
                state["kept"]["n"] += 1
        return super().step(closure)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adadelta": torch.optim.Adadelta,
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "warming": lambda p: Warming(p, lr=0.01),
    "nested": lambda p: Nested(p, lr=0.01, momentum=0.5),
}


def made(optimizer: str, memory: Any = None, seed: int = 0) -> tuple[Net, torch.optim.Optimizer, StageState]:
    torch.manual_seed(seed)
    net = Net(memory)
    trained = OPTIMIZERS[optimizer]([p for p in net.parameters() if p.requires_grad])
    return net, trained, StageState([net], trained, master_of)


def trained(net: Net, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
        loss = (net(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_goes_on_to_the_last_bit(optimizer: str, tmp_path: Path) -> None:
    memory = {"list": [1, 2.5, None], 4: ("a", True), "tensor": torch.arange(3)}
    net, optim, state = made(optimizer, memory)
    trained(net, optim, range(3))
    path = tmp_path / "layer-00000.safetensors"
    written = state.write(0, path, STAMP)
    assert isinstance(written, FileDigest)
    assert written.size_bytes == path.stat().st_size
    assert path.stat().st_mode & 0o777 == 0o600
    assert not state.notes
    expected = trained(net, optim, range(3, 7))
    other, again, fresh = made(optimizer, seed=1)
    fresh.read(0, path, STAMP)
    assert trained(other, again, range(3, 7)) == expected
    for name, tensor in net.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(other.state_dict()[name], tensor), name
    assert torch.equal(other.seen, net.seen)
    assert other.memory["list"] == [1, 2.5, None]
    assert other.memory[4] == ("a", True)
    assert torch.equal(other.memory["tensor"], torch.arange(3))
    for group, expected_group in zip(again.param_groups, optim.param_groups, strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {
            k: v for k, v in expected_group.items() if k != "params"
        }
    # and what was restored is kept again
    fresh.write(0, tmp_path / "again", STAMP)
    state.write(0, path, STAMP)
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


def test_only_what_has_changed_of_what_a_state_dict_leaves_out(tmp_path: Path) -> None:
    net, optim, state = made("sgd")
    trained(net, optim, range(1))
    state.write(0, tmp_path / "x", STAMP)
    names = set(safetensors.read_header(tmp_path / "x").tensors)
    assert "buffer.seen" in names
    assert "buffer.constant" not in names
    assert "optimizer.momentum_buffer.linear.weight" in names
    assert "optimizer.momentum_buffer.same.weight" not in names


def test_what_cant_be_kept_is_noted_or_refused(tmp_path: Path) -> None:
    net, optim, state = made("sgd", memory=object())
    state.write(0, tmp_path / "x", STAMP)
    state.write(0, tmp_path / "x", STAMP)
    (note,) = state.notes
    assert "layer 0 (0.Net): _extra_state is not kept: it holds a object" in note
    other, _, fresh = made("sgd", memory="its own")
    fresh.read(0, tmp_path / "x", STAMP)
    assert other.memory == "its own"

    optim.state[net.linear.weight] = {"odd": object()}
    with pytest.raises(WorkloadError, match=r"SGD has of linear\.weight can't be kept: it holds a object"):
        state.write(0, tmp_path / "x", STAMP)
    optim.state[net.linear.weight] = {"odd": torch.eye(6).to_sparse()}
    with pytest.raises(WorkloadError, match=r"optimizer\.odd\.linear\.weight \(float32, sparse_coo\) can't"):
        state.write(0, tmp_path / "x", STAMP)
    del optim.state[net.linear.weight]
    optim.state["global"] = {"count": 3}  # type: ignore[index]
    with pytest.raises(WorkloadError, match=r"SGD keeps state that is not of one parameter \('global'\)"):
        state.write(0, tmp_path / "x", STAMP)
    with pytest.raises(WorkloadError, match="LBFGS"):
        StageState([net], torch.optim.LBFGS([net.linear.weight]), master_of)


@pytest.mark.parametrize(
    ("stamp", "words"),
    [
        ({"step": 7}, "is of step '6', needed is '7'"),
        ({"layer": 1}, "is of layer '0', needed is '1'"),
        ({"layers": 2}, "is of layers '1', needed is '2'"),
        ({"seed": 4}, "is of seed '3', needed is '4'"),
        ({"dtype": "bfloat16"}, "is of dtype 'float32', needed is 'bfloat16'"),
        ({"workload": "f" * 16}, "is of workload '0123456789abcdef'"),
    ],
)
def test_a_shard_of_something_else_is_refused(stamp: dict[str, Any], words: str, tmp_path: Path) -> None:
    net, _, state = made("sgd")
    before = {name: t.clone() for name, t in net.state_dict().items() if isinstance(t, torch.Tensor)}
    state.write(0, tmp_path / "x", STAMP)
    with pytest.raises(RecordError, match=words):
        made("sgd")[2].read(0, tmp_path / "x", replace(STAMP, **stamp))
    made("sgd")[2].read(0, tmp_path / "x", replace(STAMP, run_id="another"))
    for name, tensor in before.items():
        assert torch.equal(net.state_dict()[name], tensor)


def test_a_newer_version_and_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for metadata, words in (
        ({}, "is no shard of a checkpoint: its format is None"),
        (STAMP.to_metadata() | {"version": "2"}, "is a shard of version '2', this skyctl reads 1"),
        (STAMP.to_metadata() | {"version": "²"}, "is a shard of version"),
        (STAMP.to_metadata(), "does not fit layer 0"),
        (STAMP.to_metadata() | dict.fromkeys(("extra", "optimizer", "options"), "{}"), "it lacks"),
    ):
        safetensors.save(path, {}, metadata)
        with pytest.raises(RecordError, match=words):
            made("sgd")[2].read(0, path, STAMP)


def test_another_model_is_refused(tmp_path: Path) -> None:
    _, _, state = made("sgd")
    state.write(0, tmp_path / "x", STAMP)
    smaller = nn.Linear(6, 6)
    with pytest.raises(RecordError, match="it lacks 'weight'"):
        StageState([smaller], None, master_of).read(0, tmp_path / "x", STAMP)
    wider = Net()
    wider.linear = wider.same = nn.Linear(6, 7)
    with pytest.raises(RecordError, match=r"does not fit layer 0 \(0\.Net\): .*size mismatch"):
        StageState([wider], None, master_of).read(0, tmp_path / "x", STAMP)


def test_options_that_one_group_would_need_twice_are_refused(tmp_path: Path) -> None:
    def two(groups: bool) -> tuple[list[nn.Linear], torch.optim.Optimizer, StageState]:
        torch.manual_seed(0)
        layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
        weights = [list(layer.parameters()) for layer in layers]
        given: Any = [{"params": w} for w in weights] if groups else [p for w in weights for p in w]
        optimizer = torch.optim.SGD(given, lr=0.1)
        return layers, optimizer, StageState(layers, optimizer, master_of)

    _, optimizer, state = two(groups=True)
    for number, group in enumerate(optimizer.param_groups):
        group["momentum"] = 0.1 * (number + 1)
    stamps = [replace(STAMP, layer=layer, layers=2) for layer in (0, 1)]
    for layer, stamp in enumerate(stamps):
        state.write(layer, tmp_path / str(layer), stamp)
    _, again, fresh = two(groups=True)
    for layer, stamp in enumerate(stamps):
        fresh.read(layer, tmp_path / str(layer), stamp)
    assert [group["momentum"] for group in again.param_groups] == [0.1, 0.2]
    _, _, one = two(groups=False)
    one.read(0, tmp_path / "0", stamps[0])
    with pytest.raises(RecordError, match="'momentum' of the optimizer's group is not the same"):
        one.read(1, tmp_path / "1", stamps[1])


def test_mutated_shards_end_in_our_own_errors(tmp_path: Path) -> None:
    """Past its SHA-256: an error that names the file, or values as good as any."""
    net, optim, state = made("adam", memory={"a": [1]})
    trained(net, optim, range(2))
    path, broken = tmp_path / "x", tmp_path / "broken"
    state.write(0, path, STAMP)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    chance = random.Random(5)
    told = json.loads(whole[8:header])
    told_of: list[str] = []
    kept = made("adam")
    fresh = kept[2]
    for number in range(1000):
        data = bytearray(whole)
        kind = number % 4
        if kind == 0:  # bits of the header
            for _ in range(chance.randint(1, 4)):
                data[chance.randrange(header)] ^= 1 << chance.randrange(8)
        elif kind == 1:  # its end is missing, or there is more
            data = data[: chance.randrange(len(data))] if number % 8 == 1 else data + bytes(8)
        else:  # a header that can be read, and says something odd
            odd = json.loads(json.dumps(told))
            _mutate(odd, chance)
            text = json.dumps(odd).encode()
            data = bytearray(len(text).to_bytes(8, "little") + text + whole[header:])
        broken.write_bytes(data)
        try:
            fresh.read(0, broken, STAMP)
        except SkyctlError as exc:
            told_of.append(exc.message)
    assert len(told_of) > 600
    assert all(str(broken) in message for message in told_of)


def _mutate(odd: dict[str, Any], chance: random.Random) -> None:
    values: list[Any] = [None, -1, 1e400, "", "x", [], {}, [[]], {"tensor": "x"}, {"dict": 3}, 2**70, True]
    metadata = odd["__metadata__"]
    if chance.random() < 0.5:
        key = chance.choice(["extra", "optimizer", "options"])
        told = json.loads(metadata[key])
        place: Any = told
        while isinstance(place, dict) and place and chance.random() < 0.8:
            name = chance.choice(list(place))
            if not isinstance(place[name], dict) or chance.random() < 0.3:
                place[name] = chance.choice(values)
                break
            place = place[name]
        else:
            told = chance.choice(values)
        metadata[key] = json.dumps(told)
    else:
        name = chance.choice(list(odd))
        if name == "__metadata__" or chance.random() < 0.2:
            odd[name] = chance.choice(values)
        else:
            odd[name][chance.choice(list(odd[name]))] = chance.choice(values)
