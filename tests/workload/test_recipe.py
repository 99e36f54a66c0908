"""The learning rate's course, and recipes that can't be."""

from __future__ import annotations

import json

import pytest

from skyctl.errors import InputError
from skyctl.workload.recipe import Recipe


def test_the_courses() -> None:
    steps = range(10)
    linear = Recipe(lr_schedule="linear", warmup_steps=2, total_steps=10)
    assert [round(linear.learning_rate_factor(s), 4) for s in steps] == [
        0.3333, 0.6667, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125
    ]  # fmt: skip
    cosine = Recipe(lr_schedule="cosine", total_steps=10)
    assert cosine.learning_rate_factor(0) == 1.0
    assert cosine.learning_rate_factor(5) == pytest.approx(0.5)
    assert cosine.learning_rate_factor(5, floor=0.2) == pytest.approx(0.6)
    assert 0 < cosine.learning_rate_factor(9) < 0.03
    assert Recipe(warmup_steps=3, total_steps=3).learning_rate_factor(2) == 0.75
    assert not Recipe().changes_learning_rate


def test_when_it_validates() -> None:
    recipe = Recipe(validate_every=4, total_steps=10)
    assert [s for s in range(10) if recipe.validates(s, last=s == 9)] == [3, 7, 9]
    assert not Recipe().validates(0, last=True)


def test_it_travels_as_json() -> None:
    recipe = Recipe(clip_norm=1.0, lr_schedule="cosine", validate_every=3, total_steps=9)
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clip_norm": 0.0}, "--clip-norm must be a positive number, not 0.0"),
        ({"clip_norm": float("nan")}, "not nan"),
        ({"lr_schedule": "step"}, "'step' is not one of constant, linear, cosine"),
        ({"warmup_steps": 9, "total_steps": 8}, "--warmup-steps 9 does not fit into the run's 8 steps"),
        ({"min_learning_rate": 0.1}, "--lr-schedule constant does not fall"),
        ({"min_learning_rate": -0.1, "lr_schedule": "linear"}, "must not be negative"),
        ({"validate_every": 0}, "--validate-every"),
        ({"validate_batches": 0}, "--validate-batches"),
        ({"total_steps": 0}, "at least 1 step"),
    ],
)
def test_what_cannot_be(options: dict[str, float], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Recipe(**options)  # type: ignore[arg-type]
