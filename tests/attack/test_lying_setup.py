"""A node that lies to check and to setup: what can not be is refused with its name."""

from __future__ import annotations

import random

import pytest

from skyctl.agent.task_events import read_as_json
from skyctl.check import diagnosis
from skyctl.check.check_answers import ANSWERS, TorchEnvironment
from skyctl.check.check_report import DtypeReport
from skyctl.errors import NodeError
from skyctl.records.cluster import PreparedEnvironment
from skyctl.setup.installer import missing_requirements
from skyctl.setup.node.setup_events import ANSWERS as SETUP_ANSWERS
from skyctl.setup.wheels import WheelTarget
from skyctl.setup.workload_requirements import is_plain_requirement

from . import lies
from .lying_ranks import (
    NODES,
    SEED,
    names_the_liar,
)


@pytest.mark.parametrize("op", sorted(lies.CHECK))
def test_what_check_is_told(op: str) -> None:
    rng, unnamed = random.Random(SEED), 0
    for lie in lies.lies(rng, [lies.CHECK[op]], 30):
        try:
            answer = read_as_json(ANSWERS[op], lie, lies.LIAR)
        except NodeError as exc:
            unnamed += not names_the_liar(exc)
            continue
        if op == "facts":
            diagnosis.python_tick(answer)
            diagnosis.limits_ticks(NODES[lies.LIAR], answer)
        elif op == "clock":
            diagnosis.clock_tick(answer["time_s"] - 1.7e9, 0.1)
    assert not unnamed


def test_what_check_is_told_of_torch() -> None:
    rng, unnamed = random.Random(SEED), 0
    for lie in lies.lies(rng, [lies.TORCH], 40):
        try:
            answer = read_as_json(TorchEnvironment, lie, lies.LIAR)
        except NodeError as exc:
            unnamed += not names_the_liar(exc)
            continue
        found = [DtypeReport(**one) for one in answer["dtypes"]]
        diagnosis.torch_ticks(NODES[lies.LIAR], answer)
        diagnosis.dtype_ticks(NODES[lies.LIAR], found)
    assert not unnamed


@pytest.mark.parametrize("op", sorted(lies.SETUP))
def test_what_setup_is_told(op: str) -> None:
    rng, unnamed = random.Random(SEED), 0
    for lie in lies.lies(rng, lies.SETUP[op], 30):
        try:
            answer = read_as_json(SETUP_ANSWERS[op], lie, lies.LIAR)
        except NodeError as exc:
            unnamed += not names_the_liar(exc)
            continue
        if op == "look":
            missing_requirements(answer, "2.6.0", ("numpy>=2 ; python_version > '3.10'",))
            WheelTarget(*(answer[key] for key in ("version", "system", "machine", "glibc"))).platform  # noqa: B018
        elif op == "make" and "python" in answer:
            PreparedEnvironment.of(NODES[lies.LIAR], answer["python"], "me")
    assert not unnamed


@pytest.mark.parametrize(
    "line",
    [
        "evil @ https://example.org/evil.tar.gz",
        "numpy\n--index-url https://example.org",
        "--index-url=https://example.org",
        "https://example.org/evil.tar.gz",
        "numpy --config-settings=x",
        "./evil",
        "",
    ],
)
def test_of_requirements_only_names_and_versions_reach_this_machines_uv(line: str) -> None:
    assert not is_plain_requirement(line)


@pytest.mark.parametrize(
    "line",
    [
        "numpy",
        "numpy>=2,<3",
        "torch==2.6.0+cpu",
        "a[b,c]~=1.0",
        "x ; python_version < '3.12'",
        "a-b_c.d (>=1)",
    ],
)
def test_honest_requirements_do(line: str) -> None:
    assert is_plain_requirement(line)
