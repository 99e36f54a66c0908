"""``--encrypt`` from probe to launch: what was measured through TLS is planned and trained so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

SIZES = ("--batch-size", "8", "--microbatches", "4")

NOTING = """
import os
from pathlib import Path
import skyctl.remote.credentials as made
note, real = Path(os.environ.pop("NOTE")), made.make_credentials
def noted(*ranks, **how):
    got = real(*ranks, **how)
    note.write_text("secrets tls" if got[0].tls else "secrets")
    return got
made.make_credentials = noted
from skyctl.cli.app import main
main()
"""


def launched(where, note: Path, *words: str) -> str:
    """Trains two steps; what the ranks were given of secrets, by name."""
    words = ("launch", *words, "--steps", "2")
    err = where.start(*words, program=("-c", NOTING), NOTE=str(note)).end().stderr
    return note.read_text() + ("; noted" if "without TLS" in err else "")


@pytest.fixture(scope="module")
def both(probed):
    """A cluster with one profile in the clear, and a newer one through TLS."""
    probed.probe_briefly("train.py", *SIZES, "--encrypt", "-o", "tls.json")
    return probed


@pytest.mark.slow
def test_a_profile_through_tls_says_so_and_takes_nothing_over(both) -> None:
    profile = json.loads((both.folder / "tls.json").read_text())
    assert profile["encrypted"]
    assert all(device["measured"] == profile["created"] for device in profile["devices"])
    assert all(link["bandwidth_bytes_per_s"] > 0 for link in profile["links"])


@pytest.mark.slow
def test_each_is_planned_with_its_own_and_run_so(both, tmp_path: Path) -> None:
    words = ("plan", "train.py", *SIZES, "--strategy", "even")
    for flags, name in ((("--encrypt",), "tls.plan.json"), ((), "clear.plan.json")):
        both.run_inside(*words, *flags, "-o", name)
    plans = {n: json.loads((both.folder / f"{n}.plan.json").read_text()) for n in ("tls", "clear")}
    assert plans["tls"]["encrypted"]
    assert not plans["clear"]["encrypted"]
    assert launched(both, tmp_path / "note", "tls.plan.json") == "secrets tls"
    assert launched(both, tmp_path / "note", "clear.plan.json") == "secrets"
    assert launched(both, tmp_path / "note", "clear.plan.json", "--encrypt") == "secrets tls; noted"


@pytest.mark.slow
def test_a_profile_of_the_other_kind_is_refused_by_name(both) -> None:
    clear = sorted((both.state / "profiles" / "here").iterdir())
    names = {json.loads(path.read_text()).get("encrypted", False): str(path) for path in clear}
    words = ("plan", "train.py", *SIZES, "--strategy", "even")
    done = both.run_inside(*words, "--encrypt", "--profile", names[False], code=2)
    assert "measured without TLS" in done.stderr
    assert "probe train.py" in done.stderr
    assert "--encrypt" in done.stderr.split("next:")[1]
    done = both.run_inside(*words, "--profile", names[True], code=2)
    assert "measured through TLS (--encrypt)" in done.stderr
