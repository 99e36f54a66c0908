"""Nodes whose processors advertise more than they can do, through the command."""

from __future__ import annotations

import json
import os

import pytest

from skyctl.device.dtype_support import ISA_VARIABLE

from ..helpers.broken_processor import break_bfloat16
from .conftest import Here

GPT = "gpt:layers=1,hidden=16,heads=2,context=16"
SIZES = ("--batch-size", "8", "--microbatches", "4")


@pytest.fixture
def broken(here: Here, tmp_path, monkeypatch: pytest.MonkeyPatch):
    """Starts skyctl on such a processor: ``broken(cure)``."""

    def breaks(cure: str) -> None:
        break_bfloat16(tmp_path, monkeypatch, cure=cure)
        here.env = {name: value for name, value in here.env.items() if name != ISA_VARIABLE}
        here.env |= {name: os.environ[name] for name in ("PYTHONPATH", "XDG_CACHE_HOME")}

    return breaks


@pytest.mark.slow
def test_bfloat16_is_trained_in_with_the_instructions_that_work(here: Here, broken) -> None:
    broken("AVX512_CORE_BF16")
    done = here.run("check", "--json", "-v", code=0)
    report = json.loads(done.stdout)
    tried = {"dtype": "bfloat16", "works": True, "max_cpu_isa": "AVX512_CORE_BF16", "died_by": "SIGILL"}
    assert [node["dtypes"] for node in report["nodes"]] == [[tried], [tried]]
    assert "bfloat16 with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 (SIGILL without" in done.stderr
    options = (*SIZES, "--strategy", "even", "--dtype", "bfloat16")
    done = here.run("launch", GPT, *options, "--steps", "3", "--json", code=0)
    assert len(json.loads(done.stdout)["steps"]) == 3
    (measured,) = (here.state / "profiles").rglob("*.json")
    profile = json.loads(measured.read_text())
    assert [node["max_cpu_isa"] for node in profile["nodes"]] == ["AVX512_CORE_BF16"] * 2


@pytest.mark.slow
def test_where_nothing_helps_bfloat16_is_refused(here: Here, broken) -> None:
    broken("nothing")
    done = here.run("check", code=0)
    assert "bfloat16 can't be computed in: a trial died by SIGILL" in done.stdout
    assert "--dtype float32" in done.stdout
    done = here.run("probe", GPT, *SIZES, "--dtype", "bfloat16", code=4)
    assert "can't compute in bfloat16: a trial died by SIGILL" in done.stderr


@pytest.mark.slow
def test_a_probe_that_dies_by_a_signal_says_which(here: Here) -> None:
    here.fault.write_text("SIGILL")
    done = here.run("probe", "train.py", *SIZES, code=4)
    assert "was ended by SIGILL" in done.stderr
    assert "skyctl check" in done.stderr
