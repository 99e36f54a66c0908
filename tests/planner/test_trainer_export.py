"""Exports read back by readers of their own: torchtitan's module split, Megatron-core's layout grammar."""

from __future__ import annotations

import json
import random
import tomllib
from itertools import pairwise

import pytest

from skyctl.errors import InfeasibleError, InputError
from skyctl.planner.api import assigned, plan, verify
from skyctl.planner.trainer_export import export_plan
from skyctl.planner.transformer_blocks import model_parts, plan_whole_blocks
from skyctl.records.plan import WorkloadRef
from skyctl.records.problem import Device, Layer, LayerTimes, Problem, Tie


def names(blocks, fine=True):
    inner = [[f"block.{i}.attention", f"block.{i}.mlp"] if fine else [f"layers.{i}"] for i in range(blocks)]
    return ["embedding", *(name for block in inner for name in block), "head"]


def problem(layer_names, speeds=(1.0, 2.0, 3.0), seed=0, memory=None, **more):
    r = random.Random(seed)
    return Problem(
        layers=tuple(
            Layer(
                name=name,
                flops=r.uniform(1, 3),
                state_bytes=r.uniform(1, 5),
                activation_bytes=r.uniform(0, 1),
                output_bytes=r.uniform(0, 1),
                workspace_bytes=r.uniform(0, 2),
            )
            for name in layer_names
        ),
        devices=tuple(
            Device(id=f"n{i}/cpu:0", flops_per_s=s, memory_bytes=memory) for i, s in enumerate(speeds)
        ),
        **{"microbatches": 4, **more},
    )


def cut(p, *cuts):
    """The problem's devices in order, cut there."""
    edges = [0, *cuts, len(p.layers)]
    return assigned(p, [(p.devices[i].id, a, b) for i, (a, b) in enumerate(pairwise(edges))])


def layout_stages(text):
    """Megatron-core's grammar, by recursive descent: a list of stages, each a list of E, t, m, L."""
    at = 0

    def peek():
        return text[at] if at < len(text) else ""

    def take():
        nonlocal at
        at += 1
        return text[at - 1]

    def times():
        if peek() != "*":
            return 1
        take()
        digits = ""
        while peek().isdigit():
            digits += take()
        return int(digits)

    def sequence(stop):
        out = []
        while peek() and peek() != stop:
            symbol = take()
            if symbol == ",":
                continue
            if symbol == "(":
                inner = sequence(")")
                assert take() == ")"
            else:
                assert symbol in "EtmL|"
                inner = [symbol]
            out += inner * times()
        return out

    stages = [[]]
    for symbol in sequence(""):
        if symbol == "|":
            stages.append([])
        else:
            stages[-1].append(symbol)
    return stages


def test_the_tests_own_reader():
    """The example of Megatron-core's documentation."""
    stages = layout_stages("Et*3|(tt|)*29,m|L")
    assert stages == [list("Ettt"), *[["t", "t"]] * 29, ["m"], ["L"]]
    assert layout_stages("E||t|L") == [["E"], [], ["t"], ["L"]]


