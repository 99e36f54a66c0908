"""The files beside a config.json: a tokenizer and weights; and what comes out again."""

from __future__ import annotations

import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.workload.hf import hub_folders

from skyctl.checkpoint.node import safetensors
from skyctl.checkpoint.node.layout import layer_name
from skyctl.checkpoint.node.shards import ShardStamp, StageState
from skyctl.errors import InfeasibleError, WorkloadError
from skyctl.planner.api import plan
from skyctl.records.plan import Plan
from skyctl.records.problem import Device, Layer, Problem
from skyctl.workload import shipped_weights
from skyctl.workload.costs import count_layer_costs
from skyctl.workload.hf import export, token_data
from skyctl.workload.mixed_precision import master_of
from skyctl.workload.shipped_files import encode_text
from skyctl.workload.starting_weights import find_stored_weights
from skyctl.workload.workload import Workload, load_workload

WORDS = " ".join(f"w{i * i % 40}" for i in range(400))


def loaded(folder: Path, options: str = "context=12", **more: Any) -> Workload:
    return hub_folders.load(folder, options, **{"batch_size": 6, **more})


@pytest.fixture
def story(tmp_path: Path) -> Path:
    path = tmp_path / "story.txt"
    path.write_text(WORDS)
    return path


def test_bytes_without_a_tokenizer(tmp_path: Path, story: Path) -> None:
    workload = loaded(
        hub_folders.write(tmp_path / "m", hub_folders.CONFIGS["llama"]), data_path=str(story), seed=3
    )
    ids, targets = next(workload.batches())
    assert isinstance(ids, torch.Tensor)
    assert ids.shape == (6, 12)
    assert torch.equal(ids, targets)  # the loss shifts them
    assert all(bytes(row.tolist()).decode() in WORDS for row in ids)
    assert encode_text(workload.spec, WORDS.encode()) == WORDS.encode()
    part, _ = next(workload.batches(0, 2, 5))
    assert torch.equal(part, ids[2:5])
    stream = workload.batches()
    third = [next(stream) for _ in range(3)][2][0]
    assert torch.equal(next(workload.batches(2))[0], third)
    assert not torch.equal(third, ids)


def test_a_tokenizer_runs_on_the_launcher_and_ids_travel(tmp_path: Path, story: Path) -> None:
    folder = hub_folders.write(tmp_path / "m", hub_folders.CONFIGS["qwen2"])
    words = hub_folders.tokenizer(folder)
    workload = loaded(folder, data_path=str(story))
    ids, _ = next(workload.batches())
    assert isinstance(ids, torch.Tensor)
    assert all(" ".join(words[i] for i in row) in WORDS for row in ids.tolist())
    sent = encode_text(workload.spec, story.read_bytes())
    assert sent is not None
    tokens = token_data.parse_tokens(sent)
    assert [words[i] for i in tokens.ids.tolist()] == WORDS.split()
    assert (tokens.cls, tokens.sep, tokens.mask) == (1, 2, 3)
    blob = tmp_path / "blob"
    blob.write_bytes(sent)
    there = hub_folders.write(tmp_path / "there", hub_folders.CONFIGS["qwen2"])  # no tokenizer
    node = loaded(there, data_path=str(blob))
    assert torch.equal(next(node.batches())[0], ids)  # type: ignore[arg-type]


def test_long_texts_are_tokenised_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_data, "PIECE_CHARACTERS", 64)
    folder = hub_folders.write(tmp_path, hub_folders.CONFIGS["qwen2"])
    words = hub_folders.tokenizer(folder)
    lines = "\n".join(f"w{i % 40} w{i % 7} w{i % 11}" for i in range(100)) + "\n"
    tokens = token_data.parse_tokens(token_data.tokenize(folder, lines.encode()))
    assert [words[i] for i in tokens.ids.tolist()] == lines.split()


