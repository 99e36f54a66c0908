"""The map of forms: its clusters are as it says, and a point compares all forms."""

from __future__ import annotations

import form_map
import pytest


def test_sites_share_their_way_to_each_other() -> None:
    problem = form_map.problem_of(2, 5, 2**13)
    assert len(problem.links) == 20
    there = {one.name: set(one.links) for one in problem.shared}
    assert there["site 0 to site 1"] == {(f"n{a}", f"n{b}") for a in (0, 2, 4) for b in (1, 3)}
    between = next(link for link in problem.links if (link.source, link.target) == ("n0", "n1"))
    assert (between.latency_s, between.bandwidth_bytes_per_s) == (0.0335, pytest.approx(0.79 * 1.25e8))


def test_more_sites_than_regions() -> None:
    problem = form_map.problem_of(9, 9, 2**13)
    again = next(link for link in problem.links if (link.source, link.target) == ("n0", "n8"))
    assert (again.latency_s, again.bandwidth_bytes_per_s) == (0.0055, pytest.approx(1.12 * 1.25e8))


def test_a_point_has_every_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form_map, "LIMIT_S", 0.2)
    found = form_map.point(2, 4, 2**15)
    assert set(found["forms"]) == set(form_map.FORMS)
    assert found["best"] in form_map.FORMS
    assert found["ahead"] >= 1.0
