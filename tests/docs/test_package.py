"""The sdist makes the wheel, and the wheel runs outside of the checkout, in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from tests.helpers.commands import COMMAND_S

ROOT = Path(__file__).resolve().parents[2]


def run(*words: object, cwd: Path, **more: str) -> str:
    """The command's output; fails if it did not end with 0."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**kept, **more},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built without a network: an sdist of this tree, and of that a wheel."""
    pytest.importorskip("hatchling", reason="an environment made before it was needed: make install")
    made = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", made, cwd=ROOT)
    (sdist,) = made.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(made, filter="data")
    unpacked = made / sdist.name.removesuffix(".tar.gz")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", made, cwd=unpacked)
    (built,) = made.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that has the wheel, and sees what skyctl depends on."""
    home = tmp_path_factory.mktemp("env")
    venv.create(home, with_pip=False, symlinks=True)
    run(sys.executable, "-m", "pip", "--python", home / "bin" / "python", "install", "--quiet", "--no-deps",
        "--no-index", "--disable-pip-version-check", wheel, cwd=home)  # fmt: skip
    (packages,) = (home / "lib").glob("python*/site-packages")
    # Folders that a .pth names are searched, but their own .pth files (this checkout's) are not read.
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join(ours) + "\n")
    return home / "bin"


def test_the_wheel_holds_what_it_should(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    assert "skyctl/py.typed" in names
    assert "skyctl/cli/app.py" in names
    for template in ("templates/charts.html", "templates/charts.css", "templates/palette.css",
                     "templates/report.html", "templates/report.css"):  # fmt: skip
        assert f"skyctl/compare/{template}" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if not name.startswith(("skyctl/", "skyctl-"))]
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]
    for line in ("License-Expression: Apache-2.0", "Requires-Python: >=3.11", "Requires-Dist: torch"):
        assert line in metadata


def test_it_runs_outside_of_the_checkout(installed: Path, tmp_path: Path) -> None:
    problem = ROOT / "docs" / "examples" / "problem.json"
    where = run(installed / "python", "-c", "import skyctl; print(skyctl.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)
    assert run(installed / "skyctl", "--version", cwd=tmp_path).startswith("skyctl ")
    assert run(installed / "python", "-m", "skyctl", "--version", cwd=tmp_path).startswith("skyctl ")
    assert "proved optimal" in run(installed / "skyctl", "plan", "--problem", problem, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_demo_runs_from_it(installed: Path, tmp_path: Path) -> None:
    shown = run(
        installed / "skyctl", "demo", "--steps", "3", cwd=tmp_path, SKYCTL_HOME=str(tmp_path / "state")
    )
    for name in ("even", "heuristic", "optimal"):
        assert name in shown
