"""Values of tensors nested in tuples and dicts: checked, taken apart, put together, and what is refused."""

from __future__ import annotations

import json
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest
import torch

from skyctl.errors import WorkloadError
from skyctl.workload.data import BatchExample
from skyctl.workload.structures import (
    MOST_DEPTH,
    StructureMismatchError,
    check_value,
    copy_containers,
    flatten_as,
    flatten_value,
    read_structure,
    tensor_places,
    unflatten_value,
)
from skyctl.workload.workload import Workload, load_workload

A, B, C = torch.zeros(2, 3), torch.ones(2), torch.arange(2)
Pair = namedtuple("Pair", "left right")


@dataclass
class Record:
    image: torch.Tensor


@pytest.mark.parametrize(
    ("value", "plain", "structure"),
    [
        (A, A, None),
        ([A, B], (A, B), {"tuple": [None, None]}),
        (Pair(A, [B]), (A, (B,)), {"tuple": [None, {"tuple": [None]}]}),
        (UserDict(x=A, y=OrderedDict(z=(B, C))), {"x": A, "y": {"z": (B, C)}}, None),
        ({"b": A, "a": {}, "c": B}, {"b": A, "a": {}, "c": B}, None),
        (
            [A, None, {"x": None}],
            (A, None, {"x": None}),
            {"tuple": [None, {"none": []}, {"dict": {"x": {"none": []}}}]},
        ),
    ],
)
def test_there_and_back(value: Any, plain: Any, structure: Any) -> None:
    checked = check_value(value, "inputs", "data()")
    tensors, built = flatten_value(checked)
    if structure is not None or isinstance(value, torch.Tensor):
        assert built == structure
    document = json.loads(json.dumps({"structure": built}))
    again = unflatten_value(tensors, read_structure(document, "structure", len(tensors)))
    assert _same(again, plain)
    assert len(tensor_places(built, "inputs")) == len(tensors)


def _same(value: Any, other: Any) -> bool:
    """The very tensors, in the same plain tuples and dicts, keys in the same order."""
    if isinstance(value, dict):
        return (
            type(other) is dict
            and list(value) == list(other)
            and all(_same(value[k], other[k]) for k in value)
        )
    if isinstance(value, tuple):
        return type(other) is tuple and len(value) == len(other) and all(map(_same, value, other))
    return value is other


def test_a_dict_is_taken_apart_by_key() -> None:
    structure = flatten_value({"image": A, "more": (B, C)})[1]
    tensors = flatten_as({"more": (B, C), "image": A}, structure, "inputs")
    assert [id(t) for t in tensors] == [id(A), id(B), id(C)]
    assert list(unflatten_value(tensors, structure)) == ["image", "more"]
    assert tensor_places(structure, "inputs") == ['inputs["image"]', 'inputs["more"][0]', 'inputs["more"][1]']


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"more": (B, C)}, 'inputs comes without the key "image", not with it'),
        ({"image": A, "more": (B, C), "x": A}, 'inputs comes with the key "x", not without it'),
        ({"image": A, "more": B}, 'inputs["more"] comes as a tensor, not as a tuple'),
        ({"image": A, "more": (B,)}, 'inputs["more"] comes with 1 parts, not with 2'),
        (A, "inputs comes as a tensor, not as a dict"),
        ({"image": A, "more": None}, 'inputs["more"] comes as None, not as a tuple'),
    ],
)
def test_what_is_built_otherwise_is_named(value: Any, words: str) -> None:
    with pytest.raises(StructureMismatchError) as error:
        flatten_as(value, flatten_value({"image": A, "more": (B, C)})[1], "inputs")
    assert str(error.value) == words


def test_dicts_are_its_own() -> None:
    inner = {"x": A}
    copied = copy_containers({"inner": inner, "y": B})
    assert isinstance(copied, dict)
    copied.pop("y")
    copied["inner"].pop("x")
    assert inner == {"x": A}


@pytest.mark.parametrize("tensors", [(A,), (A, B, C)])
def test_as_many_tensors_as_the_structure_has(tensors: tuple[torch.Tensor, ...]) -> None:
    with pytest.raises(ValueError, match="tensors are too"):
        unflatten_value(tensors, {"dict": {"x": None, "y": None}})


def _endless() -> list[Any]:
    endless: list[Any] = [A]
    endless.append(endless)
    return endless