def test_batches_of_the_other_tasks(tmp_path: Path, story: Path) -> None:
    masked = hub_folders.write(tmp_path / "masked", hub_folders.CONFIGS["bert-masked"])
    hub_folders.tokenizer(masked)
    ids, targets = next(loaded(masked, "context=20", data_path=str(story), batch_size=40).batches())
    assert isinstance(ids, torch.Tensor)
    assert isinstance(targets, torch.Tensor)
    hidden = targets != token_data.IGNORED_TARGET
    assert hidden.sum(1).tolist() == [3] * 40
    assert 0.6 < float((ids[hidden] == 3).float().mean()) < 0.95
    assert not bool((ids[~hidden] == 3).any())
    classes = hub_folders.write(tmp_path / "classes", hub_folders.CONFIGS["bert-classes"])
    hub_folders.tokenizer(classes)
    ids, targets = next(loaded(classes, data_path=str(story), batch_size=40).batches())
    assert isinstance(ids, torch.Tensor)
    assert isinstance(targets, torch.Tensor)
    assert (ids.shape, targets.shape) == ((40, 12), (40,))
    assert set(targets.tolist()) == {0, 1}
    assert ids[:, 0].eq(1).all()
    assert ids[:, -1].eq(2).all()


def test_texts_that_do_not_fit(tmp_path: Path, story: Path) -> None:
    folder = hub_folders.write(tmp_path / "m", {**hub_folders.CONFIGS["qwen2"], "vocab_size": 30})
    hub_folders.tokenizer(folder)
    with pytest.raises(WorkloadError, match=r"gives the id \d+, the model's vocab_size is 30"):
        next(loaded(folder, data_path=str(story)).batches())
    story = tmp_path / "short.txt"
    story.write_text("w1 w2")
    with pytest.raises(WorkloadError, match=r"has 2 tokens.*context=12"):
        next(loaded(folder, data_path=str(story)).batches())
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(WorkloadError, match=r"tokenizer in .* can't be used"):
        next(loaded(folder, data_path=str(story)).batches())


@pytest.mark.parametrize("kind", ["one", "sharded", "pickle", "old names"])
def test_weights_are_read_by_layer(kind: str, tmp_path: Path) -> None:
    folder = hub_folders.write(tmp_path, hub_folders.CONFIGS["bert-masked"])
    model = hub_folders.uncut(folder)
    model.save_pretrained(str(folder), max_shard_size="20KB" if kind == "sharded" else "1GB")
    state = {name: t.clone() for name, t in model.state_dict().items()}
    single = folder / "model.safetensors"
    if kind == "sharded":
        assert (folder / "model.safetensors.index.json").is_file()
    if kind == "pickle":
        torch.save(state, folder / "pytorch_model.bin")
        single.unlink()
    if kind == "old names":
        old = {n.replace("LayerNorm.weight", "LayerNorm.gamma"): t for n, t in state.items()}
        safetensors.save(single, {n.removeprefix("bert."): t.bfloat16() for n, t in old.items()})
    workload = loaded(folder)
    hub_model = workload.model.hub
    assert hub_model is not None
    assert hub_model.stored is not None
    assert not hub_model.stored.fresh
    for index, (layer, names) in enumerate(zip(workload.build(0, 6), hub_model.names, strict=True)):
        for own, tensor in layer.state_dict().items():
            wanted = state[names[own]]
            assert torch.equal(tensor, wanted.bfloat16().float() if kind == "old names" else wanted), index
    part = tmp_path / "part"
    kept = find_stored_weights(workload.spec)
    assert kept is not None
    shipped_weights.write_layer_weights(kept, [1, 2, 5], part)
    assert {name.split(".")[0] for name in safetensors.read_header(part).tensors} == {"1", "2", "5"}
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("part")) == ["part"]
    node = load_workload(type(workload.spec).from_dict({**workload.spec.to_dict(), "weights": str(part)}))
    there, here = node.build(1, 3), workload.build(1, 3)
    for a, b in zip(there, here, strict=True):
        for own, tensor in a.state_dict().items():
            assert torch.equal(tensor, b.state_dict()[own])


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    folder = hub_folders.write(tmp_path, hub_folders.CONFIGS["llama"])
    hub_folders.uncut(folder).save_pretrained(str(folder))
    file = folder / "model.safetensors"
    whole = safetensors.load(file)
    safetensors.save(file, {n: t for n, t in whole.items() if "layers.1.mlp.up" not in n})
    with pytest.raises(WorkloadError, match=r"lack 'model.layers.1.mlp.up_proj.weight'"):
        loaded(folder)
    hub_folders.write(folder, {**hub_folders.CONFIGS["llama"], "intermediate_size": 40})
    safetensors.save(file, whole)
    with pytest.raises(WorkloadError, match=r"has the shape \[48, 32\], config.json makes it \[40, 32\]"):
        loaded(folder)
    file.write_bytes(b"not weights at all")
    with pytest.raises(WorkloadError, match="no safetensors file"):
        loaded(folder)


