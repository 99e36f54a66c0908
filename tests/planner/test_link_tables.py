"""Tables of links say what a problem's entries say, one by one."""

from skyctl.planner.cost_model import CostModel
from skyctl.planner.sum_costs import SumCosts
from skyctl.planner.verification.proofs.hybrid_prices import _LineTables
from skyctl.planner.verification.route_bound import Wires
from skyctl.planner.verification.step import CheckedStep
from skyctl.records.problem import Device, Layer, Link, Problem, SharedResource

IDS = ("a", "b", "c", "d")
PROBLEM = Problem(
    layers=(
        Layer(
            name="l", flops=1.0, state_bytes=8.0, activation_bytes=4.0, output_bytes=4.0, gradient_bytes=8.0
        ),
    ),
    devices=tuple(Device(id=name, flops_per_s=1.0, memory_bytes=None) for name in IDS),
    links=(
        Link(source="a", target="b", latency_s=0.5, bandwidth_bytes_per_s=10.0, sent_share=0.5),
        Link(source="b", target="a", latency_s=0.25, bandwidth_bytes_per_s=20.0),
        Link(source="a", target="c", latency_s=0.0, bandwidth_bytes_per_s=4.0),
    ),
    shared=(
        SharedResource(name="up", bandwidth_bytes_per_s=5.0, links=(("a", "b"), ("a", "c"), ("a", "d"))),
        SharedResource(name="none", bandwidth_bytes_per_s=1.0, links=()),
        SharedResource(name="bus", bandwidth_bytes_per_s=2.0, links=(("a", "c"), ("a", "c"), ("c", "d"))),
    ),
    microbatches=2,
    parallel="data",
)
A, B, C, D = range(4)


def test_messages_cost_what_the_links_say():
    model = CostModel(PROBLEM)
    assert model.link_cost(A, B) == (0.5, 0.05, ((0, 0.1),)), "half of its bytes are sent"
    assert model.link_cost(B, A) == (0.25, 0.05, ())
    assert model.link_cost(A, C) == (0.0, 0.25, ((0, 0.2), (2, 0.5)))
    assert model.link_cost(A, D) == (0.0, 0.0, ((0, 0.2),)), "no link, and its resource counts all the same"
    assert model.link_cost(D, B) == (0.0, 0.0, ())
    assert model.link_cost(A, C).slowest_s_per_byte == 0.5


def test_sums_send_every_byte():
    costs = SumCosts(PROBLEM)
    assert (costs.byte_s[A, B], costs.byte_s[B, A], costs.byte_s[D, A]) == (0.1, 0.05, 0.0)
    assert (costs.latency_s[A, B], costs.latency_s[C, A]) == (0.5, 0.0)
    assert costs.line_byte_s(A, B) == 0.2
    assert costs.line_byte_s(A, C) == 0.5
    assert list(costs.shared[A, C]) == [(0, 0.2), (2, 0.5)]
    assert list(costs.shared[B, C]) == []
    assert costs.slots.slots == 2


def test_verify_reads_links_by_itself():
    """Of three lines two share one: a byte over all is as fast as the third and what these share."""
    wires = Wires(PROBLEM)
    assert wires.least_s([("a", "b"), ("a", "d"), ("b", "a")]) == 1 / (5.0 + 20.0)
    assert wires.least_s([("a", "b"), ("b", "a")]) == 1 / (5.0 + 20.0)
    assert wires.least_s([("b", "a")]) == 1 / 20.0
    hop = CheckedStep(PROBLEM).hop(A, B, 10.0)
    assert (hop.link_s, hop.latency_s, hop.shared) == (0.5, 0.5, ((0, 1.0),)), "half of its bytes are sent"


def test_prices_of_layers_are_checked_by_lines_that_share():
    """From a to b 10 bytes a second, 5 of them over what is shared; from a to c 20."""
    problem = PROBLEM.model_copy(
        update={
            "devices": PROBLEM.devices[:3],
            "links": (
                Link(source="a", target="b", latency_s=0.0, bandwidth_bytes_per_s=10.0),
                Link(source="a", target="c", latency_s=0.0, bandwidth_bytes_per_s=20.0),
            ),
            "shared": (SharedResource(name="up", bandwidth_bytes_per_s=5.0, links=(("a", "b"),)),),
        }
    )
    step = CheckedStep(problem)
    assert _LineTables(step).byte_s(A, True, 3).tolist() == [1 / 20, 1 / 25, 1 / 25]
