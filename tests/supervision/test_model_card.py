"""A model card names the Hub's model where it is known, and no path."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyctl.supervision.model_card import hub_name


def test_the_base_is_called_as_the_hub_calls_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_name(Path("Qwen/Qwen3-0.6B")) == "Qwen/Qwen3-0.6B"
    (tmp_path / "models" / "qwen").mkdir(parents=True)
    assert hub_name(Path("models/qwen")) is None, "it is a folder here"
    assert hub_name(tmp_path / "models" / "qwen") is None
    cached = tmp_path / "hub" / "models--Qwen--Qwen3-0.6B" / "snapshots" / "abc"
    cached.mkdir(parents=True)
    assert hub_name(cached) == "Qwen/Qwen3-0.6B"