def test_a_new_head_on_stored_weights(tmp_path: Path) -> None:
    folder = hub_folders.write(tmp_path, hub_folders.CONFIGS["bert-classes"])
    model = hub_folders.uncut(folder)
    safetensors.save(folder / "model.safetensors", dict(model.bert.state_dict()))
    workload = loaded(folder)
    note = "no weights for classifier.weight, classifier.bias: they start at random"
    assert workload.notes == [f"{tmp_path.name}: {note}"]
    layers = workload.build(0, workload.layers)
    assert torch.equal(layers[-1].pooler.dense.weight, model.bert.pooler.dense.weight)  # type: ignore[union-attr]
    assert torch.equal(layers[-1].classifier.weight, loaded(folder).build(5, 6)[0].classifier.weight)  # type: ignore[union-attr]


EXPORTED = ["gpt2", "bert-classes", "gemma2", "gemma3", "mixtral", "phi3", "qwen2-moe", "qwen3-moe"]


@pytest.mark.parametrize("name", EXPORTED)
def test_trained_weights_under_the_librarys_names(name: str, tmp_path: Path) -> None:
    """A run's weights, by layer → a folder that ``from_pretrained`` reads, with the same scores."""
    import transformers

    folder = hub_folders.write(tmp_path / "m", {**hub_folders.CONFIGS[name], "tie_word_embeddings": True})
    hub_folders.tokenizer(folder)
    workload = loaded(folder, "context=12,untie")
    layers = workload.build(0, workload.layers)
    run = {f"{i}.{own}": t for i, layer in enumerate(layers) for own, t in layer.state_dict().items()}
    safetensors.save(tmp_path / "weights.safetensors", run)
    words = [str(tmp_path / "weights.safetensors"), f"hf:{folder},context=12,untie", str(tmp_path / "out")]
    assert export.main(words) == 0
    assert export.main(words) == 2  # there is one already
    auto = "AutoModelForSequenceClassification" if name == "bert-classes" else "AutoModelForCausalLM"
    model = getattr(transformers, auto).from_pretrained(str(tmp_path / "out"), local_files_only=True)
    ids = torch.arange(24).view(2, 12)
    value: Any = ids
    for layer in layers:
        value = layer(value)
    torch.testing.assert_close(model(input_ids=ids).logits, value, rtol=1e-5, atol=1e-6)
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    again = loaded(tmp_path / "out", "context=12")
    for ours, layer in zip(layers, again.build(0, again.layers), strict=True):
        for own, tensor in ours.state_dict().items():
            assert torch.equal(tensor, layer.state_dict()[own])
    safetensors.save(tmp_path / "weights.safetensors", {**run, "4.odd": torch.zeros(1)})
    with pytest.raises(WorkloadError, match=r"is not of hf:.*'4\.odd'"):
        export.export_model(
            tmp_path / "weights.safetensors", f"hf:{folder},context=12,untie", tmp_path / "other"
        )


