"""The experts that answer: deadlines, masks and their record; a mixture that is trained while calls fail."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the field's name

import skyctl
from skyctl.errors import InputError
from skyctl.experts.answers import AnswerDeadline, MaskRecord


def test_the_deadline_is_the_median_and_ten_deviations() -> None:
    deadline = AnswerDeadline()
    for answer_s in (1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2):
        deadline.note(answer_s)
    assert deadline.limit_s is None
    deadline.note(1.6)
    assert deadline.limit_s == pytest.approx(1.6 + 10 * 0.3)


def test_equal_times_leave_twice_as_long() -> None:
    deadline = AnswerDeadline()
    for _ in range(8):
        deadline.note(0.5)
    assert deadline.limit_s == pytest.approx(1.0)


def test_a_record_survives_json_and_refuses_another_mask_for_a_step() -> None:
    record = MaskRecord(3)
    record.note(0, [True] * 3)
    record.note(7, [True, False, True])
    read = MaskRecord.from_dict(json.loads(json.dumps(record.to_dict())))
    assert [read.mask(step) for step in (0, 7)] == [(True,) * 3, (True, False, True)]
    read.note(7, [True, False, True])
    with pytest.raises(InputError, match=r"step 7 was made without experts \[1\], and now without \[\]"):
        read.note(7, [True] * 3)
    with pytest.raises(InputError, match="no mask is recorded of step 1"):
        read.mask(1)
    with pytest.raises(InputError, match="a mask of 2 experts, the record 3"):
        read.note(8, [True, False])


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"experts": 0, "missing": {}},
        {"experts": True, "missing": {}},
        {"experts": 2, "missing": []},
        {"experts": 2, "missing": {"x": []}},
        {"experts": 2, "missing": {"1": [2]}},
        {"experts": 2, "missing": {"1": 0}},
        {"experts": 2, "missing": {"1": [True]}},
    ],
)
def test_records_that_are_none(values: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="record of masks"):
        MaskRecord.from_dict(values)


WIDTH, KINDS, CLASSES, EXPERTS, STEPS = 12, 6, 4, 64, 300


def samples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points of six kinds, each with a rule of its own for its class, which no other kind shares."""
    fixed = torch.Generator().manual_seed(99)
    centers = 3 * torch.randn(KINDS, WIDTH, generator=fixed)
    rules = torch.randn(KINDS, WIDTH, CLASSES, generator=fixed)
    draw = torch.Generator().manual_seed(seed)
    kinds = torch.randint(0, KINDS, (count,), generator=draw)
    noise = torch.randn(count, WIDTH, generator=draw)
    return centers[kinds] + noise, (noise.unsqueeze(1) @ rules[kinds]).squeeze(1).argmax(-1)


def train(seed: int, mask: Callable[[int], Sequence[bool]], **options: Any) -> tuple[list[float], float]:
    """(the losses, the accuracy with all experts alive)."""
    torch.manual_seed(seed)
    sizes = {"experts": EXPERTS, "top_k": 4, **options}
    mixture = skyctl.Experts(lambda: nn.Linear(WIDTH, WIDTH), **sizes, features=WIDTH)
    head = nn.Linear(WIDTH, CLASSES)
    optimizer = torch.optim.Adam([*mixture.parameters(), *head.parameters()], lr=0.02)
    losses = []
    for step in range(STEPS):
        points, classes = samples(128, 1000 * seed + step)
        mixture.alive = mask(step)
        loss = F.cross_entropy(head(mixture(points)), classes) + 0.01 * mixture.balance_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    mixture.alive = [True] * sizes["experts"]
    points, classes = samples(4000, 7)
    with torch.no_grad():
        return losses, float((head(mixture(points)).argmax(-1) == classes).float().mean())


@pytest.fixture
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_one_thread")
def test_a_tenth_of_the_experts_away_costs_two_points_in_the_mean_and_can_be_made_again() -> None:
    undisturbed, disturbed = [], []
    for seed in range(3):
        draw, record = random.Random(seed), MaskRecord(EXPERTS)

        def drawn(step: int, draw: random.Random = draw, record: MaskRecord = record) -> Sequence[bool]:
            record.note(step, [draw.random() >= 0.1 for _ in range(EXPERTS)])
            return record.mask(step)

        undisturbed.append(train(seed, lambda _step: [True] * EXPERTS)[1])
        losses, accuracy = train(seed, drawn)
        disturbed.append(accuracy)
        if not seed:
            assert train(seed, MaskRecord.from_dict(record.to_dict()).mask) == (losses, accuracy)
    alone = train(0, lambda _step: [True], experts=1, top_k=1)[1]
    assert min(undisturbed) > alone + 0.1, "one expert would do"
    assert sum(disturbed) >= sum(undisturbed) - 3 * 0.02
