"""The report as text: whole, escaped, and with nothing in it that needs a network or says who made it."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

from skyctl.compare.report.markup import Markup, el, join
from skyctl.compare.report.page import page
from skyctl.compare.report.scale import nice_range, of_seconds, round_ticks
from skyctl.compare.rows import Outcome, rows
from skyctl.compare.verdict import best_of, verdict
from skyctl.control.reporting import Hiding, public_workload
from skyctl.planner.api import plan
from skyctl.records.cluster import Cluster, Node
from skyctl.records.problem import Device, Layer, Problem

HOSTILE = ("<script>alert(1)&amp;\"'", "b --><img src=x onerror=alert(1)>", "\u202eevil\x07")


def test_every_section_is_there_and_every_tag_is_closed(three, reports: ModuleType) -> None:
    read = reports.Reader(page(reports.made(three, full=True)))
    assert read.faults == []
    assert len(read.ids) == len(set(read.ids))
    for ident in reports.IDS:
        assert ident in read.ids
    for words in ("optimal is 1.67× faster than even, predicted; 1.56× measured", "proved optimal", "holds",
                  "skyctl verify", "layers 0–8", "adding laptop"):  # fmt: skip
        assert words in read.words.replace("\u00a0", " "), words


def test_nothing_is_loaded_or_run(three, reports: ModuleType) -> None:
    text = page(reports.made(three, full=True))
    read = reports.Reader(text)
    assert not read.tags & {"script", "iframe", "img", "object", "embed", "base", "form"}
    for tag, key, value in read.attributes:
        assert not key.startswith("on"), (tag, key)
        if key in ("src", "href", "xlink:href"):
            assert value.startswith(("#", "data:,")), (tag, value)
    assert not re.search(r"https?://|@import|url\((?!#)", text)
    assert (
        "meta",
        "content",
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:",
    ) in read.attributes


def test_names_are_never_markup(outcome, reports: ModuleType) -> None:
    devices = [f"{name}/cpu:0" for name in HOSTILE]
    bad = outcome("optimal", devices=devices, counts=(4, 4, 4), compute_s=(1.0, 1.0, 1.0), error=HOSTILE[1])
    none = Outcome(HOSTILE[0], None, HOSTILE[1])
    read = reports.Reader(page(reports.made([none, bad], full=True)))
    assert read.faults == []
    assert not read.tags & {"script", "img"}
    assert "<script>alert(1)" in read.words
    assert "\x07" not in read.words


@pytest.mark.parametrize("case", ["nothing", "infeasible", "one device", "zeros", "failed", "planned only"])
def test_edges(case: str, outcome, reports: ModuleType) -> None:
    cases = {
        "nothing": [],
        "infeasible": [Outcome("even", None, "needs 3.1 GiB"), Outcome("optimal", None, "", undecided=True)],
        "one device": [outcome(devices=("a/cpu:0",), counts=(12,), compute_s=(2.0,), steps_s=[2.0, 2.1])],
        "zeros": [outcome(compute_s=(0.0, 0.0), step_s=0.0)],
        "failed": [outcome("even", steps_s=[2.0, 2.1]), outcome("optimal", error="rank 1 died")],
        "planned only": [outcome("even"), outcome("optimal", bound_s=2.0, status="bounded")],
    }
    read = reports.Reader(page(reports.made(cases[case], full=case not in ("nothing", "infeasible"))))
    assert read.faults == []
    assert set(reports.IDS) <= set(read.ids)
    assert "nan" not in read.words.lower().split()


def test_many_stages_and_microbatches_stay_small(reports: ModuleType) -> None:
    layer = {"flops": 1e9, "state_bytes": 1.0, "activation_bytes": 1.0, "output_bytes": 1.0}
    problem = Problem(
        layers=[Layer(name=f"layer.{i}", **layer) for i in range(128)],
        devices=[
            Device(id=f"n{i}/cpu:0", flops_per_s=1e9 * (1 + i % 3), memory_bytes=None) for i in range(64)
        ],
        microbatches=64,
    )
    text = page(reports.made([Outcome("even", plan(problem, "even"))]))
    assert reports.Reader(text).faults == []
    assert "k-F" in text
    assert len(text) < 1_000_000


def test_verdicts(three, outcome) -> None:
    assert verdict([]) == "no strategy gives a plan that fits"
    assert verdict(rows(three[:1])) == "nothing beats even here: 2.50 s a step, predicted; 2.50 s measured"
    slow = outcome("optimal", compute_s=(1.0, 1.2), step_s=1.25, steps_s=[9.0, 5.0])
    assert verdict(rows([three[0], slow])) == (
        "nothing beat even when it was run: optimal was predicted 2.00× faster, and measured 0.50×"
    )
    none = Outcome("even", None, "too small")
    assert (
        verdict(rows([none, outcome("optimal")]))
        == "even does not fit; optimal takes 2.50 s a step, predicted"
    )
    same = rows(
        [outcome("even"), outcome("heuristic", step_s=2.0), outcome("optimal", step_s=2.0, status="optimal")]
    )
    best = best_of(same)
    assert best is not None
    assert best.strategy == "optimal"


def test_what_is_private_is_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/srv/people/ada")
    node = Node(name="tower", host="203.0.113.9", user="ada", identity_file="~/.ssh/secret_key")
    hide = Hiding(Cluster(name="home", nodes=(node,)))
    text = "tower: ada@203.0.113.9 refused ~/.ssh/secret_key; log: /srv/people/ada/runs/x, /home/bob/y"
    said = hide(text)
    assert said is not None
    for private in ("ada", "203.0.113.9", "secret_key", "bob"):
        assert private not in said, said
    assert "tower" in said
    assert public_workload("/home/ada/work/train.py") == "train.py"
    assert public_workload("hf:/home/ada/llama,context=64") == "hf:llama,context=64"
    assert public_workload("gpt:layers=2") == "gpt:layers=2"


def test_markup() -> None:
    assert el("p", "a<b", None, ["&", Markup("<i>")], class_="x", hidden=True, id=None) == (
        '<p class="x" hidden>a&lt;b&amp;<i></p>'
    )
    assert el("br") == "<br>"
    assert el("a", title="\"'<") == '<a title="&quot;&#x27;&lt;"></a>'
    assert join("took 12 ms, +3 %") == "took 12\u00a0ms, +3\u00a0%"


def test_ticks() -> None:
    assert round_ticks(0.47, 5) == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    assert round_ticks(0.0, 5) == [0.0]
    assert [text for _, text in of_seconds(0.47).ticks()] == ["0", "100", "200", "300", "400"]
    ends = nice_range([3.7, 5.5])
    assert ends[0] <= 3.7
    assert ends[-1] >= 5.5
    assert len(nice_range([2.0, 2.0])) > 1
