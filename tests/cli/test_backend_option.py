"""``launch --backend``: what Gloo can't do is refused before anything is started."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.run.test_rank_spec import CLUSTER, make_plan

from skyctl.cli.run_options import LaunchOptions
from skyctl.errors import InputError
from skyctl.planning.backend_choice import check_backend, check_backend_of_plan, with_asked_backend
from skyctl.records.backend import BackendChoice
from skyctl.records.plan import Plan

Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--encrypt",), "--backend gloo does not go with --encrypt"),
        (("--pin-first", "a"), "--backend gloo does not go with --pin-first and --pin-last"),
        (("--pin-last", "a"), "--backend gloo does not go with --pin-first and --pin-last"),
    ],
)
def test_what_gloo_can_t_do_is_refused_by_name(skyctl: Run, words: tuple[str, ...], message: str) -> None:
    code, _, err = skyctl("launch", "gpt:layers=2,hidden=8,heads=2,context=8", "--backend", "gloo", *words)
    assert code == 2
    assert message in " ".join(err.split())
    assert "--backend skyctl" in err


def test_a_backend_that_is_none_is_named(skyctl: Run) -> None:
    code, _, err = skyctl("launch", "gpt:layers=2,hidden=8,heads=2,context=8", "--backend", "glo")
    assert code == 2
    assert "'glo' is not one of auto, gloo, nccl, skyctl" in err


@pytest.mark.parametrize("command", ["probe", "plan", "launch", "compare", "bench-sync"])
def test_every_command_refuses_what_a_backend_can_t_do(
    skyctl: Run, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.yaml").write_text(
        "name: pair\nbackend: gloo\nnodes:\n"
        "- {name: a, transport: local, devices: [cpu]}\n- {name: b, transport: local, devices: [cpu]}\n"
    )
    words = () if command == "bench-sync" else ("gpt:layers=2,hidden=8,heads=2,context=8",)
    code, _, err = skyctl(command, *words, "--encrypt", "--backend", "nccl")
    assert code == 2
    assert "--backend nccl does not go with --encrypt" in " ".join(err.split())
    code, _, err = skyctl(command, *words, "--backend", "nccl")
    assert code == 2
    between = "--backend nccl carries tensors between CUDA devices"
    assert f"{between}, and the cluster file lists a/cpu:0" in " ".join(err.split())
    code, _, err = skyctl(command, *words, "--encrypt")
    assert code == 2
    assert "--backend gloo does not go with --encrypt" in " ".join(err.split())


def test_helpers_and_nccl_do_not_go_together() -> None:
    with pytest.raises(InputError, match="--backend nccl does not go with --helper"):
        check_backend("nccl", encrypt=False, helpers=True)
    check_backend("gloo", encrypt=False, helpers=True)


@pytest.mark.parametrize(
    ("option", "planned", "cluster", "expected"),
    [
        (None, None, None, None),
        (None, None, "gloo", "gloo"),
        ("skyctl", None, "gloo", "skyctl"),
        (None, "asked", "skyctl", None),
        (None, "near", "skyctl", "skyctl"),
        ("skyctl", "asked", None, "skyctl"),
        ("auto", "near", "skyctl", None),
    ],
)
def test_the_option_counts_more_than_the_plan_and_that_more_than_the_cluster_file(
    option: str | None, planned: Any, cluster: Any, expected: str | None
) -> None:
    plan = make_plan("a/cpu:0", "b/cpu:0")
    if planned is not None:
        plan = plan.model_copy(update={"backend": BackendChoice(backend="gloo", reason=planned)})
    there = CLUSTER.model_copy(update={"backend": cluster})
    assert LaunchOptions(backend=option).backend_of_run(plan, there) == expected


def test_ours_carries_anything() -> None:
    check_backend("skyctl", encrypt=True, pins=True)
    check_backend_of_plan(make_plan("a/cuda:0", "b/cpu:0"), encrypt=True)
    check_backend_of_plan(with_asked_backend(make_plan("a/cpu:0", "b/cpu:0"), "gloo"), encrypt=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"encrypted": True}, "does not go with --encrypt"), ({}, "the plan uses a/cuda:0")],
)
def test_a_plan_that_gloo_can_t_carry_is_refused(change: dict[str, Any], message: str) -> None:
    planned = make_plan("a/cuda:0", "b/cpu:0")
    plan = Plan.model_validate({**json.loads(planned.to_json()), **change})
    with pytest.raises(InputError, match=message):
        check_backend_of_plan(with_asked_backend(plan, "gloo"), encrypt=False)
