from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch

from skyctl.checkpoint.node import safetensors as own
from skyctl.errors import RecordError, SkyctlError

TENSORS = {
    "0.weight": torch.randn(3, 4),
    "10.weight": torch.arange(5),
    "2.half": torch.randn(2, 2, 2).bfloat16(),
    "2.flag": torch.tensor([True, False, True]),
    "2.empty": torch.empty(0, 3),
    "2.one": torch.tensor(3.5, dtype=torch.float64),
    "2.view": torch.randn(4, 6)[:, 1::2],
    "2.é\"'; $(x)": torch.zeros(1, dtype=torch.uint8),
}


def test_both_ways_with_the_package(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "a b'; c.safetensors", tmp_path / "theirs.safetensors"
    own.save(ours, TENSORS, {"layers": "x"})
    plain = {k: v.contiguous() for k, v in TENSORS.items()}
    safetensors.torch.save_file(plain, theirs, {"layers": "x"})
    for back in (safetensors.torch.load_file(ours), own.load(theirs), own.load(ours)):
        assert set(back) == set(TENSORS)
        for name, tensor in TENSORS.items():
            assert back[name].dtype == tensor.dtype
            assert torch.equal(back[name], tensor)
    with safetensors.safe_open(ours, "pt") as file:
        assert file.metadata() == {"layers": "x"}
    header = own.read_header(ours)
    assert header.metadata == {"layers": "x"}
    assert next(iter(header.tensors)) == "0.weight"
    assert list(header.tensors)[-1] == "10.weight"
    assert own.read_header(theirs).metadata == {"layers": "x"}


def test_some_names(tmp_path: Path) -> None:
    own.save(tmp_path / "w", TENSORS)
    assert set(own.load(tmp_path / "w", ["2.one", "2.empty"])) == {"2.one", "2.empty"}
    with pytest.raises(RecordError, match=r"no tensor '3\.one'"):
        own.load(tmp_path / "w", ["3.one"])


def test_a_shared_tensor_is_stored_once(tmp_path: Path) -> None:
    tied, other = torch.ones(3), torch.zeros(2)
    own.save(tmp_path / "a", {"tied": tied})
    own.save(tmp_path / "b", {"tied": tied, "other": other})
    own.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "all", shared=True)
    assert own.read_header(tmp_path / "all").tensors.keys() == {"tied", "other"}
    own.save(tmp_path / "b", {"tied": other})
    with pytest.raises(RecordError, match="is in both"):
        own.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "all", shared=True)


def test_gather_copies_tensors_of_several_files_under_new_names(tmp_path: Path) -> None:
    values = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    own.save(tmp_path / "a", {"x": values, "none": torch.empty(0, 3)})
    own.save(tmp_path / "b", {"y": torch.ones(1 << 19)})
    sources = {"0.w": (tmp_path / "a", "x"), "2.w": (tmp_path / "a", "x"), "1.w": (tmp_path / "b", "y")}
    own.gather({**sources, "3": (tmp_path / "a", "none")}, tmp_path / "out")
    held = safetensors.torch.load_file(tmp_path / "out")
    assert torch.equal(held["0.w"], values)
    assert torch.equal(held["2.w"], values)
    assert torch.equal(held["1.w"], torch.ones(1 << 19))
    assert held["3"].shape == (0, 3)
    with pytest.raises(RecordError, match="holds no tensor 'z'"):
        own.gather({"0": (tmp_path / "a", "z")}, tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "CHUNK_BYTES", 7)
    names = list(TENSORS)
    own.save(tmp_path / "a", {n: TENSORS[n] for n in names[:3]}, {"layers": "x", "first": "1"})
    own.save(tmp_path / "b", {n: TENSORS[n] for n in names[3:]}, {"layers": "x"})
    own.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "all")
    back = safetensors.torch.load_file(tmp_path / "all")
    assert all(torch.equal(back[n], t) for n, t in TENSORS.items())
    assert own.read_header(tmp_path / "all").metadata == {"layers": "x", "first": "1"}
    own.save(tmp_path / "whole", TENSORS, {"layers": "x", "first": "1"})
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "all").read_bytes()
    with pytest.raises(RecordError, match="is in both"):
        own.merge([tmp_path / "a", tmp_path / "a"], tmp_path / "twice")
    own.save(tmp_path / "c", {}, {"layers": "y"})
    with pytest.raises(RecordError, match="layers='y'"):
        own.merge([tmp_path / "a", tmp_path / "c"], tmp_path / "no")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "all", "b", "c", "whole"]


def raw(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no safetensors file"),
        (b"abc", "no safetensors file"),
        (raw({}, length=1 << 60), "can't hold the header"),
        (raw(b"not json at all"), "not JSON"),
        (raw(b"\xff\xfe\xfd"), "not JSON"),
        (raw(b"[" * 100_000), "not JSON"),
        (raw([1]), "a list"),
        (raw({"__metadata__": {"a": 1}}), "__metadata__"),
        (raw({"a": 3}), "tensor 'a' must have dtype"),
        (raw({"a": {**GOOD, "dtype": "X9"}}, b"12345678"), "unknown type 'X9'"),
        (raw({"a": {**GOOD, "dtype": []}}, b"12345678"), "unknown type"),
        (raw({"a": {**GOOD, "shape": [-2]}}, b"12345678"), "shape"),
        (raw({"a": {**GOOD, "shape": [True]}}, b"12345678"), "shape"),
        (raw({"a": {**GOOD, "shape": [3]}}, b"12345678"), "needs 12 bytes"),
        (raw({"a": {**GOOD, "data_offsets": [8, 0]}}, b"12345678"), "needs 8 bytes"),
        (raw({"a": {**GOOD, "data_offsets": [0]}}, b"12345678"), "offsets"),
        (raw({"a": GOOD}, b"1234567"), "describes"),
        (raw({"a": GOOD}, b"123456789"), "describes"),
        (raw({"a": {**GOOD, "data_offsets": [8, 16]}}, b"1" * 16), "expected"),
        (raw({"a": GOOD, "b": GOOD}, b"12345678"), "tensor 'b' starts"),
    ],
)
def test_damaged(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "w").write_bytes(content)
    with pytest.raises(RecordError, match=words):
        own.load(tmp_path / "w")


def test_errors_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecordError, match="can't be read: No such file"):
        own.load(tmp_path / "none")
    with pytest.raises(SkyctlError, match="can't be written"):
        own.save(tmp_path / "no" / "w", TENSORS)
    with pytest.raises(SkyctlError, match="complex128"):
        own.save(tmp_path / "w", {"a": torch.zeros(1, dtype=torch.complex128)})
    own.save(tmp_path / "w", {"a": torch.ones(1)})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SkyctlError, match="No space left on device"):
        own.save(tmp_path / "w", TENSORS)
    assert [p.name for p in tmp_path.iterdir()] == ["w"]
    assert own.load(tmp_path / "w")["a"].item() == 1
