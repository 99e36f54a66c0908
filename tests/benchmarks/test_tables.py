"""The planner's benchmark: its instances are the ones described, its tables come out whole."""

import json
import re

import pytest
from tables import page, quality, timing
from tables.exactness import exactness
from tables.instances import (
    QUALITY,
    crossings,
    large_case,
    paper_case,
    paper_layers,
    quality_case,
    random_costs_case,
    sites_case,
)

SECTIONS = ("exactness", "quality", "iteration", "time", "milp")


def test_the_papers_layers():
    h, layers = 1024, paper_layers(160)
    assert len(layers) == 483
    assert layers[0].flops == 3 * 32 * 128 * h * 10
    assert layers[1].flops == 3 * 32 * (8 * 128 * h**2 + 4 * 128**2 * h)
    assert layers[2].flops == layers[3].flops == 3 * 32 * 2 * 128 * h * 4 * h
    assert [x.flops for x in layers[-2:]] == [3 * 32 * 2 * h**2, 3 * 32 * 6 * h]
    assert [x.state_bytes for x in (layers[0], layers[5], *layers[-2:])] == [
        16 * 30522 * h, 16 * 4 * h * h, 16 * h * h, 16 * 3 * h,
    ]  # fmt: skip


def test_sizes_are_those_named():
    for problem, size in (
        (paper_case("f1c"), (64, 483)),
        (paper_case("63"), (63, 483)),
        (large_case(256, 400, 256), (256, 1203)),
        (random_costs_case(483), (64, 483)),
        (sites_case(0, 1.0), (24, 123)),
    ):
        assert (len(problem.devices), len(problem.layers)) == size
    assert all(d.memory_bytes is None for d in paper_case("f1").devices)
    assert all(d.memory_bytes < 1.25e9 for d in paper_case("f2c").devices)


@pytest.mark.parametrize("mean_stage", [1.0, 0.1])
def test_a_boundary_between_sites_takes_half_the_mean_stage(mean_stage):
    problem = sites_case(0, mean_stage)
    speed = sum(d.flops_per_s for d in problem.devices)
    assert sum(x.flops for x in problem.layers) / speed == pytest.approx(mean_stage)
    far = next(x for x in problem.links if x.source[:2] != x.target[:2])
    assert problem.layers[0].output_bytes / far.bandwidth_bytes_per_s == pytest.approx(mean_stage / 2)
    assert crossings(["s0n0/cuda:0", "s0n1/cuda:0", "s2n0/cuda:0", "s1n0/cuda:0"]) == 2


def test_memory_never_binds_in_the_quality_suites():
    for suite in QUALITY:
        problem = quality_case(suite, 0, "iteration", linked=True)
        need = sum(x.state_bytes for x in problem.layers)
        assert all(d.memory_bytes >= need for d in problem.devices)
        assert len(problem.links) == suite.devices * (suite.devices - 1)


def test_an_exactness_table():
    (table,) = exactness(6, 20.0)
    record = json.loads(table.line())
    assert record["equal"] == record["instances"] == 6
    assert record["wrong"] == []
    assert "20000–20005" in table.text


def test_a_wrong_optimum_is_seen(monkeypatch):
    from tables import exactness as module

    monkeypatch.setattr(module, "_planned", lambda problem, limit_s: ("optimal", 1.0))
    (table,) = exactness(3, 20.0)
    assert table.record["equal"] == 0
    assert [entry["i"] for entry in table.record["wrong"]] == [0, 1, 2]


def test_a_quality_table_names_every_method():
    problems = [quality_case(QUALITY[0], i, "bottleneck") for i in range(2)]
    table = quality._suite("quality", QUALITY[0], problems, 5.0)
    assert table.record["proved"] == 2
    assert table.record["methods"]["optimal"]["worst"] == pytest.approx(1.0)
    for method in quality.METHODS:
        assert table.record["methods"][method]["mean"] >= 1 - 1e-9
        assert f"| {method} |" in table.text


def test_what_is_not_proved_is_marked(monkeypatch):
    problem = quality_case(QUALITY[0], 0, "bottleneck")
    result = quality._result(problem, 5.0)
    short = {**result, "proved": False, "bound_s": result["bound_s"] / 2}
    monkeypatch.setattr(quality, "_result", lambda problem, limit_s: short)
    table = quality._suite("quality", QUALITY[0], [problem], 5.0)
    assert "0 proved optimal" in table.text
    assert "optimum or bound" in table.text
    assert "gap 1e+02%" in table.text
    monkeypatch.setattr(quality, "_result", lambda problem, limit_s: {**short, "bound_s": None})
    table = quality._suite("quality", QUALITY[0], [problem], 5.0)
    assert "1 without a bound" in table.text
    assert table.record["methods"]["even"]["mean"] is None
    json.loads(table.line(), parse_constant=pytest.fail)


def test_a_timing_row(monkeypatch):
    small = timing.Case("4 × 24", lambda: quality_case(QUALITY[0], 0, "bottleneck"), 5.0, "proved", True)
    monkeypatch.setitem(timing.CASES, "small", small)
    row = timing.measured("small")
    assert row["status"] == "optimal"
    assert row["verified"] == "holds"
    assert 10 < row["plan_peak_rss_mb"] <= row["peak_rss_mb"] < 4000
    assert "| 4 × 24 | `bottleneck` | optimal | 0 |" in timing._text([row])


def test_the_page_is_replaced_between_markers_only():
    text = "a\n<!-- x: generated -->\nold\n<!-- x: end -->\nb\n"
    once = page.replaced(text, "x", "new\n")
    assert once == "a\n<!-- x: generated -->\n\nnew\n\n<!-- x: end -->\nb\n"
    assert page.replaced(once, "x", "new") == once
    with pytest.raises(ValueError, match="no markers"):
        page.replaced(text, "y", "new")


def test_the_document_has_a_place_for_every_section():
    text = page.DOCUMENT.read_text(encoding="utf-8")
    for section in SECTIONS:
        assert page.replaced(text, section, "…") != text
    assert len(re.findall("<!-- .*: generated -->", text)) == len(SECTIONS)


def test_words_for_numbers():
    assert [page.seconds(x) for x in (0.00042, 0.0123, 1.234)] == ["0.42 ms", "12 ms", "1.23 s"]
    assert [page.percent(x) for x in (None, 0.0, 0.00021, 0.048)] == ["—", "0", "0.021%", "4.8%"]
