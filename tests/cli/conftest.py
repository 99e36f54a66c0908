"""How tests run a command in their own process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ..helpers.commands import run_here


@pytest.fixture
def skyctl(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """``skyctl ARGUMENTS`` in this process: (exit code, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        done = run_here(capsys, *arguments)
        return done.returncode, done.stdout, done.stderr

    return run
