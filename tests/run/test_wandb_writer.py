"""Figures for W&B, with a stand-in for its library that keeps what it is told."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from skyctl.errors import InputError
from skyctl.files import RunPaths
from skyctl.records.run_state import RunState
from skyctl.run import wandb_writer
from skyctl.run.callbacks import StepProgress
from skyctl.run.wandb_writer import WandbWriter, require_wandb, wandb_project
from skyctl.supervision import background_supervisor
from skyctl.supervision.run_journal import RunJournal

STATE = RunState(
    run_id="20261121-040405-cccc", created="c", written="w", workload="gpt:layers=2", cluster="here", steps=20
)


class StandIn(ModuleType):
    """``wandb`` as far as skyctl calls it."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.begun: dict[str, Any] = {}
        self.logged: list[dict[str, Any]] = []
        self.finished, self.is_known, self.mode = 0, True, "online"
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.offline = False
        self.run: object = None
        self.url = "https://wandb.example/run"
        self.Settings = type("Settings", (dict,), {"model_fields": {"silent": None, "console": None}})

    def setup(self) -> Any:
        return SimpleNamespace(settings=SimpleNamespace(mode=self.mode))

    def login(self, *, prompt: bool = True) -> bool:
        assert not prompt
        return self.is_known

    def init(self, **begun: Any) -> StandIn:
        self.gate.wait(60)
        if self.error is not None:
            raise self.error
        self.begun = begun
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "step")

    def log(self, figures: dict[str, Any]) -> None:
        self.logged.append(figures)

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", made)
    return made


def test_each_step_arrives_under_the_runs_own_id(wandb: StandIn, tmp_path: Path) -> None:
    notes: list[str] = []
    writer = WandbWriter("team/project", STATE, tmp_path, notes.append)
    writer.step({"step": 0, "loss": 2.0})
    writer.step({"step": 1, "loss": 1.5, "validation_metrics": {"accuracy": 0.5, "odd": None}})
    writer.step({"step": 0, "loss": 1.9})  # done again
    writer.close()
    writer.close()
    assert wandb.logged == [
        {"step": 0, "loss": 2.0},
        {"step": 1, "loss": 1.5, "validation_metrics/accuracy": 0.5},
        {"step": 0, "loss": 1.9},
    ]
    begun = wandb.begun
    assert (begun["entity"], begun["project"], begun["id"]) == ("team", "project", STATE.run_id)
    assert (begun["resume"], begun["dir"]) == ("allow", str(tmp_path))
    assert begun["settings"] == {"silent": True, "console": "off"}
    assert begun["config"] == {"workload": "gpt:layers=2", "cluster": "here", "steps": 20}
    assert (wandb.finished, notes) == (1, ["W&B: https://wandb.example/run"])


def test_a_run_neither_waits_for_it_nor_fails_of_it(
    wandb: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb_writer, "CLOSE_S", 0.05)
    notes: list[str] = []
    wandb.gate.clear()
    wandb.error = RuntimeError("no network")
    writer = WandbWriter("project", STATE, tmp_path, notes.append)
    for step in range(100):
        writer.step({"step": step, "loss": 1.0})
    writer.close()
    assert "has not taken all figures" in notes[0]
    wandb.gate.set()
    writer._thread.join(60)
    assert "no network" in notes[1]
    assert wandb.logged == []


def test_without_the_library_it_is_refused_before_anything_is_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match="wandb") as refused:
        require_wandb("project")
    assert refused.value.hint == "pip install wandb"
    monkeypatch.delitem(sys.modules, "wandb")
    (tmp_path / "wandb").mkdir()  # where its own figures lie
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InputError, match="wandb"):
        require_wandb("project")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)


def test_who_is_not_logged_in_or_names_no_project_is_refused(wandb: StandIn) -> None:
    require_wandb("project")
    require_wandb("team/project")
    for name in ("", "/", "team/", "a/b/c"):
        with pytest.raises(InputError, match="no project"):
            require_wandb(name)
    wandb.is_known = False
    with pytest.raises(InputError, match="who you are") as refused:
        require_wandb("project")
    assert "WANDB_MODE=offline" in str(refused.value.hint)
    wandb.mode = "offline"
    require_wandb("project")
    wandb.mode = "online"
    wandb.run = object()
    require_wandb("project")
    wandb.run = None
    wandb.login = lambda: True  # type: ignore[assignment]
    with pytest.raises(InputError, match="too old"):
        require_wandb("project")


def test_a_run_keeps_the_project_in_its_state() -> None:
    assert wandb_project(STATE) is None
    for options, project in (({"wandb": "p"}, "p"), ({"wandb": None}, None), ({}, None), (3, None)):
        assert wandb_project(STATE.model_copy(update={"order": {"options": options}})) == project


def test_a_process_in_the_background_has_a_service_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one of the process that starts it ends with that."""
    monkeypatch.setenv(wandb_writer.WANDB_SERVICE, "3-1-unix-/tmp/socket")
    monkeypatch.setenv("WANDB_MODE", "offline")
    env = background_supervisor._environment()
    assert wandb_writer.WANDB_SERVICE not in env
    assert env["WANDB_MODE"] == "offline"


def test_a_supervised_run_sends_what_it_writes_down_where_it_was_asked_to(wandb: StandIn) -> None:
    for project in (None, "project"):
        paths = RunPaths.new()
        state = STATE.model_copy(update={"run_id": paths.run_id, "order": {"options": {"wandb": project}}})
        journal = RunJournal.create(paths, state, lambda _note: None)
        try:
            journal.step(
                StepProgress(step=0, steps=20, loss=2.0, iteration_s=0.5, samples_per_s=8.0, left_s=None)
            )
        finally:
            journal.close()
        line = {"step": 0, "loss": 2.0, "iteration_s": 0.5, "samples_per_s": 8.0}
        assert json.loads(paths.metrics.read_text()) == line
        assert wandb.logged == ([] if project is None else [line])
    assert wandb.begun["id"] == paths.run_id