@pytest.mark.parametrize("fine", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_megatron_gives_each_stage_its_blocks(seed, fine):
    r = random.Random(seed)
    p = problem(names(8, fine), speeds=[1.0] * 4, seed=seed)
    size = 2 if fine else 1
    blocks = sorted(r.sample(range(9), 3))
    exported = export_plan(cut(p, *(1 + size * b for b in blocks)), "megatron")
    edges = [0, *blocks, 8]
    expected = [["t"] * (b - a) for a, b in pairwise(edges)]
    expected[0].insert(0, "E")
    expected[-1].append("L")
    assert layout_stages(exported.value) == expected
    assert exported.text == exported.value
    assert exported.devices == tuple(d.id for d in p.devices)
    assert "--num-layers 8 --pipeline-model-parallel-size 4" in exported.notes[0]


def kept(fqns, children):
    """A model's parts that torchtitan keeps for one stage: children, and members of ``layers``, by name."""
    return [
        child if child != "layers" else f"layers.{i}"
        for child, count in children.items()
        for i in range(count)
        if (child if child != "layers" else f"layers.{i}") in set(fqns)
    ]


@pytest.mark.parametrize("seed", range(10))
def test_torchtitan_keeps_every_module_once_and_in_order(seed):
    r = random.Random(seed)
    p = problem(names(6), speeds=[1.0] * 3, seed=seed)
    blocks = sorted(r.sample(range(7), 2))
    exported = export_plan(cut(p, *(1 + 2 * b for b in blocks)), "torchtitan")
    children = {"tok_embeddings": 1, "layers": 6, "norm": 1, "output": 1}
    whole = ["tok_embeddings", *(f"layers.{i}" for i in range(6)), "norm", "output"]
    assert [name for stage in exported.value for name in kept(stage, children)] == whole
    assert [sum(name.startswith("layers.") for name in stage) for stage in exported.value] == [
        b - a for a, b in zip([0, *blocks], [*blocks, 6], strict=True)
    ]
    assert json.loads(exported.text) == exported.value
    assert (
        tomllib.loads(f"module_fqns_per_model_part = {exported.text}")["module_fqns_per_model_part"]
        == exported.value
    )


def test_a_norm_of_its_own():
    p = problem(["embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"], speeds=[1, 1])
    assert export_plan(cut(p, 3), "torchtitan").value == [
        ["tok_embeddings", "layers.0", "layers.1"],
        ["norm", "output"],
    ]
    assert export_plan(cut(p, 4), "torchtitan").value[1] == ["output"]
    assert export_plan(cut(p, 3), "megatron").value == "Et*2|L"
    with pytest.raises(InputError, match=r"stage 0 ends inside the head, after 'model.norm'"):
        export_plan(cut(p, 4), "megatron")


@pytest.mark.parametrize("trainer", ["torchtitan", "megatron"])
def test_a_cut_inside_a_block_is_refused_by_name(trainer):
    p = problem(names(3))
    with pytest.raises(InputError, match=r"stage 0 ends inside block 0, after 'block.0.attention'") as raised:
        export_plan(cut(p, 2, 5), trainer)
    assert "stage 1" not in str(raised.value)
    assert "--whole-blocks" in str(raised.value)


@pytest.mark.parametrize(
    ("layer_names", "words"),
    [
        (["0.Linear", "1.Linear"], r"layer 0 \('0.Linear'\)"),
        (["embedding", "block.0", "block.2", "head"], r"layer 2 \('block.2'\) follows"),
        (["embedding", "block.1", "head"], r"layer 1 \('block.1'\) follows"),
        (["embedding", "head", "block.0"], r"layer 2 \('block.0'\) follows"),
        (["block.0", "block.1", "head"], "embedding"),
        (["embedding", "block.0"], "head"),
        (["embedding", "head"], "block"),
    ],
)
def test_names_that_do_not_say_it(layer_names, words):
    with pytest.raises(InputError, match=words):
        model_parts(problem(layer_names))


def test_unknown_trainer_and_what_else_to_set():
    p = problem(names(3), speeds=[1.0], schedule="gpipe")
    planned = cut(p)
    with pytest.raises(InputError, match="'nemo' is not one of torchtitan, megatron"):
        export_plan(planned, "nemo")
    assert 'pipeline_parallel_schedule = "GPipe"' in " ".join(export_plan(planned, "torchtitan").notes)
    assert any("runs 1F1B" in note for note in export_plan(planned, "megatron").notes)
    assert any(
        "micro-batch-size is --global-batch-size / 4" in n for n in export_plan(planned, "megatron").notes
    )
    work = WorkloadRef(source="gpt", digest="x", batch_size=32, dtype="float32", seed=0)
    notes = export_plan(planned.model_copy(update={"workload": work}), "megatron").notes
    assert any("--global-batch-size 32, --micro-batch-size 8" in note for note in notes)
    work = work.model_copy(update={"batch_size": 30})
    notes = export_plan(planned.model_copy(update={"workload": work}), "megatron").notes
    assert any("30 samples do not divide by 4" in note for note in notes)


@pytest.mark.parametrize("objective", ["iteration", "bottleneck"])
@pytest.mark.parametrize("seed", range(8))
def test_whole_blocks_are_the_best_such_plan(seed, objective):
    """Against every cut between blocks and every order, on the problem as it is."""
    p = problem(
        names(3), speeds=[1.0, 2.0], seed=seed, memory=40.0, objective=objective, receive_window=seed % 2
    )
    times = LayerTimes(
        forward_s=tuple(0.1 * i for i in range(8)), backward_s=(0.5,) * 8, optimizer_s=(0.1,) * 8
    )
    p = p.model_copy(update={"times": {"n0/cpu:0": times}})
    planned = plan_whole_blocks(p, plan)
    best = []
    for order in ([0], [1], [0, 1], [1, 0]):
        for at in (1, 3, 5, 7):
            edges = [0, *([at] if len(order) > 1 else []), 8]
            ranges = [(p.devices[d].id, a, b) for d, a, b in zip(order, edges, edges[1:], strict=False)]
            try:
                best.append(assigned(p, ranges).certificate.value_s)
            except InfeasibleError:
                continue
    assert planned.certificate.value_s == pytest.approx(min(best), rel=1e-12)
    assert planned.certificate.status == "feasible"
    assert "whole blocks only; among such plans optimal" in planned.certificate.method
    assert planned.problem == p
    assert verify(p, planned).ok
    export_plan(planned, "megatron")
    export_plan(planned, "torchtitan")


def test_a_part_takes_the_seconds_of_its_layers_under_zero_bubble():
    """There a backward is cut in two, which takes longer than in one piece."""
    p = problem(names(3), speeds=[1.0, 2.0], memory=40.0, schedule="zero-bubble")
    times = LayerTimes(
        forward_s=(0.3,) * 8,
        backward_s=(0.5,) * 8,
        optimizer_s=(0.1,) * 8,
        weight_s=(0.3,) * 8,
        split_s=tuple(0.8 + 0.1 * i for i in range(8)),
    )
    p = p.model_copy(update={"times": {"n0/cpu:0": times, "n1/cpu:0": times}})
    plans = []

    def planned(coarse):
        plans.append(plan(coarse))
        return plans[0]

    the_plan = plan_whole_blocks(p, planned)
    assert plans[0].predicted.iteration_s == pytest.approx(the_plan.predicted.iteration_s, rel=1e-12)
    assert verify(p, the_plan).ok


@pytest.mark.parametrize(("layers", "among"), [((6, 7), (3, 4)), ((1, 2), None), ((0, 2, 7), (0, 1, 4))])
def test_layers_that_share_parameters_are_known_as_parts(layers, among):
    """A tie is of the parts that its layers are in; of one part it is none."""
    p = problem(names(3), speeds=[1.0, 2.0], memory=40.0, ties=(Tie(layers=layers, bytes=2.0),))
    asked = []

    def planned(coarse):
        asked.append(coarse)
        return plan(coarse)

    the_plan = plan_whole_blocks(p, planned)
    assert [tie.layers for tie in asked[0].ties] == ([] if among is None else [among])
    assert the_plan.problem == p
    assert verify(p, the_plan).ok
