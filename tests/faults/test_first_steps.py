"""A device that computes slower in a run than its profile says: said, and kept, while the run trains."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from ..helpers.processes import left_of_state

if TYPE_CHECKING:
    from .conftest import Here

SIZES = ("--batch-size", "8", "--microbatches", "4")


@pytest.mark.slow
def test_a_device_with_a_tenth_of_its_times_in_the_profile_is_named_after_ten_steps(here: Here) -> None:
    here.run_inside("probe", "train.py", *SIZES, code=0)
    (path,) = (here.state / "profiles").rglob("*.json")
    profile = json.loads(path.read_text())
    for one in profile["devices"]:  # whatever else ran while it was measured: the interval is to be narrow
        one["conditions"] = None
        one["timings"] = [timing | {"interval": 0.0, "spread": 0.0} for timing in one["timings"]]
    (device,) = [one for one in profile["devices"] if one["id"] == "fast/cpu:0"]
    for timing in device["timings"]:
        for name in ("forward_s", "backward_s", "optimizer_s"):
            timing[name] = timing[name] / 10
    path.write_text(json.dumps(profile))
    # It has all layers that sleep: neither messages nor the other device can deviate by more.
    here.run_inside("plan", "train.py", *SIZES, "--assign", "fast=0:6,slow=6:7", "-o", "plan.json")

    def kept() -> list[tuple[str, str | None, int]]:
        seen = json.loads(path.read_text())["observations"]
        return [(one["device"], one["target"], one["steps"]) for one in seen]

    def compared(state: dict[str, Any]) -> Any:
        return state["attempts"] and state["attempts"][-1]["first_steps"]

    run = here.launch("plan.json", "--steps", "100000", "--checkpoint-every", "0")  # else it plans anew
    first: dict[str, Any] = run.until(lambda: compared(run.state))
    part = first["part"]
    assert (part["kind"], part["device"], part["kept"]) == ("computing", "fast/cpu:0", True)
    assert part["seen_s"] > 2.0 * part["predicted_s"]
    assert first["measured_s"] > first["interval"]["high_s"]
    assert kept() == [("fast/cpu:0", None, first["steps"])]
    here.run_inside("stop", run.id, "--now", code=0)
    run.end(130)
    assert left_of_state(here.state) == []
    (said,) = [one for one in run.told().splitlines() if "note: steps take" in one]
    assert "computing on fast/cpu:0 takes" in said
    assert run.child.text.count("steps take") == 1
