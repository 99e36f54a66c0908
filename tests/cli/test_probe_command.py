"""``skyctl probe``: flags that would do nothing are refused at once; dry runs say what would be done."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.bare_records import OF_PROFILE

from skyctl.files import save_profile
from skyctl.records.profile import NodeFailure, Profile

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skyctl: Run) -> Run:
    """``skyctl probe ARGUMENTS`` in this process, in a cluster of two: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.yaml").write_text(
        "name: pair\nnodes:\n- {name: a, transport: local}\n- {name: b, transport: local}\n"
    )
    return partial(skyctl, "probe")


@pytest.mark.parametrize(
    "flags",
    [
        ("--refresh",),
        ("-o", "x.json"),
        ("--plot", "x.svg"),
        ("--links", "none"),
        ("--links", "all"),
        ("--microbatches", "4"),
        ("--no-compare",),
    ],
)
def test_what_quick_would_not_do_is_refused(run: Run, flags: tuple[str, ...]) -> None:
    code, _, err = run("--quick", *flags)
    assert code == 2
    assert f"{flags[0]} does not go with --quick" in err


def test_a_picture_of_no_links_is_refused(run: Run) -> None:
    code, _, err = run("--links", "none", "--plot", "x.svg")
    assert code == 2
    assert "--links none" in err


@pytest.mark.parametrize(
    ("flags", "links", "words"),
    [
        ((), "all", "every pair"),
        (("--links", "sites"), "sites", "one between every two sites"),
        (("--links", "none"), "none", "no links"),
    ],
)
def test_a_dry_run_says_which_links(run: Run, flags: tuple[str, ...], links: str, words: str) -> None:
    code, out, _ = run("--dry-run", *flags)
    assert code == 0
    assert out.startswith("would measure a, b, ")
    assert words in out
    assert json.loads(run("--dry-run", "--json", *flags)[1])["links"] == links


def empty(created: str = "2026-01-01T00:00:00+00:00", **more: Any) -> Profile:
    bare: dict[str, Any] = {"cluster": "pair", "cluster_digest": "d", "nodes": (), "devices": (), "links": ()}
    return Profile(created=created, **OF_PROFILE | bare | more)


def test_quick_names_every_node_that_failed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that the profile has no device of: the exit code says that something was wrong."""
    save_profile(empty())
    now = empty(failures=[NodeFailure(node="b", error="no torch", hint="install it")])
    monkeypatch.setattr("skyctl.jobs.node_sessions.connect_nodes", lambda *_: nullcontext())
    monkeypatch.setattr("skyctl.jobs.profile_recheck.recheck_profile", lambda *_: now)
    code, out, err = run("--quick")
    assert code == 4
    assert "still holds where it could be checked" in out
    assert "b could not be checked: no torch (install it)" in err
    report = json.loads(run("--quick", "--json")[1])
    assert report["failures"] == [{"node": "b", "error": "no torch", "hint": "install it"}]


def test_a_dry_run_of_quick_says_what_is_looked_at(run: Run) -> None:
    assert run("--quick", "--dry-run")[0] == 2, "there is no profile yet"
    save_profile(empty())
    code, out, _ = run("--quick", "--dry-run")
    assert code == 0
    assert f"the profile of {empty().created} still holds on a, b" in out
    assert "a ring of links" in out


def test_a_count_that_the_model_cannot_take_is_left_out(run: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def model(): return [nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)]\n"
        "def data(batch_size, seed):\n"
        "    while True: yield torch.randn(batch_size, 6), torch.randint(0, 4, (batch_size,))\n"
    )
    code, out, err = run("train.py", "--dry-run", "--json")
    assert code == 0
    assert json.loads(out)["microbatches"] == [4, 8, 16]
    assert "left out: 32 microbatches: some would have 1 sample: train.py: layer 1" in err
    code, _, err = run("train.py", "--dry-run", "--microbatches", "32")
    assert code == 2
    assert "these work: --microbatches 1, 2, 4, 8, 16" in err
