"""The user's optimizer with groups by name, and the user's learning-rate scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from skyctl.errors import WorkloadError
from skyctl.workload.costs import count_layer_costs
from skyctl.workload.mixed_precision import master_of
from skyctl.workload.optimizers import make_users_lr_scheduler
from skyctl.workload.recipe import Recipe
from skyctl.workload.workload import Workload

Make = Callable[..., Workload]
MODEL = "def model(): return [nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 4, bias=False)]\n"
GROUPS = MODEL + (
    "def optimizer(parameters, named):\n"
    "    assert [id(p) for p in parameters] == [id(p) for _, p in named]\n"
    "    plain = {name for name, _ in named if name.endswith('bias') or name.startswith('1.')}\n"
    "    return torch.optim.AdamW([\n"
    "        {'params': (p for name, p in named if name not in plain), 'weight_decay': 0.5},\n"
    "        {'params': (p for name, p in named if name in plain), 'weight_decay': 0.0},\n"
    "    ], lr=0.1)\n"
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_groups_by_name_on_any_stage(user: Make, dtype: str) -> None:
    workload = user(GROUPS, dtype=dtype)
    for start, stop in ((0, 3), (0, 1), (1, 2), (2, 3)):
        layers = workload.build(start, stop)
        optimizer = workload.optimizer(p for layer in layers for p in layer.parameters())
        held = [{id(p) for p in group["params"]} for group in optimizer.param_groups]
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
        for index, layer in enumerate(layers, start):
            for name, parameter in layer.named_parameters():
                expected = 1 if name == "bias" or index == 1 else 0
                assert id(master_of(parameter)) in held[expected], (index, name)
                master_of(parameter).grad = torch.ones_like(master_of(parameter))
        before = [layer.state_dict() for layer in layers]
        optimizer.step()
        assert len(before) == stop - start, "a group may be empty of this stage's parameters"


def test_costs_are_counted_with_names(user: Make) -> None:
    """Without decay there is nothing to tell them apart; what has momentum has it by name."""
    workload = user(
        "def model(): return [nn.Linear(6, 5), nn.Linear(5, 4)]\n"
        "def optimizer(parameters, named):\n"
        "    assert all(name.split('.')[0] in '01' and name[2:] in ('weight', 'bias') for name, _ in named)\n"
        "    heavy = [p for name, p in named if name == '0.weight']\n"
        "    rest = [p for name, p in named if name != '0.weight']\n"
        "    return torch.optim.SGD([{'params': heavy, 'momentum': 0.9}, {'params': rest}], lr=0.1)\n"
    )
    first, second = count_layer_costs(workload, 2)
    assert first.state_bytes == 4 * (3 * 30 + 2 * 5)
    assert second.state_bytes == 4 * (2 * 20 + 2 * 4)


def test_a_list_that_is_empty_on_a_stage_is_said(user: Make) -> None:
    workload = user(
        MODEL + "def optimizer(parameters, named):\n"
        "    return torch.optim.SGD([p for name, p in named if name.startswith('0.')], lr=0.1)\n"
    )
    workload.optimizer(workload.build(0, 1)[0].parameters())
    with pytest.raises(WorkloadError, match=r"train.py, line \d+: optimizer\(\) failed: .*empty") as refused:
        workload.optimizer(workload.build(2, 3)[0].parameters())
    assert "may be empty there" in str(refused.value.hint)


def scheduler(workload: Workload, steps: int = 10, recipe: Recipe | None = None) -> Any:
    optimizer = workload.optimizer(workload.build(0, 1)[0].parameters())
    scheduler = make_users_lr_scheduler(workload.model, optimizer, recipe or Recipe(), steps)
    assert scheduler is None or scheduler.optimizer is optimizer
    return scheduler


def test_a_scheduler_is_told_the_runs_steps(user: Make) -> None:
    body = (
        "def lr_scheduler(optimizer, steps): return torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, steps)"
    )
    assert scheduler(user(MODEL + body), 7).total_iters == 7
    body = "def lr_scheduler(optimizer): return torch.optim.lr_scheduler.StepLR(optimizer, 3)"
    workload = user(MODEL + body)
    workload.check_recipe(Recipe())
    assert scheduler(workload).step_size == 3
    assert scheduler(user(MODEL)) is None
    assert scheduler(user("from torch.optim import lr_scheduler\n" + MODEL)) is None


@pytest.mark.parametrize(
    ("body", "recipe", "words"),
    [
        (
            "return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)",
            {},
            r"ReduceLROnPlateau's step\(\) needs metrics: it follows what was measured",
        ),
        ("return 3", {}, r"must give a scheduler of torch.optim, not int"),
        ("return 1 / 0", {}, r"train.py, line \d+: lr_scheduler\(\) failed: ZeroDivisionError"),
        (
            "return torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), 3)",
            {},
            "of another optimizer",
        ),
        (
            "return torch.optim.lr_scheduler.StepLR(optimizer, 3)",
            {"lr_schedule": "cosine", "warmup_steps": 2},
            "--lr-schedule cosine and --warmup-steps 2 would move the same rates",
        ),
    ],
)
def test_a_scheduler_that_cannot_be(user: Make, body: str, recipe: dict[str, Any], words: str) -> None:
    workload = user(f"{MODEL}def lr_scheduler(optimizer):\n    {body}")
    given = Recipe(**recipe, total_steps=10)
    with pytest.raises(WorkloadError, match=words):
        workload.check_recipe(given)
    with pytest.raises(WorkloadError, match=words):
        scheduler(workload, recipe=given)


def test_metrics_are_given_float32(user: Make) -> None:
    workload = user(
        MODEL + "def metrics(outputs, targets):\n"
        "    assert outputs.dtype is torch.float32\n"
        "    return {'accuracy': (outputs.argmax(1) == targets).float().mean()}\n",
        dtype="bfloat16",
    )
    scores = nn.functional.one_hot(torch.tensor([0, 1, 2, 3]), 4).bfloat16()
    assert workload.metrics(scores, torch.tensor([0, 1, 2, 0])) == {"accuracy": 0.75}
    assert user(MODEL).metrics(scores, torch.tensor([0])) == {}
