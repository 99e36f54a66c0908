"""``hf:DIR``: cut into layers, the model is still the library's own."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.workload.hf import hub_folders
from torch import Tensor

from skyctl.errors import WorkloadError
from skyctl.workload.costs import count_layer_costs
from skyctl.workload.hf.experts import experts_forward
from skyctl.workload.shipped_files import files_to_ship, shipped_path
from skyctl.workload.workload import load_workload
from skyctl.workload.workload_spec import parse_source


def with_weights(folder: Path, **more: Any) -> Any:
    """The library's model, its weights beside the config."""
    model = hub_folders.uncut(folder, **more)
    model.save_pretrained(str(folder))
    return model


@pytest.mark.parametrize("name", sorted(hub_folders.CONFIGS))
def test_scores_loss_and_gradients_are_the_uncut_models(name: str, tmp_path: Path) -> None:
    config = hub_folders.CONFIGS[name]
    folder = hub_folders.write(tmp_path / "it's a model, small", config)
    model = with_weights(folder)
    workload = hub_folders.load(folder)
    layers = workload.build(0, workload.layers)
    ids, targets = next(workload.batches())
    assert isinstance(ids, Tensor)
    value: Any = ids
    for layer in layers:
        value = layer(value)
    right = model(input_ids=ids, labels=targets)
    torch.testing.assert_close(value, right.logits, rtol=1e-5, atol=1e-5)
    loss = workload.loss(value, targets)
    torch.testing.assert_close(loss, right.loss, rtol=1e-5, atol=1e-5)
    loss.backward()
    right.loss.backward()
    hub_model = workload.model.hub
    assert hub_model is not None
    parameters = dict(model.named_parameters())
    seen = set()
    for layer, names in zip(layers, hub_model.names, strict=True):
        for own, parameter in layer.named_parameters():
            wanted = parameters[names[own]].grad
            seen.add(names[own])
            if wanted is None:
                assert parameter.grad is None
            else:
                torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=1e-6)
    assert seen == parameters.keys()
    halves = [n for n in workload.names if n.endswith((".attention", ".mlp"))]
    assert len(halves) == 4
    assert not [note for note in workload.notes if "cut between blocks only" in note]


def test_layers_are_named_and_equal_ones_cost_the_same(tmp_path: Path) -> None:
    workload = hub_folders.load(hub_folders.write(tmp_path, hub_folders.CONFIGS["llama"]))
    assert workload.names == [
        "embedding", "block.0.attention", "block.0.mlp", "block.1.attention", "block.1.mlp", "norm", "head",
    ]  # fmt: skip
    costs = count_layer_costs(workload, 2)
    assert costs[1].signature == costs[3].signature
    assert costs[2].signature == costs[4].signature
    assert costs[2].flops == 3 * 2 * (2 * 16) * (3 * 32 * 48)  # three products, forward and twice backward
    assert [workload.boundary(i, 2)[0].shape for i in (0, 1, 7)] == [(2, 16), (2, 16, 32), (2, 16, 300)]
    assert workload.structure(3) is None


def test_initial_weights_depend_on_seed_and_layer_only(tmp_path: Path) -> None:
    folder = hub_folders.write(tmp_path, hub_folders.CONFIGS["qwen3"])
    workload = hub_folders.load(folder, seed=1)
    whole = workload.build(0, workload.layers)
    torch.manual_seed(99)
    part = load_workload(workload.spec).build(3, 5)
    for ours, theirs in zip(part, whole[3:5], strict=True):
        for name, weight in ours.state_dict().items():
            assert torch.equal(weight, theirs.state_dict()[name])
    other = hub_folders.load(folder, seed=2).build(3, 4)[0].state_dict()
    assert not torch.equal(other["attention.q_proj.weight"], part[0].state_dict()["attention.q_proj.weight"])
    assert float(other["attention.q_proj.weight"].std()) == pytest.approx(0.02, rel=0.2)


