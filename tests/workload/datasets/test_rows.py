"""Rows of records: packed ones train as the records alone would, however a batch is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.workload.datasets.record_folders import answers, chats, load, model_folder, write_lines
from torch import Tensor, nn

from skyctl.errors import WorkloadError
from skyctl.workload.datasets.checked_options import RecordChoices
from skyctl.workload.datasets.packed_rows import pack
from skyctl.workload.loss_functions import IGNORED_TARGET

pytest.importorskip("transformers")

PACKED, APART = RecordChoices(True), RecordChoices(False)
CAUSAL = ("llama", "mistral-sliding", "qwen2-some-sliding", "qwen3", "olmo2", "phi3", "gpt2")


def run(layers: list[nn.Module], value: Any) -> Tensor:
    for layer in layers:
        value = layer(value)
    assert isinstance(value, Tensor)
    return value


@pytest.mark.parametrize("config", CAUSAL)
def test_packed_samples_do_not_see_each_other(tmp_path: Path, config: str) -> None:
    folder = model_folder(tmp_path / "m", config=config)
    workload = load(folder, write_lines(tmp_path / "d.jsonl", chats(40)), choices=PACKED)
    layers = workload.build(0, workload.layers)
    (ids, positions), targets = next(workload.batches())  # type: ignore[misc]
    scores = run(layers, (ids, positions))
    starts = (positions == 0).nonzero().tolist()
    assert len(starts) >= 8
    for row, start in starts:
        stop = min((at for r, at in starts if r == row and at > start), default=48)
        alone = run(layers, (ids[row : row + 1, start:stop], torch.arange(stop - start)[None]))
        torch.testing.assert_close(scores[row, start:stop], alone[0], atol=2e-5, rtol=1e-4)
        assert targets["labels"][row, start] == IGNORED_TARGET  # type: ignore[index, call-overload]


def test_the_layers_of_packed_rows_are_the_librarys_model(tmp_path: Path) -> None:
    import transformers

    folder = model_folder(tmp_path / "m", config="llama")
    workload = load(folder, write_lines(tmp_path / "d.jsonl", chats(40)), choices=PACKED)
    made = workload.model.hub
    assert made is not None
    model = transformers.LlamaForCausalLM._from_config(
        made.settings.config, attn_implementation="sdpa"
    ).train()
    layers = workload.build(0, workload.layers)
    state = {
        names[own]: t
        for layer, names in zip(layers, made.names, strict=True)
        for own, t in layer.state_dict().items()
    }
    model.load_state_dict(state, strict=False)
    (ids, positions), targets = next(workload.batches())  # type: ignore[misc]
    labels: Tensor = targets["labels"]  # type: ignore[index, call-overload, assignment]
    wanted = model(input_ids=ids, position_ids=positions, labels=labels, use_cache=False)
    scores = run(layers, (ids, positions))
    torch.testing.assert_close(scores, wanted.logits)
    torch.testing.assert_close(workload.loss(scores, targets), wanted.loss)


@pytest.mark.parametrize("choices", [PACKED, APART], ids=["packed", "apart"])
def test_a_batch_cut_in_any_way_has_the_same_loss_and_gradients(
    tmp_path: Path, choices: RecordChoices
) -> None:
    folder = model_folder(tmp_path / "m", config="llama")
    data = write_lines(tmp_path / "d.jsonl", chats(60))
    workload = load(folder, data, choices=choices, batch_size=8)
    inputs, targets = next(workload.batches())
    found = []
    for sizes in ([8], [5, 3], [1, 4, 2, 1], [1] * 8):
        layers = workload.build(0, workload.layers)
        total, at = 0.0, 0
        for size in sizes:
            part = slice(at, at + size)
            given = tuple(t[part] for t in inputs) if isinstance(inputs, tuple) else inputs[part]  # type: ignore[index, union-attr]
            wanted = {name: t[part] for name, t in targets.items()}  # type: ignore[union-attr]
            loss = workload.loss(run(layers, given), wanted) * (size / 8)
            loss.backward()
            total, at = total + loss.item(), at + size
        found.append((total, [p.grad for layer in layers for p in layer.parameters()]))
    labels = targets["labels"]  # type: ignore[index, call-overload]
    learnt = labels != IGNORED_TARGET  # type: ignore[operator]
    assert len(set(learnt.sum(1).tolist())) > 1, "rows must differ in what they learn"  # type: ignore[union-attr]
    scores = run(workload.build(0, workload.layers), inputs)
    kept = learnt[:, 1:].reshape(-1)  # type: ignore[index]
    plain = nn.functional.cross_entropy(
        scores[:, :-1].reshape(-1, 400)[kept], labels[:, 1:].reshape(-1)[kept]
    )  # type: ignore[index]
    assert found[0][0] == pytest.approx(plain.item(), rel=1e-6)
    for total, gradients in found[1:]:
        assert total == pytest.approx(found[0][0], rel=1e-6)
        for a, b in zip(gradients, found[0][1], strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_padded_rows_hold_one_record_each(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", config="llama")
    workload = load(folder, write_lines(tmp_path / "d.jsonl", chats(8)), choices=APART, batch_size=8)
    ids, targets = next(workload.batches())
    assert isinstance(ids, Tensor)
    assert sorted(answers(workload, targets)) == list(range(8))
    scores = run(workload.build(0, workload.layers), ids)
    longer = torch.cat([ids[:, :20], torch.randint(0, 300, (8, 28))], 1)
    torch.testing.assert_close(run(workload.build(0, workload.layers), longer)[:, :20], scores[:, :20])


def test_names_of_weights_are_the_same_packed_or_not(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", config="gpt2", tie_word_embeddings=True)
    data = write_lines(tmp_path / "d.jsonl", chats(9))
    packed, apart = (load(folder, data, choices=one) for one in (PACKED, APART))
    for index in range(packed.layers):
        assert packed.weight_names(index) == apart.weight_names(index)
    assert packed.digest != apart.digest
    assert packed.shared_parameters == apart.shared_parameters


def test_bert_is_not_trained_on_records(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", config="bert-masked")
    with pytest.raises(WorkloadError, match="trains models that say the next token"):
        load(folder, write_lines(tmp_path / "d.jsonl", chats(9)))


def test_packing_leaves_little_room() -> None:
    lengths = [n * 37 % 100 + 1 for n in range(1000)]
    rows = pack(lengths, 128)
    assert sorted(n for row in rows for n in row) == list(range(1000))
    filled = [sum(lengths[n] for n in row) for row in rows]
    assert max(filled) <= 128
    assert sum(lengths) / (128 * len(rows)) > 0.97
    assert pack([], 8) == []
    assert pack([8, 8, 1], 8) == [[0], [1], [2]]
