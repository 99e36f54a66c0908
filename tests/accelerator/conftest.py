"""The toy accelerator, for processes that a test starts. Torch has one accelerator a process, for good.

So what is in ``cases`` runs in a pytest of its own, which ``test_cases.py`` starts; by hand:
``python -m tests.accelerator.build FOLDER && PYTHONPATH=FOLDER pytest -n 0 tests/accelerator/cases``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from .build import COMPILER, build

if torch._C._get_privateuse1_backend_name() != "toy":
    collect_ignore = ["cases"]


@pytest.fixture(scope="session")
def toy_folder(made_once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    """The toy accelerator's package: on ``PYTHONPATH`` it makes torch have it."""
    if COMPILER is None:
        pytest.skip("the toy accelerator needs a C++ compiler")
    return made_once("toy-accelerator", build)


@pytest.fixture
def toy(toy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the toy accelerator to the processes that this test starts."""
    paths = [str(toy_folder), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
