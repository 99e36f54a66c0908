"""Values that can't be a record are refused in skyctl's words, however it was to be made."""

import json

import pytest
from pydantic import ValidationError

from skyctl import Plan, Problem, SkyctlError, plan, predict, verify
from skyctl.errors import InputError, InvalidRecordError, RecordError
from skyctl.records.base import parse
from skyctl.records.problem import Device, Layer

LAYER = {"name": "a", "flops": 1.0, "state_bytes": 1.0, "activation_bytes": 1.0, "output_bytes": 1.0}
DEVICE = {"id": "n1/cpu:0", "flops_per_s": 1.0, "memory_bytes": None}
GOOD = {"microbatches": 1, "layers": [LAYER], "devices": [DEVICE]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"microbatches": 0}, "microbatches: Input should be greater than or equal to 1 (it is 0)"),
        ({"layers": []}, "layers: must hold at least 1, it is empty"),
        ({"layers": [{**LAYER, "flops": float("nan")}]}, "layers.0.flops: Input should be a finite number"),
        ({"devices": [DEVICE, DEVICE]}, "duplicate device 'n1/cpu:0'"),
        ({"microbatch": 1}, "'microbatch' is not a field; did you mean 'microbatches'?"),
    ],
)
def test_each_way_to_make_a_record_names_the_field(change, words):
    wrong = {**GOOD, **change}
    ways = [lambda: Problem(**wrong), lambda: Problem.model_validate(wrong)]
    if "nan" not in str(change):
        ways.append(lambda: Problem.model_validate_json(json.dumps(wrong)))
    for make in ways:
        with pytest.raises(InvalidRecordError) as caught:
            make()
        assert caught.value.message.startswith("Problem: ")
        assert words in caught.value.message
        assert "microbatches" in caught.value.hint
        assert caught.value.exit_code == 2
        assert isinstance(caught.value.__cause__, ValidationError)
        assert caught.value.errors() == caught.value.__cause__.errors(include_url=False)


def test_parts_of_records_and_programs_that_catch_a_value_error():
    with pytest.raises(ValueError, match=r"Device: flops_per_s: .* \(it is 0\)"):
        Device(id="x", flops_per_s=0, memory_bytes=None)
    with pytest.raises(SkyctlError, match="Layer: name: is missing"):
        Layer()
    with pytest.raises(InvalidRecordError, match="Plan: Input should be a valid dictionary"):
        Plan.model_validate(7)


def test_a_file_is_named_in_the_place_of_the_record():
    text = json.dumps({"kind": "skyctl/problem", "version": 1, **GOOD, "microbatches": 0})
    with pytest.raises(RecordError) as caught:
        parse(Problem, text, "p.json")
    assert (
        caught.value.message == "p.json: microbatches: Input should be greater than or equal to 1 (it is 0)"
    )


def test_a_good_record_is_one():
    assert Problem(**GOOD) == Problem.model_validate(GOOD) == Problem.model_validate(Problem(**GOOD))


def test_a_record_that_is_to_be_changed_says_how_to_make_another():
    problem = Problem(**GOOD)
    for change in (lambda: setattr(problem, "microbatches", 2), lambda: delattr(problem, "microbatches")):
        with pytest.raises(InvalidRecordError, match=r"microbatches: a record can't be changed.*model_copy"):
            change()
    assert problem.microbatches == 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p: plan(GOOD), "plan() takes a Problem, not a dict"),
        (lambda p: plan(p, "fast"), "unknown strategy 'fast'"),
        (lambda p: plan(p, time_limit_s=-1), "time_limit_s must be a number of seconds, 0 or more, not -1"),
        (lambda p: plan(p, time_limit_s="9"), "time_limit_s must be a number of seconds, 0 or more, not '9'"),
        (lambda p: plan(p, time_limit_s=float("nan")), "0 or more, not nan"),
        (
            lambda p: plan(p, assign=[("n1/cpu:0", 0)]),
            "a list of (device, start, stop), not of (",
        ),
        (lambda p: plan(p, assign=[("n1/cpu:0", "0", 1)]), "a list of (device, start, stop)"),
        (lambda p: predict(p, {}), "predict() takes a Plan, not a dict"),
        (lambda p: predict(None, plan(p)), "predict() takes a Problem, not a NoneType"),
        (lambda p: verify(p, "plan.json"), "verify() takes a Plan, not a str"),
    ],
)
def test_what_the_functions_do_not_take_is_bad_input(call, words):
    with pytest.raises(InputError) as caught:
        call(Problem(**GOOD))
    assert words in caught.value.message
