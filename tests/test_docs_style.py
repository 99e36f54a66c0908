"""Sentences and pages that are hard to read are found, and nothing else."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
LONG = " ".join(["word"] * 41) + "."
SHORT = " ".join(["word"] * 39) + "."


@pytest.fixture
def style(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("docs_style", ROOT / "scripts" / "check_docs_style.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pages(root: Path, **texts: str) -> Path:
    (root / "docs").mkdir()
    for name in ("README", "CONTRIBUTING"):
        (root / f"{name}.md").write_text("# It\n")
    for name, text in texts.items():
        (root / "docs" / f"{name}.md").write_text(text)
    return root


def test_a_long_sentence_is_named(style: ModuleType, tmp_path: Path) -> None:
    found = style.problems(pages(tmp_path, page=f"# Heading\n\n{SHORT} {LONG}\n\n- {LONG}\n"))
    assert [line.partition(":")[0] for line in found] == ["docs/page.md"] * 2


def test_code_tables_and_generated_blocks_do_not_count(style: ModuleType, tmp_path: Path) -> None:
    made = f"<!-- zoo: generated -->\n{LONG * 70}\n<!-- zoo: end -->"
    text = f"```\n{LONG}\n```\n\n| a |\n|---|\n| {LONG} |\n\n{made}\n\n{SHORT}\n- {SHORT}\n"
    assert style.problems(pages(tmp_path, page=text)) == []


def test_a_long_page_is_named_but_the_contract(style: ModuleType, tmp_path: Path) -> None:
    text = f"{SHORT} " * 65
    assert style.problems(pages(tmp_path, page=text, contract=text)) == [
        "docs/page.md: 2535 words, at most 2500"
    ]


def test_a_sentence_that_does_not_name_its_thing_is_named(style: ModuleType, tmp_path: Path) -> None:
    text = "# What a turn is\n\nWhat is it? It holds. Who holds it\nwaits.\n\n- **Where** it is.\n"
    assert style.problems(pages(tmp_path, page=text)) == [
        "docs/page.md: name the thing: Who holds it waits.",
        "docs/page.md: name the thing: Where** it is.",
    ]


def test_docstrings_and_comments_name_their_things(style: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    code = (
        '"""What it holds."""\n\n# It is so.\n# Where not, it ends.\nTEXT = "What a text is."\n'
        '"""Its text. Whoever reads it knows."""\n\n\ndef f():\n    """The text; what is in it."""\n'
    )
    (tmp_path / "src" / "it.py").write_text(code)
    assert style.problems_of_code(tmp_path) == [
        "src/it.py:1: name the thing: What it holds.",
        "src/it.py:6: name the thing: Whoever reads it knows.",
        "src/it.py:3: name the thing: Where not, it ends.",
    ]
