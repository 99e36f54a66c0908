from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

from skyctl.compare.canvas import device_names, shortened
from skyctl.compare.plots import plot_comparison, plot_losses
from skyctl.compare.rows import Outcome, rows
from skyctl.errors import SkyctlError

pytest.importorskip("matplotlib")


def _size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def test_both_pictures(three, tmp_path: Path) -> None:
    assert _size(plot_comparison(rows(three), tmp_path / "steps.png"))[0] == 2000
    assert _size(plot_losses(three, tmp_path / "losses.png")) == (2000, 720)


def test_sixteen_long_names_with_odd_signs(outcome, tmp_path: Path) -> None:
    devices = [f"Büro-$x_{i}$-工作站-{'long' * 9}/cuda:{i}" for i in range(16)]
    many = outcome(devices=devices, counts=[1] * 16, compute_s=[0.1] * 16, step_s=0.5)
    width, height = _size(plot_comparison(rows([many, many]), tmp_path / "many.png"))
    assert width == 2000
    assert height > 1500


@pytest.mark.parametrize("case", ["nothing", "one device", "only infeasible", "mixed", "zeros"])
def test_edges(case: str, outcome, tmp_path: Path) -> None:
    none = Outcome("even", None, "needs 3.1 GiB, has 2.0 GiB " * 20)
    cases = {
        "nothing": [],
        "one device": [outcome(devices=("a/cpu:0",), counts=(12,), compute_s=(2.0,), steps_s=[2.0, 2.1])],
        "only infeasible": [none],
        "mixed": [none, outcome("optimal", steps_s=[3.0, 2.0])],
        "zeros": [outcome(compute_s=(0.0, 0.0), step_s=0.0)],
    }
    _size(plot_comparison(rows(cases[case]), tmp_path / "steps.png"))
    _size(plot_losses(cases[case], tmp_path / "losses.png"))


def test_same_figures_same_bytes(three, tmp_path: Path) -> None:
    first, second = (plot_comparison(rows(three), tmp_path / name) for name in ("a.png", "b.png"))
    assert first.read_bytes() == second.read_bytes()


def test_without_matplotlib(three, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SkyctlError, match="matplotlib") as caught:
        plot_comparison(rows(three), tmp_path / "steps.png")
    assert caught.value.hint == "pip install 'skyctl[plots]'"
    assert not (tmp_path / "steps.png").exists()


def test_a_path_that_cannot_be_written(three, tmp_path: Path) -> None:
    with pytest.raises(SkyctlError, match="No such file"):
        plot_losses(three, tmp_path / "not there" / "losses.png")


def test_importing_draws_in_no_matplotlib() -> None:
    import subprocess

    code = "import sys, skyctl.compare.plots, skyctl.compare.tables; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_names_that_fit() -> None:
    long = "workstation-0.lab.example.org"
    assert device_names([long, long.replace("0", "1")]) == {
        long: "workstation-0",
        long.replace("0", "1"): "workstation-1",
    }
    twins = ["box.a.a-long-domain.example/cuda:0", "box.b.a-long-domain.example/cuda:0"]
    assert all(len(name) <= 22 for name in device_names(twins).values())
    assert device_names(["192.0.2.10", "a" * 40])["192.0.2.10"] == "192.0.2.10"
    assert shortened("abc\ndef") == "abc·def"
