"""The checks of ``conftest.py`` catch what they are there to catch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

LEAKS = """
import os, subprocess, sys, tempfile, time
from pathlib import Path
import pytest

def test_process():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).returncode = 0

def test_orphan():
    # A grandchild in a session of its own, whose parent is gone: found by its environment alone.
    code = "import subprocess, sys; subprocess.Popen(['sleep', '60'], start_new_session=True).returncode = 0"
    subprocess.run([sys.executable, "-c", code], check=True)

def test_file():
    Path(tempfile.mkdtemp(prefix="skyctl-")).joinpath("x").touch()

def test_clean():
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    with tempfile.TemporaryDirectory(prefix="skyctl-"):
        pass
    assert os.environ["SKYCTL_HOME"].startswith(os.environ["HOME"])
"""

KEPT = """
from pathlib import Path

def test_kept():
    Path("{path}").touch()
"""


@pytest.fixture(autouse=True)
def _helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules that ``conftest.py`` imports are found from where its copy is."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))


def test_leaks_are_named_and_ended(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(__file__).with_name("conftest.py").read_text()
    pytester.makeconftest(source.replace("PATIENCE_S = 20.0", "PATIENCE_S = 0.3"))
    pytester.makepyfile(LEAKS)
    monkeypatch.delenv("SKYCTL_REQUIRE_LAB", raising=False)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=4, errors=3)
    result.stdout.fnmatch_lines(
        [
            "*left behind: process * (*time.sleep(60))",
            "*left behind: process * (sleep 60)",
            "*left behind: file */skyctl-*",
        ]
    )


@pytest.mark.parametrize("several", [(), pytest.param(("-n", "2"), marks=pytest.mark.slow)])
def test_what_stays_on_the_machine_is_named_at_the_end(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, several: tuple[str, ...]
) -> None:
    path = Path(f"/tmp/skyctl-test-{os.getpid()}")
    source = Path(__file__).with_name("conftest.py").read_text()
    pytester.makeconftest(source.replace("PATIENCE_S = 20.0", "PATIENCE_S = 0.3"))
    pytester.makepyfile(KEPT.format(path=path))
    monkeypatch.setenv("SKYCTL_REQUIRE_LAB", "1")
    try:
        result = pytester.runpytest_subprocess("-p", "no:cacheprovider", *several)
    finally:
        path.unlink(missing_ok=True)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"ERROR the tests left behind: file {path}"])