@pytest.mark.parametrize(
    ("value", "words", "hint"),
    [
        ({"meta": {"name": "cat"}}, 'inputs["meta"]["name"] is of type str', "leave it out"),
        (None, "inputs is of type NoneType", "leave it out"),
        ([None], "inputs is an empty list", ""),
        (3.5, "inputs is of type float", "numbers of samples go into a tensor"),
        ([A, Record(A)], "inputs[1] is of type Record", "vars("),
        ({"x": {3: A}}, 'inputs["x"] has the key 3, a int', "str(key)"),
        ((), "inputs is an empty tuple", ""),
        ({"x": []}, "inputs is an empty dict", ""),
        (_endless(), f"nested more than {MOST_DEPTH} deep", ""),
    ],
)
def test_what_is_no_tensor_is_named_with_the_way_out(value: Any, words: str, hint: str) -> None:
    with pytest.raises(WorkloadError) as error:
        check_value(value, "inputs", "train.py: data()")
    assert str(error.value).startswith("train.py: data(): inputs")
    assert words in error.value.message
    assert hint in (error.value.hint or "")


def _deep(depth: int) -> Any:
    return None if not depth else {"tuple": [_deep(depth - 1)]}


@pytest.mark.parametrize(
    "structure",
    [
        3, "tuple", [None], {}, {"tuple": None}, {"tuple": {"x": None}}, {"dict": [None]}, {"set": [None]},
        {"none": [None]}, {"none": {}},
        {"tuple": [None], "dict": {}}, {"tuple": [None, None]}, {"dict": {}}, {"dict": {3: None}},
        _deep(MOST_DEPTH + 1), _deep(500),
    ],
)  # fmt: skip
def test_a_structure_from_elsewhere_is_checked(structure: Any) -> None:
    with pytest.raises(WorkloadError, match="a workload's description has"):
        read_structure({"structure": structure}, "structure", 1)


MODEL = (
    "class Both(nn.Module):\n"
    "    def __init__(self):\n"
    "        super().__init__(); self.a, self.b = nn.Linear(6, 4), nn.Linear(2, 4)\n"
    "    def forward(self, given):\n"
    "        mask = given.pop('mask')\n"
    "        image, (extra, ids) = given['image'], given['more']\n"
    "        return {'h': self.a(image) * mask[:, None] + self.b(extra), 'ids': [ids, {'again': ids}]}\n"
    "class Head(nn.Module):\n"
    "    def __init__(self):\n"
    "        super().__init__(); self.a = nn.Linear(4, 4)\n"
    "    def forward(self, given):\n"
    "        return {'scores': self.a(given['h']) * (given['ids'][1]['again'] > 0)[:, None]}\n"
    "def model(): return [Both(), Head()]\n"
    "def loss(outputs, targets):\n"
    "    classes = targets.pop('classes')\n"
    "    return nn.functional.cross_entropy(outputs['scores'], classes) + 0 * targets['weights'][0].sum()\n"
)
DATA = (
    "def data(batch_size, seed):\n"
    "    for i in range(3):\n"
    "        g = torch.Generator().manual_seed(10 * seed + i)\n"
    "        mask = torch.rand(batch_size, generator=g)\n"
    "        more = [torch.randn(batch_size, 2, generator=g), torch.arange(batch_size)]\n"
    "        image = torch.randn(batch_size, 6, generator=g)\n"
    "        parts = {'image': image, 'mask': mask, 'more': more}\n"
    "        if i: parts = dict(reversed(parts.items()))\n"
    "        yield parts, {'classes': torch.arange(batch_size) % 4, 'weights': (mask,)}\n"
)


def test_a_workload_of_dicts(user: Callable[..., Workload]) -> None:
    workload = user(MODEL, data=DATA)
    assert workload.structure(0) == {"dict": {"image": None, "mask": None, "more": {"tuple": [None, None]}}}
    between = workload.shapes.boundaries(3)[1]
    assert str(between) == '{"h": float32[3, 4], "ids": (int64[3], {"again": int64[3]})}'
    assert [spec.requires_grad for spec in between.tensors] == [True, False, False]
    batches = workload.batches()
    for _ in range(4):
        inputs, targets = next(batches)
        assert isinstance(inputs, dict)
        assert list(inputs) == ["image", "mask", "more"]
        first, second = workload.build(0, 2)
        loss = workload.loss(second(first(inputs)), targets)
        loss.backward()
    cut, _ = next(workload.batches(0, 2, 5))
    assert [t.shape[0] for t in flatten_value(cut)[0]] == [3, 3, 3, 3]
    random, _ = next(user(MODEL, data=DATA, random_inputs=True).batches())
    assert flatten_value(random)[1] == workload.structure(0)
    there = load_workload(replace(workload.spec, **json.loads(json.dumps(_told(workload)))))
    assert there.shapes.boundaries(5) == workload.shapes.boundaries(5)
    assert there.example == workload.example


