"""``scripts/check_docs_links.py`` finds dead links, and the documents have none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "check_docs_links.py"


def _run(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, folder], capture_output=True, text=True, check=False)


def test_ours_all_lead_somewhere() -> None:
    done = _run(ROOT)
    assert done.returncode == 0, done.stdout


def test_dead_ones_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(
        "# One `two`: three\n# Again\n# Again\n"
        "[ok](b%20c.md#here) [ok](#one-two-three) [ok](#again-1) [out](https://example.org) ![gone](p.png)\n"
        "[gone](b%20c.md#there) [gone](#again-2) [up](../x.md) `[code](no.md)`\n```\n[code](no.md)\n```\n"
    )
    (tmp_path / "b c.md").write_text("## Here\n")
    done = _run(tmp_path)
    assert done.returncode == 1
    named = [line.split(": ")[1] for line in done.stdout.splitlines()]
    assert named == ["p.png", "b%20c.md#there", "#again-2", "../x.md"]
