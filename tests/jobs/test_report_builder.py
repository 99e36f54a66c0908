"""A report may tell nothing of who made it."""

from __future__ import annotations

import pytest

from skyctl.jobs.report_builder import Anonymizer, anonymize_workload
from skyctl.records.cluster import Cluster, Node


def test_what_is_private_is_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/srv/people/ada")
    node = Node(name="tower", host="203.0.113.9", user="ada", identity_file="~/.ssh/secret_key")
    hide = Anonymizer(Cluster(name="home", nodes=(node,)))
    text = "tower: ada@203.0.113.9 refused ~/.ssh/secret_key; log: /srv/people/ada/runs/x, /home/bob/y"
    said = hide(text)
    assert said is not None
    for private in ("ada", "203.0.113.9", "secret_key", "bob"):
        assert private not in said, said
    assert "tower" in said
    assert anonymize_workload("/home/ada/work/train.py") == "train.py"
    assert anonymize_workload("hf:/home/ada/llama,context=64") == "hf:llama,context=64"
    assert anonymize_workload("gpt:layers=2") == "gpt:layers=2"