def test_a_checkpoints_step_under_the_librarys_names(tmp_path: Path) -> None:
    """The folder of one step's shards gives the same as the run's weights."""
    folder = hub_folders.write(tmp_path / "m", hub_folders.CONFIGS["llama"])
    workload = loaded(folder)
    layers = workload.build(0, workload.layers)
    run = {f"{i}.{own}": t for i, layer in enumerate(layers) for own, t in layer.state_dict().items()}
    safetensors.save(tmp_path / "weights.safetensors", run)
    (tmp_path / "step").mkdir()
    state = StageState(layers, None, master_of)
    for index, name in enumerate(workload.names):
        stamp = ShardStamp("r", 3, index, name, workload.layers, workload.digest, "float32", 0)
        state.write(index, tmp_path / "step" / layer_name(index), stamp)
    for given, out in (("weights.safetensors", "one"), ("step", "two")):
        assert export.main([str(tmp_path / given), f"hf:{folder},context=12", str(tmp_path / out)]) == 0
    files = {path.name for path in (tmp_path / "two").iterdir()}
    assert files == {path.name for path in (tmp_path / "one").iterdir()}
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_stage_reads_its_own_tensors_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is converted, none is held when the next is read; the launcher's copy is read by nobody."""
    folder = hub_folders.write(tmp_path, hub_folders.CONFIGS["llama"])
    model = hub_folders.uncut(folder).bfloat16()
    model.save_pretrained(str(folder), max_shard_size="20KB")
    load, read, held = safetensors.load, [], []

    def counting(path: Path, names: Any = None) -> dict[str, torch.Tensor]:
        assert not [one for one in held if one() is not None]
        found = load(path, names)
        read.extend(found)
        held.extend(weakref.ref(tensor) for tensor in found.values())
        return found

    workload, part = loaded(folder), tmp_path / "part"
    kept = find_stored_weights(workload.spec)
    assert kept is not None
    monkeypatch.setattr(safetensors, "load", counting)
    shipped_weights.write_layer_weights(kept, [1, 2], part)
    assert not read
    node = load_workload(type(workload.spec).from_dict({**workload.spec.to_dict(), "weights": str(part)}))
    (layer,) = node.build(2, 3)
    assert sorted(read) == sorted(f"2.{name}" for name in layer.state_dict())
    assert {tensor.dtype for tensor in layer.state_dict().values()} == {torch.float32}


def test_adapters_fit_where_the_model_can_not_be_trained(tmp_path: Path) -> None:
    """Three machines of 1 GiB: one learns who has how much and how much is missing, the other trains."""
    pytest.importorskip("peft")
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "vocab_size": 4096}
    folder = hub_folders.write(tmp_path, {**hub_folders.CONFIGS["llama"], **sizes})

    def planned(**more: Any) -> Plan:
        costs = count_layer_costs(hub_folders.load(folder, **more), 2)
        fields = ("name", "flops", "state_bytes", "activation_bytes", "output_bytes", "workspace_bytes")
        layers = tuple(Layer(**{field: getattr(cost, field) for field in fields}) for cost in costs)
        devices = tuple(
            Device(id=f"n{i}/cpu:0", flops_per_s=5e10, memory_bytes=2.0**30, reserved_bytes=430 * 2.0**20)
            for i in range(1, 4)
        )
        return plan(Problem(layers=layers, devices=devices, microbatches=2, objective="iteration"))

    with pytest.raises(InfeasibleError) as raised:
        planned()
    assert raised.value.exit_code == 3
    assert "MiB short (n1/cpu:0 has 594 MiB of its 1 GiB for layers, n2/cpu:0" in raised.value.message
    assert re.search(r"[0-9.]+ [MG]iB more on n1/cpu:0 would be enough", str(raised.value.hint))
    fitting = planned(lora="r=8", dtype="bfloat16")
    assert max(one.memory_bytes for one in fitting.predicted.replicas) < 2**30
