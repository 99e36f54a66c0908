"""A processor that advertises what it can't do: found out in a child process, cured or refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from skyctl.device import dtype_support
from skyctl.device.dtype_support import (
    ISA_VARIABLE,
    DtypeSupport,
    find_dtype_support,
    prepare_dtype,
    try_dtype,
)
from skyctl.errors import UnsupportedDtypeError

from ..helpers.broken_processor import fake_torch


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A processor on which bfloat16 dies by SIGILL until it is kept to AVX512_CORE_BF16."""
    return fake_torch(tmp_path, monkeypatch, cure="AVX512_CORE_BF16")


def trials(counter: Path) -> int:
    return len(counter.read_text()) if counter.exists() else 0


def test_this_processor_computes_in_it(tmp_path: Path) -> None:
    """With what the session's trial has found, so on both kinds."""
    support = find_dtype_support("bfloat16", tmp_path)
    assert support == DtypeSupport("bfloat16", works=True)


def test_what_lies_in_the_working_folder_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user may have put it there (``/tmp``), or it is the user's own, named as one of Python's."""
    for name in ("resource.py", "torch.py", "sitecustomize.py"):
        (tmp_path / name).write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    assert try_dtype("float32") == DtypeSupport("float32", works=True)


def test_the_instruction_set_that_works_is_found_and_kept(broken: Path, tmp_path: Path) -> None:
    expected = DtypeSupport("bfloat16", works=True, max_cpu_isa="AVX512_CORE_BF16", died_by="SIGILL")
    assert find_dtype_support("bfloat16", tmp_path / "cache") == expected
    tried = trials(broken)
    assert tried == 2
    assert find_dtype_support("bfloat16", tmp_path / "cache") == expected
    assert trials(broken) == tried


def test_another_torch_is_tried_anew(broken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_dtype_support("bfloat16", tmp_path / "cache")
    monkeypatch.setattr(dtype_support, "version", lambda _package: "99.0")
    tried = trials(broken)
    find_dtype_support("bfloat16", tmp_path / "cache")
    assert trials(broken) > tried
    assert len(json.loads((tmp_path / "cache" / dtype_support.FILE_NAME).read_text())) == 2


def test_what_needs_it_gets_it_and_what_does_not_is_left_alone(
    broken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment: dict[str, str] = dict(os.environ)
    monkeypatch.setattr(os, "environ", environment)
    assert prepare_dtype("float32", "cpu:0", tmp_path / "cache") is None
    assert prepare_dtype("bfloat16", "cuda:0", tmp_path / "cache") is None
    assert ISA_VARIABLE not in environment
    prepare_dtype("bfloat16", "cpu:0", tmp_path / "cache")
    assert environment[ISA_VARIABLE] == "AVX512_CORE_BF16"


def test_where_nothing_helps_the_dtype_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_torch(tmp_path, monkeypatch, cure="nothing")
    with pytest.raises(UnsupportedDtypeError, match="bfloat16: a trial died by SIGILL") as caught:
        prepare_dtype("bfloat16", "cpu:0", tmp_path / "cache")
    assert caught.value.exit_code == 4
    assert "float32" in str(caught.value.hint)


@pytest.mark.parametrize("text", ["", "[]", '{"key": [{"no": "field"}]}', "not JSON"])
def test_a_file_that_is_not_ours_is_tried_over(text: str, broken: Path, tmp_path: Path) -> None:
    (tmp_path / dtype_support.FILE_NAME).write_text(text)
    assert find_dtype_support("bfloat16", tmp_path).max_cpu_isa == "AVX512_CORE_BF16"


def test_a_folder_that_cannot_be_written_is_no_error(broken: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert find_dtype_support("bfloat16", tmp_path / "file" / "cache").works


def test_what_takes_too_long_is_taken_to_work_and_not_kept(
    broken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtype_support, "TRIAL_TIMEOUT_S", 0.01)
    assert find_dtype_support("bfloat16", tmp_path / "cache") == DtypeSupport("bfloat16", works=True)
    assert not (tmp_path / "cache" / dtype_support.FILE_NAME).exists()


def test_processes_of_one_node_share_a_trial(broken: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from skyctl.device.dtype_support import find_dtype_support\n"
        "print(find_dtype_support('bfloat16', Path(sys.argv[1])).max_cpu_isa)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "cache")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert {process.communicate(timeout=120)[0].strip() for process in running} == {"AVX512_CORE_BF16"}
    assert trials(broken) == 2
