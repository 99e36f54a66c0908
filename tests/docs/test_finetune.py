"""The commands of docs/finetune.md, in their order: a tiny model learns 200 chats and answers as taught."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs.documented_commands import ROOT, shown

from ..helpers.commands import run_hub_briefly

pytest.importorskip("peft")

PAGE = "docs/finetune.md"
RUN = "d13c"
"""How the page names its run."""
CLUSTER = """\
nodes:
  - {name: tower, transport: local, threads: 1}
  - {name: laptop, transport: local, threads: 1, slowdown: 1.5}
  - {name: oldbox, transport: local, threads: 1, slowdown: 2.5}
"""


@pytest.mark.slow
def test_the_model_answers_as_the_page_says(tmp_path: Path) -> None:
    commands = [command.words for command in shown() if command.page == PAGE and command.needs is None]
    assert len([words for words in commands if words[0] == "skyctl"]) == 8
    (script,) = (words[1] for words in commands if words[0] == "python")
    subprocess.run([sys.executable, ROOT / script], cwd=tmp_path, check=True, capture_output=True)
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    run, answers = "", 0
    for words in commands:
        if words[0] == "python":
            continue
        made = [run if word == RUN else word for word in words[1:]]
        brief = made[0] == "setup" or (made[0] == "generate" and answers > 0)
        limit = ("--limit", "tower") if brief else ()  # three nodes launch, and generate once
        done = run_hub_briefly(tmp_path, *made, *limit)
        assert done.returncode == 0, f"{words}\n{done.stderr}"
        if made[0] == "init":
            assert "192.0.2.10" in (tmp_path / "cluster.yaml").read_text()
            (tmp_path / "cluster.yaml").write_text(CLUSTER)
        elif made[0] == "launch":
            run = re.findall(r"^run: .*/(\S+)$", done.stdout + done.stderr, re.MULTILINE)[0]
            for line in (*done.stderr.splitlines(), *done.stdout.splitlines()):
                if line.startswith(("data: ", "a sample; ", "⟦", "loss: ")):
                    assert line in text
        elif made[0] == "generate":
            asked = text.index(f'"{made[2]}"')
            assert done.stdout == text[asked:].splitlines()[1] + "\n"
            answers += 1
    assert answers == 2
