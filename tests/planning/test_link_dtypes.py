"""--link-dtype: which links it means, and what the planner then counts."""

from __future__ import annotations

import pytest

from skyctl import Plan, Problem, plan, predict, verify
from skyctl.errors import InputError
from skyctl.planning.link_dtypes import encoded_links, parse_link_dtype, with_link_dtypes
from skyctl.planning.plan_options import PlanOptions
from skyctl.planning.problem_overrides import override_problem
from skyctl.records.problem import Device, Layer, Link, SharedResource


def problem(*names: str, fast: str = "", shared: tuple[SharedResource, ...] = ()) -> Problem:
    """Two layers a device; every pair is linked with 100 Mbit/s, those of ``fast`` with 1 Gbit/s."""
    layer = Layer(name="l", flops=3e9, state_bytes=1.0, activation_bytes=1.0, output_bytes=1e6)
    return Problem(
        layers=(layer,) * 2 * len(names),
        devices=tuple(Device(id=name, flops_per_s=1e11, memory_bytes=None) for name in names),
        links=tuple(
            Link(
                source=a,
                target=b,
                latency_s=0.001,
                bandwidth_bytes_per_s=125e6 if fast and a.startswith(fast) else 12.5e6,
            )
            for a in names
            for b in names
            if a != b
        ),
        shared=shared,
        microbatches=4,
    )


def dtypes(given: Problem, *choices: str, activations: str = "float32") -> dict[tuple[str, str], str | None]:
    changed = with_link_dtypes(given, [parse_link_dtype(text) for text in choices], activations)
    return {(link.source, link.target): link.dtype for link in changed.links}


def test_all_slow_ones_and_pairs_and_the_last_one_counts() -> None:
    three = problem("a/cpu:0", "b-1/cpu:0", "c/cpu:0", fast="a")
    assert set(dtypes(three, "int8").values()) == {"int8"}
    slow = dtypes(three, "bfloat16@slow")
    assert {source for (source, _), dtype in slow.items() if dtype is None} == {"a/cpu:0"}
    pair = dtypes(three, "bfloat16", "int8@b-1-c")
    assert pair["b-1/cpu:0", "c/cpu:0"] == pair["c/cpu:0", "b-1/cpu:0"] == "int8"
    assert pair["a/cpu:0", "c/cpu:0"] == "bfloat16"
    back = dtypes(three, "int8@c/cpu:0-b-1", "float32")
    assert set(back.values()) == {None}
    assert with_link_dtypes(three, [], "float32") is three


def test_what_sends_no_less_leaves_the_link_as_it_is() -> None:
    two = problem("a/cpu:0", "b/cpu:0")
    assert set(dtypes(two, "bfloat16", activations="bfloat16").values()) == {None}
    changed = with_link_dtypes(two, [parse_link_dtype("float32")], "float32")
    assert changed == two
    half = with_link_dtypes(two, [parse_link_dtype("int8")], "bfloat16")
    assert half.links[0].sent_share == (1 + 4 / 128) / 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fp8", "'fp8' is not one of float32, bfloat16, int8"),
        ("int8@", "'' is neither 'slow' nor a pair of nodes"),
        ("int8@a", "'a' is neither 'slow' nor a pair of nodes"),
        ("int8@a-z", "@a-z: there is no node 'z'; there is a, b, b-c, c"),
        ("int8@a-b-c", "can be read as a and b-c or a-b and c"),
        ("int8@a-a", "no link is known between these two"),
    ],
)
def test_what_can_not_be_meant_is_refused(text: str, message: str) -> None:
    four = problem("a/cpu:0", "b/cpu:0", "b-c/cpu:0", "c/cpu:0", *(("a-b/cpu:0",) if "b-c" in text else ()))
    with pytest.raises(InputError, match=message) as caught:
        with_link_dtypes(four, [parse_link_dtype(text)], "float32")
    assert caught.value.exit_code == 2


def test_names_are_checked_before_anything_is_probed() -> None:
    assert parse_link_dtype("int8@tower-lap-top", ["tower", "lap-top"]).where == "tower-lap-top"
    assert parse_link_dtype("int8@tower/cuda:1-lap-top", ["tower", "lap-top"]).dtype == "int8"
    with pytest.raises(InputError, match="there is no node 'laptop'; there is lap-top, tower"):
        parse_link_dtype("int8@tower-laptop", ["tower", "lap-top"])


def test_the_planner_weighs_what_is_sent() -> None:
    uplink = SharedResource(
        name="up", bandwidth_bytes_per_s=2.5e6, links=(("a/cpu:0", "b/cpu:0"), ("b/cpu:0", "a/cpu:0"))
    )
    given = problem("a/cpu:0", "b/cpu:0", shared=(uplink,)).model_copy(
        update={"first_stage": ("a/cpu:0",), "last_stage": ("b/cpu:0",)}
    )
    before = plan(given, "optimal")
    small = with_link_dtypes(given, [parse_link_dtype("int8")], "float32")
    after = plan(small, "optimal")
    # as if the layers gave that much less
    share = small.links[0].sent_share
    less = tuple(layer.model_copy(update={"output_bytes": share * 1e6}) for layer in given.layers)
    assert after.predicted.iteration_s == pytest.approx(
        plan(given.model_copy(update={"layers": less}), "optimal").predicted.iteration_s, rel=1e-12
    )
    assert after.predicted.iteration_s < before.predicted.iteration_s / 2
    assert predict(small, after).iteration_s == after.predicted.iteration_s
    assert verify(small, after).ok
    assert [(k.source, k.dtype) for k in encoded_links(after)] == [("a/cpu:0", "int8"), ("b/cpu:0", "int8")]
    assert not encoded_links(before)
    again = Plan.model_validate_json(after.to_json())
    assert again.problem.links == small.links


def test_a_problem_file_takes_the_option_too() -> None:
    given = problem("n1", "n2")
    changed = override_problem(given, PlanOptions(link_dtype=[parse_link_dtype("int8@n1-n2")]))
    assert {link.dtype for link in changed.links} == {"int8"}
    assert override_problem(given, PlanOptions()) == given
