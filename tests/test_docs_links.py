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


def test_a_link_to_source_leads_to_the_definition_it_names(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("X = 1\n\n\nclass A:\n    def f(self) -> None: ...\n")
    links = "[`X`](m.py#L1) [`A.f`](m.py#L4) [`A`](m.py#L4) [`B`](m.py#L1)\n"
    (tmp_path / "a.md").write_text(links)
    done = _run(tmp_path)
    assert done.returncode == 1
    assert [line.split(": ")[2].split(" (")[0] for line in done.stdout.splitlines()] == [
        "A.f is on line 5",
        "B is not defined there",
    ]
    subprocess.run([sys.executable, SCRIPT, tmp_path, "--fix"], capture_output=True, check=False)
    assert (tmp_path / "a.md").read_text() == links.replace("[`A.f`](m.py#L4)", "[`A.f`](m.py#L5)")
