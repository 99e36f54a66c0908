"""Files of other versions: only older problems are read; all else is refused, saying how to make it anew."""

import json
from pathlib import Path

import pytest

from skyctl.compare.comparison import Comparison
from skyctl.errors import RecordError
from skyctl.files import read_record
from skyctl.lab.lab_state import LabState
from skyctl.records.base import FileRecord, parse
from skyctl.records.cluster import PreparedEnvironments
from skyctl.records.measurement import Measurement
from skyctl.records.plan import Plan
from skyctl.records.problem import Problem
from skyctl.records.profile import Profile
from skyctl.records.run_state import RunState

PROBLEM = {
    "layers": [{"name": "a", "flops": 1.0, "state_bytes": 1, "activation_bytes": 1, "output_bytes": 1}],
    "devices": [{"id": "n/cpu:0", "flops_per_s": 1.0, "memory_bytes": None}],
    "microbatches": 1,
}
NEXT = {
    Plan: "skyctl plan WORKLOAD -o ",
    Profile: "skyctl probe WORKLOAD",
    Measurement: "skyctl launch PLAN",
    RunState: "the skyctl that started it, or start anew: skyctl launch PLAN",
    PreparedEnvironments: "remove it, and make it anew: skyctl setup",
    LabState: "skyctl lab up lab.yaml",
    Comparison: "make it anew",
}


@pytest.mark.parametrize("cls", NEXT)
@pytest.mark.parametrize("off", [-1, 1, None])
def test_another_version_is_refused_with_what_to_do(
    cls: type[FileRecord], off: int | None, tmp_path: Path
) -> None:
    kind, newest = cls.model_fields["kind"].default, cls.model_fields["version"].default
    file = tmp_path / "it.json"
    file.write_text(json.dumps({"kind": kind} | ({} if off is None else {"version": newest + off})))
    with pytest.raises(RecordError) as caught:
        read_record(cls, file)
    given = "without a version" if off is None else f"version {newest + off}"
    assert caught.value.message == f"{file} is {kind} {given}; this skyctl reads version {newest} only"
    assert NEXT[cls] in (caught.value.hint or "")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("version", [*range(1, 15), None])
def test_a_problem_of_every_version_is_read_as_one_of_todays(version: int | None) -> None:
    given = {"kind": "skyctl/problem", **PROBLEM} | ({} if version is None else {"version": version})
    assert parse(Problem, json.dumps(given), "it") == Problem.model_validate(PROBLEM)
    assert json.loads(parse(Problem, json.dumps(given), "it").to_json())["version"] == 14


def test_a_newer_problem_is_refused() -> None:
    with pytest.raises(RecordError, match="version 15; this skyctl reads up to version 14") as caught:
        parse(Problem, json.dumps({"kind": "skyctl/problem", "version": 15, **PROBLEM}), "it")
    assert "upgrade skyctl" in (caught.value.hint or "")