REFUSED = {
    "granite": ({**hub_folders.GQA, "logits_scaling": 8.0}, r"'granite' does more between its layers"),
    "cohere": (hub_folders.GQA, r"'cohere' does more between its layers"),
    "mixtral": ({**hub_folders.GQA, "output_router_logits": True}, r"'mixtral'.*output_router_logits"),
    "t5": ({"vocab_size": 300}, r"'t5' can't be trained here"),
    "vit": ({}, r"'vit' can't be trained here"),
    "mamba": ({"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2}, "'mamba'"),
    "nonesuch": ({}, "nonesuch"),
    "bert": (
        {**hub_folders.SMALL, "architectures": ["BertForTokenClassification"]},
        r"BertForTokenClassification",
    ),
    "llama": ({**hub_folders.GQA, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    "qwen2": ({**hub_folders.GQA, "vocab_size": 200}, "vocab_size is 200"),
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_refused(kind: str, tmp_path: Path) -> None:
    config, words = REFUSED[kind]
    folder = hub_folders.write(tmp_path, {"model_type": kind, "tie_word_embeddings": False, **config})
    with pytest.raises(WorkloadError, match=words) as caught:
        hub_folders.load(folder)
    assert caught.value.hint


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2", "bert-masked", "gemma2", "gemma3"])
def test_tied_embeddings_are_one_parameter_with_the_stored_values(kind: str, tmp_path: Path) -> None:
    folder = hub_folders.write(tmp_path, {**hub_folders.CONFIGS[kind], "tie_word_embeddings": True})
    model = with_weights(folder)
    workload = hub_folders.load(folder, "context=16")
    assert {0, workload.layers - 1} in [set(shared.layers) for shared in workload.shared_parameters]
    layers = workload.build(0, workload.layers)
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert table is head
    mine = [p for p in layers[0].parameters() if p.shape == table.shape]
    assert mine[0] is next(p for p in layers[-1].parameters() if p.shape == table.shape)
    alone = workload.build(workload.layers - 1, workload.layers)[0]
    for copy in (mine[0], next(p for p in alone.parameters() if p.shape == table.shape)):
        assert torch.equal(copy, table)
    value: Any = next(workload.batches())[0]
    right = model(input_ids=value).logits
    for layer in layers:
        value = layer(value)
    torch.testing.assert_close(value, right, rtol=1e-5, atol=1e-5)


def test_tied_embeddings_are_untied_on_the_users_word(tmp_path: Path) -> None:
    config = {**hub_folders.CONFIGS["gpt2"], "tie_word_embeddings": True}
    folder = hub_folders.write(tmp_path, config)
    model = with_weights(folder)
    workload = hub_folders.load(folder, "context=16,untie")
    assert workload.shared_parameters == ()
    layers = workload.build(0, workload.layers)
    assert torch.equal(layers[0].state_dict()["wte.weight"], layers[-1].state_dict()["weight"])
    assert layers[0].wte.weight is not layers[-1].weight
    value: Any = next(workload.batches())[0]
    right = model(input_ids=value).logits
    for layer in layers:
        value = layer(value)
    torch.testing.assert_close(value, right, rtol=1e-5, atol=1e-5)
    again = hub_folders.load(hub_folders.write(folder, {**config, "tie_word_embeddings": False}))
    assert torch.equal(again.build(6, 7)[0].state_dict()["weight"], layers[-1].state_dict()["weight"])


def test_the_source(tmp_path: Path) -> None:
    folder = hub_folders.write(tmp_path / "a, b=c", hub_folders.CONFIGS["llama"])
    assert parse_source(f"hf:{folder}").path == folder
    assert parse_source(f"hf:{hub_folders.write(tmp_path / 'm', {})},context=8,untie").options == {
        "context": 8, "untie": 1,
    }  # fmt: skip
    for text, words in (
        ("hf:", "names no folder"),
        (f"hf:{tmp_path / 'none'}", "no folder"),
        (f"hf:{tmp_path}", "holds no config.json"),
        (f"hf:{tmp_path / 'm'},contxt=8", r"did you mean 'context'"),
        (f"hf:{tmp_path / 'm'},context=0", r"context=N or untie"),
    ):
        with pytest.raises(WorkloadError, match=words):
            parse_source(text)
    with pytest.raises(WorkloadError, match="context=65 is more than the 64 positions"):
        hub_folders.load(folder.rename(tmp_path / "plain"), "context=65")


def test_a_model_of_the_hub_is_taken_from_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    cache = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    with pytest.raises(WorkloadError, match="no such model") as caught:
        parse_source("hf:some/model,context=8")
    assert caught.value.hint == "if it is a model of the Hub, download it: hf download some/model"
    model = cache / "models--some--model"
    snapshot = hub_folders.write(model / "snapshots" / ("a" * 40), hub_folders.CONFIGS["llama"])
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("a" * 40)
    source = parse_source("hf:some/model,context=8")
    assert (source.path, source.options["context"]) == (snapshot, 8)


def test_digest(tmp_path: Path) -> None:
    config = hub_folders.CONFIGS["llama"]
    folder = hub_folders.write(tmp_path / "one", config)
    digest = hub_folders.load(folder).digest
    assert hub_folders.load(hub_folders.write(tmp_path / "two", config)).digest == digest
    assert hub_folders.load(folder, "context=8").digest != digest
    hub_folders.tokenizer(tmp_path / "two")
    assert hub_folders.load(tmp_path / "two").digest != digest
    assert hub_folders.load(hub_folders.write(folder, {**config, "rms_norm_eps": 1e-3})).digest != digest


def test_a_node_is_sent_the_config_alone(tmp_path: Path) -> None:
    """And cuts as the launcher did, without looking whether that is right."""
    for name in ("llama", "phi3"):
        folder = hub_folders.write(tmp_path / name, hub_folders.CONFIGS[name])
        hub_folders.tokenizer(folder)
        workload = hub_folders.load(folder)
        there = tmp_path / f"there-{name}"
        there.mkdir()
        for file, content in files_to_ship(workload.spec).items():
            (there / file).write_bytes(content)
        assert [path.name for path in there.iterdir()] == ["config.json"]
        assert shipped_path(workload.spec, str(there)) == str(there)
        spec = {**workload.spec.to_dict(), "path": str(there), "source": f"hf:/nowhere/{name},context=16"}
        node = load_workload(type(workload.spec).from_dict(json.loads(json.dumps(spec))))
        assert node.names == workload.names
        for ours, theirs in itertools.zip_longest(
            node.build(0, node.layers), workload.build(0, workload.layers)
        ):
            for key, weight in ours.state_dict().items():
                assert torch.equal(weight, theirs.state_dict()[key])


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"has_bias": True}, "has_bias"),
        ({"is_transposed": True}, "is_transposed"),
        ({"has_post_expert_norm": True}, "has_post_expert_norm"),
        ({"has_gate": False}, "no gate"),
    ],
)
def test_experts_that_compute_more_than_ours_are_refused(more: dict[str, bool], named: str) -> None:
    weights = {"gate_up_proj": torch.ones(2, 8, 4), "down_proj": torch.ones(2, 4, 4)}
    experts = SimpleNamespace(num_experts=2, _apply_gate=lambda up: up[..., :4], **weights, **more)
    with pytest.raises(NotImplementedError, match=named):
        experts_forward(experts, torch.ones(3, 4), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
