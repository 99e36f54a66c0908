"""The order of rows: fixed by the seed, no record twice in an epoch, the same from any step on."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.workload.datasets.record_folders import answers, chats, load, model_folder, write_lines

from skyctl.errors import WorkloadError
from skyctl.workload.datasets import row_order
from skyctl.workload.datasets.checked_options import RecordChoices
from skyctl.workload.datasets.line_conversion import open_records
from skyctl.workload.datasets.record_batches import RecordData
from skyctl.workload.datasets.record_files import write_file_list
from skyctl.workload.datasets.row_order import RowOrder
from skyctl.workload.structures import value_tensors
from skyctl.workload.workload import load_workload

pytest.importorskip("transformers")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few records, and groups of four."""
    for name, value in {"LEAST_BLOCK_BYTES": 700, "MOST_BLOCK_BYTES": 700, "GROUP_BYTES": 1}.items():
        monkeypatch.setattr(row_order, name, value)
    monkeypatch.setattr(row_order, "KEPT_BLOCKS", 3)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    write_lines(folder / "a.jsonl", chats(60))
    write_lines(folder / "b.jsonl", chats(41, first=60))
    return folder


def same(a: Any, b: Any) -> bool:
    pairs = zip(value_tensors(a), value_tensors(b), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("packing", [True, False])
def test_an_epoch_has_each_record_once_and_any_step_can_be_the_first(
    tmp_path: Path, data: Path, packing: bool
) -> None:
    workload = load(model_folder(tmp_path / "m"), data, choices=RecordChoices(packing))
    every = list(islice(workload.batches(), 60))
    seen: list[int] = []
    for _, targets in every:
        seen += answers(workload, targets)
    epochs = len(seen) // 101
    assert epochs >= 2
    for epoch in range(epochs):
        assert sorted(seen[epoch * 101 : epoch * 101 + 101]) == list(range(101))
    assert seen[:101] != seen[101:202]
    assert seen[:101] != sorted(seen[:101])
    for first in (1, 7, 25, 26, 27, 59):
        again = next(workload.batches(first))
        assert same(again[0], every[first][0]), first
        assert same(again[1], every[first][1]), first
    part = next(workload.batches(7, 1, 3))
    assert same(part[0], tuple(t[1:3] for t in every[7][0]) if packing else every[7][0][1:3])  # type: ignore[index, union-attr]
    assert torch.equal(part[1]["tokens"], every[7][1]["tokens"][1:3])  # type: ignore[index, call-overload]
    other = load(tmp_path / "m", data, choices=RecordChoices(packing), seed=1)
    assert answers(other, next(other.batches())[1]) != answers(workload, every[0][1])


@pytest.mark.usefixtures("small_blocks")
def test_what_is_held_out_is_never_trained_on(tmp_path: Path, data: Path) -> None:
    workload = load(model_folder(tmp_path / "m"), data, validated=True, choices=RecordChoices(False))
    trained = {n for _, targets in islice(workload.batches(), 60) for n in answers(workload, targets)}
    held_out = {n for _, targets in islice(workload.validation(), 9) for n in answers(workload, targets)}
    assert held_out
    assert not held_out & trained
    assert held_out | trained == set(range(101))
    few = load(tmp_path / "m", write_lines(tmp_path / "few.jsonl", chats(1)), validated=True)
    with pytest.raises(WorkloadError, match="nothing to validate on"):
        few.check_validation()


def test_data_that_changes_while_it_is_read_is_refused(tmp_path: Path, data: Path) -> None:
    workload = load(model_folder(tmp_path / "m"), data)
    batches = workload.batches()
    next(batches)
    reader = workload.record_reader()
    with (data / "a.jsonl").open("a") as file:
        file.write("\n")
    os.utime(data / "a.jsonl", ns=(1, 1))
    with pytest.raises(WorkloadError, match=r"a\.jsonl has changed since the run began"):
        reader.rows(reader.blocks[0])


@pytest.mark.usefixtures("small_blocks")
def test_who_goes_on_with_a_run_reads_what_it_trains_on_alone(tmp_path: Path, data: Path) -> None:
    """A node keeps how many rows its blocks have, beside the list of files that it was sent."""
    listed = tmp_path / "listed"
    node = load(model_folder(tmp_path / "m"), data, choices=RecordChoices(False))
    listed.write_bytes(write_file_list(open_records(data)))
    node = load_workload(replace(node.spec, data_path=str(listed)))
    every = list(islice(node.batches(), 24))
    again = RecordData(node.record_reader(), 4, 0)
    assert same(next(again.batches(20, 0, 4))[0], every[20][0])
    reader = node.record_reader()
    assert next(RowOrder(reader, 0).rows(80))
    assert 0 < reader.counts.records < 30
    held_out = RowOrder(replace(reader, held_out=True), 0)
    assert not held_out._sizes
