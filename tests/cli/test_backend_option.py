"""``launch --backend``: what Gloo can't do is refused before anything is started."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.run.test_rank_spec import make_plan

from skyctl.control.backend_choice import check_backend, check_backend_of_plan, with_asked_backend
from skyctl.errors import InputError
from skyctl.records.plan import Plan

Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--encrypt",), "--backend gloo does not go with --encrypt"),
        (("--pin-first", "a"), "--backend gloo does not go with --pin-first and --pin-last"),
        (("--pin-last", "a"), "--backend gloo does not go with --pin-first and --pin-last"),
    ],
)
def test_what_gloo_can_t_do_is_refused_by_name(skyctl: Run, words: tuple[str, ...], said: str) -> None:
    code, _, err = skyctl("launch", "gpt:layers=2,hidden=8,heads=2,context=8", "--backend", "gloo", *words)
    assert code == 2
    assert said in " ".join(err.split())
    assert "--backend skyctl" in err


def test_a_backend_that_is_none_is_named(skyctl: Run) -> None:
    code, _, err = skyctl("launch", "gpt:layers=2,hidden=8,heads=2,context=8", "--backend", "glo")
    assert code == 2
    assert "'glo' is not one of auto, gloo, nccl, skyctl" in err


def test_ours_carries_anything() -> None:
    check_backend("skyctl", encrypt=True, pins=True)
    check_backend_of_plan(make_plan("a/cuda:0", "b/cpu:0"), encrypt=True)
    check_backend_of_plan(with_asked_backend(make_plan("a/cpu:0", "b/cpu:0"), "gloo"), encrypt=False)


@pytest.mark.parametrize(
    ("change", "said"), [({"encrypted": True}, "does not go with --encrypt"), ({}, "the plan uses a/cuda:0")]
)
def test_a_plan_that_gloo_can_t_carry_is_refused(change: dict[str, Any], said: str) -> None:
    made = make_plan("a/cuda:0", "b/cpu:0")
    plan = Plan.model_validate({**json.loads(made.to_json()), "version": 11, **change})
    with pytest.raises(InputError, match=said):
        check_backend_of_plan(with_asked_backend(plan, "gloo"), encrypt=False)
