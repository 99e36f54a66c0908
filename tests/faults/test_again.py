"""A second probe: what is known is taken over and said so, and a quick look says whether it still holds."""

from __future__ import annotations

import json


def test_a_second_probe_takes_over_and_a_quick_one_compares(planned) -> None:
    probe = ("probe", "train.py", "--batch-size", "8", "--microbatches", "4")
    first = planned.run(*probe, "--refresh", "--json")
    again = planned.run(*probe, "--json")
    assert (first.returncode, again.returncode) == (0, 0), first.stderr + again.stderr
    assert "--refresh measures them again" not in first.stderr
    assert "layer times of all devices are of" in again.stderr
    assert "links are of" in again.stderr
    had, has = json.loads(first.stdout), json.loads(again.stdout)
    for before, after in zip(had["devices"], has["devices"], strict=True):
        assert before["measured"] == after["measured"] == had["created"]
        assert before["timings"] == after["timings"]
        assert before["fingerprint"] == after["fingerprint"]
    assert [link["bandwidth_bytes_per_s"] for link in had["links"]] == [
        link["bandwidth_bytes_per_s"] for link in has["links"]
    ]
    newest = max((planned.state / "profiles" / "here").glob("*.json"))
    document = json.loads(newest.read_text())
    for node in document["nodes"]:
        node["torch"] = "1.0.0"
    newest.write_text(json.dumps(document))
    done = planned.run("probe", "--quick", "--json")
    assert done.returncode == 5, done.stderr
    found = json.loads(done.stdout)
    assert not found["holds"]
    assert {one["where"] for one in found["differences"] if one["what"] == "torch"} == {
        "fast/cpu:0",
        "slow/cpu:0",
    }
    assert "next: measure it again: skyctl probe train.py" in done.stderr
    assert planned.run("probe", "--quick", "--refresh").returncode == 2
