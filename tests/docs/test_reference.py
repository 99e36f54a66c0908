"""The pages of docs/reference/ are what the commands themselves say, and the site lists them all."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "reference"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "scripts" / "make_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_what_the_commands_say(script: ModuleType) -> None:
    present = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    wanted = script.reference_pages()
    stale = sorted(name for name in {*present, *wanted} if present.get(name) != wanted.get(name))
    assert not stale, "run: python scripts/make_reference.py"


def test_the_site_lists_them(script: ModuleType) -> None:
    listed = re.findall(r"- reference/([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert listed == list(script.reference_pages())
