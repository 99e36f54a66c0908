"""How tests run a command in their own process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from skyctl.cli.app import main


@pytest.fixture
def skyctl(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """``skyctl ARGUMENTS`` in this process: (exit code, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["skyctl", *arguments])
        code: Any = 0
        try:
            main()
        except SystemExit as exc:
            code = exc.code or 0
        return code, *capsys.readouterr()

    return run
