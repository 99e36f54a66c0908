"""Dicts and nested tuples as inputs, between layers, as targets: trained as in plain torch, wherever cut."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from skyctl.errors import RunError
from skyctl.worker.batches.sample_batches import Prefetcher, split_inputs, split_targets
from skyctl.worker.pipeline.stage import PipelineStage
from skyctl.workload.recipe import microbatch_sizes
from skyctl.workload.shape_inference import TensorSpec
from skyctl.workload.structures import flatten_value
from skyctl.workload.workload import load_workload
from skyctl.workload.workload_spec import WorkloadSpec

TRAIN = """
import torch
from torch import nn

class Encode(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.mask = nn.Linear(6, 8), nn.Linear(3, 8)

    def forward(self, batch):
        mask, weights = batch.pop("mask")
        h = self.image(batch.pop("image")) + self.mask(mask)
        return {"skip": (h, {"weights": weights}), "h": h.relu()}

class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, given):
        h = self.linear(given.pop("h")) + given["skip"][0]
        return {"h": torch.dropout(h, 0.0, self.training), **given}

class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.classes, self.depth = nn.Linear(8, 4), nn.Linear(8, 1)

    def forward(self, given):
        skip, more = given["skip"]
        return {"classes": self.classes(given["h"]) * more["weights"][:, None], "depth": [self.depth(skip)]}

def model():
    return [Encode(), Mix(), Mix(), Heads()]

def batch(batch_size, generator):
    image = torch.randn(batch_size, 6, generator=generator)
    weights = torch.rand(batch_size, generator=generator)
    inputs = {"image": image, "mask": (image[:, :3] > 0).float(), "weights": weights}
    inputs["mask"] = (inputs["mask"], inputs.pop("weights"))
    return inputs, {"classes": image[:, :4].argmax(1), "depth": (image[:, :1],)}

def data(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    for step in range(1000):
        inputs, targets = batch(batch_size, generator)
        yield (inputs if step % 2 else dict(reversed(inputs.items()))), targets

def validation(batch_size, seed):
    generator = torch.Generator().manual_seed(seed + 1)
    for _ in range(2):
        yield batch(batch_size, generator)

def loss(outputs, targets):
    classes = nn.functional.cross_entropy(outputs["classes"], targets.pop("classes"))
    return classes + nn.functional.mse_loss(outputs["depth"][0], targets["depth"][0])

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
"""
STEPS, BATCH, MICROBATCHES = 6, 7, 4
PLANS: list[tuple[list[int], str, dict[str, Any]]] = [
    ([0, 4], "1f1b", {"recompute": True}),
    ([0, 1, 4], "gpipe", {}),
    ([0, 2, 4], "eager-1f1b", {"recompute": True}),
    ([0, 1, 3, 4], "zero-bubble", {"weights_behind": 1}),
]


def _slice(value: Any, start: int, stop: int) -> Any:
    if isinstance(value, dict):
        return {key: _slice(part, start, stop) for key, part in value.items()}
    return (
        tuple(_slice(part, start, stop) for part in value) if isinstance(value, tuple) else value[start:stop]
    )


def _plain(spec: dict[str, Any]) -> tuple[list[float], float]:
    """The losses of plain torch, a step each, and that over the held-out batches at the end."""
    torch.set_num_threads(1)
    loaded = load_workload(WorkloadSpec.from_dict(spec))
    layers = nn.Sequential(*loaded.build(0, loaded.layers))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
    names: dict[str, Any] = {}
    exec(compile(TRAIN, "train.py", "exec"), names)
    sizes = microbatch_sizes(BATCH, MICROBATCHES)

    def total(batch: tuple[Any, Any], *, train: bool) -> float:
        sum_, at = 0.0, 0
        for size in sizes:
            inputs, targets = (_slice(side, at, at + size) for side in batch)
            loss = names["loss"](layers(inputs), targets) * (size / BATCH)
            if train:
                loss.backward()
            sum_, at = sum_ + loss.item(), at + size
        return sum_

    losses = []
    for _, batch in zip(range(STEPS), names["data"](BATCH, spec["seed"]), strict=False):
        losses.append(total(batch, train=True))
        optimizer.step()
        optimizer.zero_grad()
    layers.eval()
    with torch.no_grad():
        held_out = [total(batch, train=False) for batch in names["validation"](BATCH, spec["seed"])]
    return losses, sum(held_out) / len(held_out)


def test_losses_are_those_of_plain_torch_wherever_it_is_cut(
    tmp_path: Path, pool: Any, driver: ModuleType
) -> None:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    spec = WorkloadSpec(source=str(path), path=str(path), batch_size=BATCH, seed=3)
    sent = load_workload(spec).spec.to_dict()  # as nodes are sent it
    losses, held_out = _plain(spec.to_dict())
    assert fmean(losses[STEPS // 2 :]) < fmean(losses[: STEPS // 2])  # each is another batch's
    recipe = {"total_steps": STEPS, "validate_every": STEPS, "validate_batches": 2}
    for cuts, schedule, options in PLANS:
        orders = driver.orders(sent, cuts, MICROBATCHES, schedule, STEPS, recipe=recipe, **options)
        outcome = pool.run(orders)
        assert not outcome.errors, (cuts, schedule, outcome.errors)
        assert outcome.losses == pytest.approx(losses, rel=1e-5), (cuts, schedule)
        assert outcome.validation == {STEPS - 1: pytest.approx(held_out, rel=1e-5)}, (cuts, schedule)


def test_inputs_are_split_flat_and_targets_in_their_structure() -> None:
    x, y = torch.arange(5), torch.arange(10).view(5, 2)
    parts = split_inputs({"x": x, "y": (y,)}, [3, 2], torch.device("cpu"))
    assert [[t.shape[0] for t in part] for part in parts] == [[3, 3], [2, 2]]
    first, second = split_targets({"x": x, "y": (y,)}, [3, 2], torch.device("cpu"))
    assert flatten_value(first)[1] == {"dict": {"x": None, "y": {"tuple": [None]}}}
    assert isinstance(second, dict)
    assert second["x"].tolist() == [3, 4]
    with pytest.raises(RunError, match=r"shape \[5, 2\] where a batch of 6"):
        split_inputs((torch.arange(6), y), [3, 3], torch.device("cpu"))


def test_a_buffer_in_a_dict_that_is_filled_again_is_not_prefetched() -> None:
    buffer = torch.zeros(2)
    prefetcher = Prefetcher(({"x": buffer.fill_(i)}, torch.zeros(2)) for i in range(4))
    prefetcher.get()
    prefetcher.get()
    prefetcher.prefetch()
    assert buffer.tolist() == [1, 1]


def test_an_output_of_other_keys_than_at_first_is_named() -> None:
    class Late(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return {"x": super().forward(x), "late": x} if self.training else {"x": super().forward(x)}

    x = TensorSpec((2, 3), "float32", True)
    stage = PipelineStage(
        [Late(3, 3)],
        input_specs=lambda _: (x,),
        output_specs=lambda _: (x,),
        output_structure={"dict": {"x": None}},
        loss_fn=None,
    )
    with pytest.raises(RunError, match='layer Late gives its output with the key "late", without it when'):
        stage.forward(0, (torch.ones(2, 3),))
