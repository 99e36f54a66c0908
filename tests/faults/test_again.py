"""A second probe: what is known is taken over and said so, and a quick look says whether it still holds."""

from __future__ import annotations

import json

import pytest


def timings(device: dict, *, settled: bool = True) -> dict[str, float]:
    """Forward seconds by layer; of those that a second probe takes over (docs/probing.md), or of all."""
    if settled and device["conditions"]["share"] < 0.9:
        return {}
    rows = [row for row in device["timings"] if not settled or (row.get("interval") or 0.0) <= 0.06]
    return {row["signature"]: row["forward_s"] for row in rows}


@pytest.mark.slow
def test_a_second_probe_takes_over_and_a_quick_one_compares(planned) -> None:
    probe = ("probe", "train.py", "--batch-size", "8", "--microbatches", "4")
    first = planned.run_inside(*probe, "--refresh", "--json", code=None)
    again = planned.run_inside(*probe, "--json", code=None)
    assert (first.returncode, again.returncode) == (0, 0), first.stderr + again.stderr
    assert "--refresh measures them again" not in first.stderr
    assert "links are of" in again.stderr
    had, has = json.loads(first.stdout), json.loads(again.stdout)
    kept = [timings(device) for device in had["devices"]]
    assert "layer times of" in again.stderr or not any(kept)  # they may be an earlier probe's, too
    for known, before, after in zip(kept, had["devices"], has["devices"], strict=True):
        assert before["fingerprint"] == after["fingerprint"]
        assert known.items() <= timings(after, settled=False).items()
        if known:
            assert before["measured"] == after["measured"] == had["created"]
    assert [link["bandwidth_bytes_per_s"] for link in had["links"]] == [
        link["bandwidth_bytes_per_s"] for link in has["links"]
    ]
    newest = max((planned.state / "profiles" / "here").glob("*.json"))
    document = json.loads(newest.read_text())
    for node in document["nodes"]:
        node["torch"] = "1.0.0"
    newest.write_text(json.dumps(document))
    done = planned.run_inside("probe", "--quick", "--json", code=None)
    assert done.returncode == 5, done.stderr
    found = json.loads(done.stdout)
    assert not found["holds"]
    assert {one["where"] for one in found["differences"] if one["what"] == "torch"} == {
        "fast/cpu:0",
        "slow/cpu:0",
    }
    assert "next: measure it again: skyctl probe train.py" in done.stderr
    assert planned.run_inside("probe", "--quick", "--refresh", code=None).returncode == 2
