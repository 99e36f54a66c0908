"""``skyctl compare`` from the command line to the report: one real comparison, looked at from all sides."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.commands import run_briefly

Run = Callable[..., tuple[int, str, str]]
TRAIN = """
from torch import nn

def model():
    return [nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)]

def data(batch_size, seed):
    import torch
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield (
            torch.randn(batch_size, 16, generator=generator),
            torch.randint(4, (batch_size,), generator=generator),
        )

def validation(batch_size, seed):
    return data(batch_size, seed + 1)

def metrics(outputs, targets):
    return {"accuracy": (outputs.argmax(1) == targets).float().mean()}

def lr_scheduler(optimizer, steps):  # raises where it is stepped more often than it was told
    import torch
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.001, total_steps=steps)
"""
NODES = (
    "name: two\nnodes:\n"
    "  - {name: 'a<b>&', transport: local, threads: 1}\n"
    "  - {name: b, transport: local, threads: 1, slowdown: 3.0}\n"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compared")
    (folder / "train.py").write_text(TRAIN)
    (folder / "cluster.yaml").write_text(NODES)
    return folder


@pytest.fixture(scope="module")
def compared(folder: Path) -> tuple[Path, dict[str, Any], str]:
    """The folder of the results, the document, and what stood on stderr."""
    done = run_briefly(
        folder, "compare", str(folder / "train.py"), "--measure", "--trace", "--steps", "3", "--strategy",
        "even,alone,optimal", "--microbatches", "2,4", "--nodes", "1..N", "--validate-every", "2",
        "-o", "out", "--json", SKYCTL_HOME=str(folder / "state"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "out", json.loads(done.stdout), done.stderr


@pytest.mark.slow
def test_the_document_names_all_that_was_written(compared: tuple[Path, dict[str, Any], str]) -> None:
    out, document, _ = compared
    assert {"report", "even plan", "optimal measurement", "even trace"} <= set(document["files"])
    for path in document["files"].values():
        assert (out.parent / path).stat().st_size > 0, path
    assert document == json.loads((out / "comparison.json").read_text())
    assert document["verdict"]
    rows = {"even", "alone", "pipeline", "data", "hybrid", "optimal"}
    assert {row["strategy"] for row in document["rows"]} <= rows
    assert document["conclusion"]["best"] in rows
    assert {gain["over"] for gain in document["conclusion"]["gains"]} < rows
    assert document["rows"][1]["shares"][0]["stop"] == 5  # alone holds all layers
    assert all(row["predicted_interval"]["low_s"] <= row["predicted_s"] for row in document["rows"])


def test_sweeps_have_a_point_a_value(compared: tuple[Path, dict[str, Any], str]) -> None:
    _, document, _ = compared
    batches, nodes = document["sweeps"]
    assert [point["value"] for point in batches["points"]] == [2, 4]
    assert batches["chosen"] in (2, 4)
    assert [point["value"] for point in nodes["points"]] == [1, 2]
    chosen = next(point for point in batches["points"] if point["value"] == batches["chosen"])
    assert all(cell["measured_s"] for cell in chosen["cells"] if cell["strategy"] != "alone")
    assert all(point["cells"][-1]["measured_s"] for point in nodes["points"])


def test_the_report_tells_it_and_nobody(compared: tuple[Path, dict[str, Any], str]) -> None:
    out, document, _ = compared
    text = (out / "report.html").read_text().replace("\u00a0", " ")
    assert html.escape(document["verdict"][1:]) in text  # at the beginning of a sentence it has a capital
    assert "a&lt;b&gt;&amp;" in text
    assert "a<b>" not in text
    assert "measured, step" in text  # the trace
    assert "skyctl compare train.py --measure --trace --steps 3 --strategy even,alone,optimal" in text
    assert "On held-out data" in text
    last = json.loads((out / "optimal.measurement.json").read_text())["validation"][-1]
    assert f"{last['loss']:.3f}" in text
    assert f"{last['metrics']['accuracy']:.3f}" in text
    for private in (str(out.parent), str(Path.home()), os.environ.get("USER") or "no user"):
        assert private not in text or private == "root", private


def test_progress_says_how_each_run_ended(compared: tuple[Path, dict[str, Any], str]) -> None:
    _, _, printed = compared
    assert "even: done, 3 steps · loss" in printed
    assert "report: " in printed  # with --json all but the document is on stderr


def test_nonsense_is_refused_before_anything_is_done(folder: Path) -> None:
    for words in (("--microbatches", "4,x"), ("--nodes", "3..2"), ("--validate-every", "2")):
        done = run_briefly(folder, "compare", "train.py", *words, SKYCTL_HOME=str(folder / "state"))
        assert done.returncode == 2
        assert words[0] in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--owners", "a,b", "--clients-per-round", "1"), "with --clients-per-round some make none"),
        (("--owners", "a,b", "--drop-stragglers"), "with --drop-stragglers some make none"),
        (("--owners", "a,b", "--round-deadline", "9"), "with --round-deadline some make none"),
        (("--owners", "a,b", "--nodes", "1..2"), "--nodes leaves machines out"),
        (("--measure", "--trace"), "--trace draws single steps"),
        (("--sync-delay", "1"), "--sync-delay sums gradients a step later"),
    ],
)
def test_what_rounds_can_not_be_compared_with_is_refused_before_a_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skyctl: Run, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)  # there is neither a cluster nor a workload
    code, _, err = skyctl("compare", "nothing.py", "--local-steps", "2", *words)
    assert code == 2
    assert message in " ".join(err.split())
    assert "next: " in err
    assert list(tmp_path.iterdir()) == []


def test_owners_that_may_make_fewer_steps_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skyctl: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.yaml").write_text("name: here\nnodes:\n  - {name: a, transport: local}\n")
    (tmp_path / "train.py").write_text(f"{TRAIN}\n\ndef local_steps(owner, round):\n    return 1\n")
    code, _, err = skyctl("compare", "train.py", "--local-steps", "2", "--owners", "all")
    assert code == 2
    assert "with local_steps() of train.py some make none, or fewer" in " ".join(err.split())


@pytest.mark.slow
def test_owners_are_run_beside_an_average_after_every_step(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    home = str(tmp_path / "state")
    assert run_briefly(tmp_path, "init", "--local", "2", SKYCTL_HOME=home).returncode == 0
    words = ("compare", "train.py", "--microbatches", "4", "--local-steps", "2", "--owners", "all")
    done = run_briefly(tmp_path, *words, "--strategy", "alone", SKYCTL_HOME=home)
    assert (done.returncode, "with --owners none may" in " ".join(done.stderr.split())) == (2, True)
    done = run_briefly(
        tmp_path, *words, "--measure", "--steps", "3", "--strategy", "alone,optimal", "-o", "out", "--json",
        SKYCTL_HOME=home,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    rows = {row["strategy"]: row for row in document["rows"]}
    assert list(rows) == ["synchronous", "optimal"]
    assert [row.get("steps_per_iteration", 1) for row in rows.values()] == [2, 4]
    assert all(row["measured"]["median"] > 0 for row in rows.values())
    assert rows["optimal"]["layers"].endswith("each on batches of its own; 2 local steps")
    document = json.loads((tmp_path / "out" / "synchronous.plan.json").read_text())
    assert [pipeline["local_steps"] for pipeline in document["pipelines"]] == [1, 1]
    assert "a round counts as 2 steps (synchronous), 4 steps (optimal)" in " ".join(done.stderr.split())


@pytest.mark.slow
def test_rounds_are_run_beside_the_synchronous_plan(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    home = str(tmp_path / "state")
    assert run_briefly(tmp_path, "init", "--local", "2", SKYCTL_HOME=home).returncode == 0
    done = run_briefly(
        tmp_path, "compare", "train.py", "--measure", "--steps", "3", "--strategy", "alone,optimal",
        "--microbatches", "4", "--local-steps", "2", "-o", "out", "--json", SKYCTL_HOME=home,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["version"] == 6
    rows = {row["strategy"]: row for row in document["rows"]}
    assert list(rows) == ["alone", "pipeline", "synchronous", "optimal"]
    assert rows["optimal"]["steps_per_iteration"] == 2
    assert rows["synchronous"]["steps_per_iteration"] == 1
    run = json.loads((tmp_path / "out" / "optimal.measurement.json").read_text())
    assert len(run["steps"]) == 3  # rounds
    assert rows["optimal"]["measured"]["median"] == run["iteration_s"]["median"] / 2
    plans = {name: json.loads((tmp_path / "out" / f"{name}.plan.json").read_text()) for name in rows}
    assert [pipeline["local_steps"] for pipeline in plans["optimal"]["pipelines"]] == [2, 2]
    assert plans["synchronous"]["problem"]["rhythm"]["local_steps"] is None
    assert rows["synchronous"]["measured"]["median"] > 0
    assert "synchronous" in {gain["over"] for gain in document["conclusion"]["gains"]} | {
        document["conclusion"]["best"]
    }
    assert "a round counts as 2 steps" in done.stderr
    assert "changes training: each device makes 2 local steps" in " ".join(done.stderr.split())
    assert "a round counts as 2 steps" in (tmp_path / "out" / "report.html").read_text().replace(
        "\u00a0", " "
    )
