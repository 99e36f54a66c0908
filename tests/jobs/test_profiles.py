"""Whether a profile fits the cluster and what is asked for; what is said where it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.learning.profiles import ask, device, nodes, profile

from skyctl.errors import InputError
from skyctl.files import save_profile
from skyctl.jobs.profiles import find_profile, lacks_links, profile_misfit, unmeasured_nodes
from skyctl.jobs.training_request import TrainingRequest
from skyctl.records.base import timestamp
from skyctl.records.cluster import Cluster
from skyctl.records.profile import (
    LinkProfile,
    NodeFailure,
)
from skyctl.workload.workload_spec import make_spec


def test_a_profile_fits_only_the_cluster_that_it_was_measured_on() -> None:
    request, digest = ask(4)
    measured = profile(device("a", 1.0), device("b", 2.0))
    assert profile_misfit(measured, request, digest, nodes("a", "b")) is None
    assert profile_misfit(measured, request, digest, nodes("a")) is None
    assert profile_misfit(measured, request, digest, nodes("a", "b", "c")) == "node c is not in it"
    failed = measured.model_copy(update={"failures": (NodeFailure(node="c", error="no torch"),)})
    assert profile_misfit(failed, request, digest, nodes("a", "b", "c")) is None
    assert unmeasured_nodes(failed, nodes("a", "b", "c")) == ["c"]


def test_a_profile_dated_ahead_of_the_clock_is_passed_over() -> None:
    """The clock was wrong when it was measured, or is now: both times are named."""
    request, digest = ask(4)
    cluster = Cluster(name="here", nodes=nodes("a", "b"), groups={})
    ahead = profile(device("a", 1.0), device("b", 2.0)).model_copy(
        update={"cluster": "here", "created": "2996-01-01T00:00:00+00:00"}
    )
    path = save_profile(ahead)
    with pytest.raises(
        InputError, match=r"it is dated 2996-01-01T.*, and this machine's clock says 2"
    ) as refused:
        find_profile(cluster, None, request, digest)
    assert str(refused.value.hint).startswith("measure it: skyctl probe gpt:layers=3")
    assert find_profile(cluster, str(path), request, digest)[0] == ahead
    save_profile(ahead.model_copy(update={"created": timestamp()}))
    assert find_profile(cluster, None, request, digest)[0].created != ahead.created


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"slowdown": 2.0}, "slowdown 1, now 2"),
        ({"threads": 2}, "1 threads, now 2"),
        ({"memory_gib": 0.1}, "now memory_gib is 0.1"),
        ({"devices": ("cuda:0",)}, "measured on a/cpu:0"),
    ],
)
def test_a_node_that_has_changed_must_be_measured_again(changed: dict[str, Any], words: str) -> None:
    request, digest = ask(4)
    assert words in str(profile_misfit(profile(device("a", 1.0)), request, digest, nodes("a", **changed)))


def test_what_is_typed_to_ask_for_it_again(tmp_path: Path) -> None:
    assert ask()[0].words() == ["gpt:layers=3", "--batch-size", "8"]
    (tmp_path / "book.txt").write_text("text")
    spec = make_spec("gpt:layers=3", dtype="bfloat16", seed=3, data_path=str(tmp_path / "book.txt"))
    data = ["--data", str((tmp_path / "book.txt").resolve())]
    flags = ["--microbatches", "4", "--dtype", "bfloat16", "--seed", "3", *data]
    assert TrainingRequest(spec, 4).words() == ["gpt:layers=3", *flags]
    assert TrainingRequest(make_spec("gpt:layers=3", random_inputs=True)).words()[1:] == ["--random-inputs"]


def test_what_was_measured_is_said_where_it_does_not_fit() -> None:
    measured = profile(device("a", 1.0))
    request, digest = ask(2)
    assert "at 4 microbatches, not at 2" in str(profile_misfit(measured, request, digest, nodes("a")))
    assert profile_misfit(measured, ask(4)[0], "other", nodes("a")) == "it holds gpt:…"


def test_a_profile_of_several_nodes_without_links_says_so() -> None:
    link = LinkProfile(source="a", target="b", latency_s=0.0, bandwidth_bytes_per_s=1e7)
    assert lacks_links(profile(device("a", 1.0), device("b", 1.0)))
    assert not lacks_links(profile(device("a", 1.0), device("b", 1.0), links=(link,)))
    assert not lacks_links(profile(device("a", 1.0)))