def _told(workload: Workload) -> dict[str, Any]:
    return {"example": workload.spec.example, "boundaries": workload.spec.boundaries}


def test_costs_of_a_workload_of_dicts(user: Callable[..., Workload]) -> None:
    """A layer that takes a part out of its dict costs what one costs that does not."""
    from skyctl.workload.costs import count_layer_costs

    taking = count_layer_costs(user(MODEL, data=DATA), 4)
    leaving = count_layer_costs(user(MODEL.replace("given.pop('mask')", "given['mask']"), data=DATA), 4)
    assert [replace(cost, signature="") for cost in taking] == [
        replace(cost, signature="") for cost in leaving
    ]
    assert taking[0].output_bytes == 4 * (4 * 4 + 8 + 8)


def test_layers_of_other_keys_are_of_another_kind(user: Callable[..., Workload]) -> None:
    """Else the probe would run one of them in the other's company."""
    from skyctl.workload.costs import count_layer_costs

    workload = user(
        "class Key(nn.Module):\n"
        "    def __init__(self, key, following):\n"
        "        super().__init__(); self.a, self.key, self.following = nn.Linear(6, 6), key, following\n"
        "    def forward(self, given): return {self.following: self.a(given[self.key])}\n"
        "class Last(nn.Linear):\n"
        "    def forward(self, given): return super().forward(given['a'])\n"
        "def model():\n"
        "    names = 'abcbca'\n    return [*map(Key, names, names[1:]), Last(6, 4)]\n",
        data="def data(batch_size, seed):\n"
        "    while True: yield {'a': torch.zeros(batch_size, 6)}, torch.zeros(batch_size).long()\n",
    )
    signatures = [cost.signature for cost in count_layer_costs(workload, 2)]
    assert signatures[1] == signatures[3]
    assert len(set(signatures)) == 5


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ("{'x': x, 'name': 'cat'}", ['inputs["name"] is of type str']),
        ("{'x': x} if i else {'x': x, 'y': x}", ['inputs without the key "y" in step 1, with it in']),
        ("{'x': x, 'y': x} if i else {'x': x}", ['inputs with the key "y" in step 1, without it']),
        ("{'x': x.double() if i else x}", ['inputs["x"] of float64[6] a sample in step 1, of float32[6] in']),
        ("{'x': x, 'y': x[1:]}", ["dimension 0 must be", 'inputs["x"] [8, 6]', 'inputs["y"] [7, 6]']),
        ("{'x': x, 'y': torch.tensor(3)}", ["dimension 0 must be the samples", 'inputs["y"] []']),
        ("{'x': (x, x)[i:]}", ['inputs["x"] with 1 parts in step 1, with 2 in the first']),
    ],
)  # fmt: skip
def test_bad_batches_of_dicts_are_named(user: Callable[..., Workload], inputs: str, words: list[str]) -> None:
    model = (
        "class First(nn.Linear):\n"
        "    def forward(self, given):\n"
        "        x = given['x']\n"
        "        return super().forward(x[0] if isinstance(x, tuple) else x)\n"
        "def model(): return [First(6, 4)]\n"
    )
    data = (
        "def data(batch_size, seed):\n"
        "    for i in range(2):\n"
        "        x = torch.zeros(batch_size, 6)\n"
        f"        yield {inputs}, torch.zeros(batch_size).long()\n"
    )
    with pytest.raises(WorkloadError) as error:
        list(zip(range(2), user(model, data=data).batches(), strict=False))
    for word in words:
        assert word in str(error.value), str(error.value)


def test_a_batch_that_is_one_dict_is_told_how(user: Callable[..., Workload]) -> None:
    with pytest.raises(WorkloadError, match=r"must give \(inputs, targets\), not a dict") as error:
        user(MODEL, data="def data(batch_size, seed): yield {'x': torch.zeros(8), 'labels': torch.zeros(8)}")
    assert "labels" in str(error.value.hint)


def test_an_example_is_read_again_and_must_say_its_structures() -> None:
    tensor = {"shape": [3], "dtype": "float32", "low": 0, "high": 0}
    structures = {"inputs_structure": {"tuple": [None, None]}, "targets_structure": None}
    document = {"inputs": [tensor, tensor], "targets": [tensor], **structures}
    example = BatchExample.from_dict(document)
    assert BatchExample.from_dict(json.loads(json.dumps(asdict(example)))) == example
    with pytest.raises(WorkloadError, match="has no targets_structure"):
        BatchExample.from_dict({key: value for key, value in document.items() if key != "targets_structure"})
