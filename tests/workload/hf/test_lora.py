"""Low-rank adapters of ``hf:`` models: what is typed, what is trained, and what is written of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.workload.datasets import record_folders
from tests.workload.hf import hub_folders

from skyctl.checkpoint.node import safetensors
from skyctl.checkpoint.node.shards import ShardStamp, StageState
from skyctl.errors import WorkloadError
from skyctl.worker.checkpointer import save_weights
from skyctl.worker.cut_check.comparison import SAME, compare_cut
from skyctl.workload.adapter_export import export_adapters
from skyctl.workload.costs import count_layer_costs
from skyctl.workload.datasets.checked_options import RecordChoices
from skyctl.workload.hf.lora_options import LORA_DEFAULTS, format_lora, parse_lora
from skyctl.workload.mixed_precision import master_of
from skyctl.workload.shipped_files import digest_workload
from skyctl.workload.shipped_weights import write_layer_weights
from skyctl.workload.starting_weights import find_stored_weights, with_frozen_digest
from skyctl.workload.workload import Workload, load_workload
from skyctl.workload.workload_spec import WorkloadSpec, make_spec

peft = pytest.importorskip("peft")

LORA = "r=4,alpha=16"


def stored(folder: Path, kind: str = "llama", **more: Any) -> Any:
    """The library's model of a folder that is written with its weights."""
    hub_folders.write(folder, {**hub_folders.CONFIGS[kind], **more})
    model = hub_folders.uncut(folder)
    model.save_pretrained(str(folder))
    return model


def test_options_are_read_by_their_names_in_peft_and_by_short_ones() -> None:
    found = parse_lora("r=16, alpha=32,dropout=0.05,targets=q_proj,v_proj,use_dora,bias=lora_only")
    assert found == {
        **LORA_DEFAULTS,
        "r": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
        "target_modules": ["q_proj", "v_proj"],
        "use_dora": True,
        "bias": "lora_only",
    }
    assert parse_lora(format_lora(found)) == found
    assert parse_lora("r=8,target_modules=all-linear,modules_to_save=lm_head") == {
        **LORA_DEFAULTS,
        "modules_to_save": ["lm_head"],
    }
    assert format_lora(parse_lora("r=8")) == "r=8"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("r=16,alfa=32", "no 'alfa' (did you mean 'alpha'?)"),
        ("r=0", "r=0 must be a whole number of at least 1"),
        ("r=1e3", "r=1e3 must be a whole number of at least 1"),
        ("dropout=1", "dropout=1.0 must be a number from 0 to below 1"),
        ("dropout=nan", "dropout=nan must be"),
        ("bias=lora-only", "must be none, all, lora_only (did you mean 'lora_only'?)"),
        ("r=8,r=9", "'r' is given twice"),
        ("r", "'r' needs a value"),
        ("", "--lora has no ''"),
        ("use_dora=maybe", "use_dora=maybe must be true or false"),
        ("targets=all-linear,q_proj", "all-linear stands alone"),
        ("targets=", "must be names of modules"),
    ],
)
def test_what_is_mistyped_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(WorkloadError) as raised:
        parse_lora(text)
    assert said in raised.value.message


def test_modules_that_the_model_lacks_are_refused_by_name(tmp_path: Path) -> None:
    hub = hub_folders.write(tmp_path / "m", hub_folders.CONFIGS["llama"])
    for text, said in (
        ("targets=q_prj", "no module of m is called 'q_prj' (did you mean 'q_proj'?)"),
        ("targets=q_proj,use_dorra", "'use_dorra' (did you mean 'use_dora'?)"),
        ("modules_to_save=head", "no module of m is called 'head' (did you mean 'lm_head'?)"),
        ("targets=mlp", "can't be given these adapters"),
    ):
        with pytest.raises(WorkloadError) as raised:
            hub_folders.load(hub, lora=text)
        assert said in raised.value.message


def test_experts_get_no_adapters_and_the_user_is_told(tmp_path: Path) -> None:
    hub = hub_folders.write(tmp_path / "m", hub_folders.CONFIGS["mixtral"])
    loaded = hub_folders.load(hub, lora=LORA)
    assert "m: the experts' weights are no linear layers, and get no adapters" in loaded.notes
    with pytest.raises(WorkloadError, match=r"peft takes gate of m for gate\.weight") as raised:
        hub_folders.load(hub, lora="targets=gate")
    assert raised.value.hint == "linear are k_proj, o_proj, q_proj, v_proj"


def test_tied_embeddings_are_refused_as_targets(tmp_path: Path) -> None:
    hub = hub_folders.write(tmp_path / "m", {**hub_folders.CONFIGS["gpt2"], "tie_word_embeddings": True})
    with pytest.raises(WorkloadError, match="one table, and it is to train the head alone") as raised:
        hub_folders.load(hub, lora="modules_to_save=lm_head")
    assert raised.value.hint == "train them as two: hf:m,untie"
    hub_folders.load(hub, "context=16,untie", lora="modules_to_save=lm_head")


def test_only_models_of_the_library_take_them(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="--lora is for hf: workloads, not for gpt:layers=2"):
        make_spec("gpt:layers=2", lora=LORA)
    hub = hub_folders.write(tmp_path / "m", hub_folders.CONFIGS["llama"])
    told = make_spec(f"hf:{hub}", lora=LORA).to_dict()
    told["lora"]["r"] = "sixteen"
    with pytest.raises(WorkloadError, match="r=sixteen must be a whole number"):
        load_workload(WorkloadSpec.from_dict(told))


def test_the_digest_knows_the_adapters(tmp_path: Path) -> None:
    hub = hub_folders.write(tmp_path / "m", hub_folders.CONFIGS["llama"])
    digests = {digest_workload(make_spec(f"hf:{hub}", lora=text)) for text in (None, "r=8", "r=4")}
    assert len(digests) == 3
    assert digest_workload(make_spec(f"hf:{hub}", lora="r=4,lora_alpha=8")) in digests


@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        "qwen2",
        "qwen3",
        "mistral-sliding",
        "gpt2",
        "phi3",
        "bert-masked",
        "gemma3",
        "mixtral",
        "qwen2-moe",
    ],
)
def test_layers_compute_and_train_what_peft_does(kind: str, tmp_path: Path) -> None:
    model = stored(tmp_path / "m", kind)
    loaded = hub_folders.load(tmp_path / "m", lora=LORA)
    layers = loaded.build(0, loaded.layers)
    theirs = with_adapters_of(loaded, layers, model)
    ids, targets = next(loaded.batches())
    value: Any = ids
    for layer in layers:
        value = layer(value)
    scores = theirs(input_ids=ids).logits
    torch.testing.assert_close(value, scores, rtol=1e-5, atol=1e-5)
    loaded.loss(value, targets).backward()
    loaded.loss(scores, targets).backward()
    expected = {n: p.grad for n, p in theirs.named_parameters() if p.requires_grad}
    found = {n: p.grad for n, p in named(loaded, layers).items() if p.requires_grad}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    frozen = [p for layer in layers for p in layer.parameters() if not p.requires_grad]
    assert frozen
    assert all(p.grad is None for p in frozen)


@pytest.mark.parametrize(
    ("kind", "more"), [("llama", ""), ("gpt2", ""), ("qwen2", ",modules_to_save=lm_head")]
)
def test_packed_records_train_what_peft_does(kind: str, more: str, tmp_path: Path) -> None:
    folder = record_folders.model_folder(tmp_path / "m", config=kind)
    model = hub_folders.uncut(folder)
    model.save_pretrained(str(folder))
    data = record_folders.write_lines(tmp_path / "d.jsonl", record_folders.chats(40))
    loaded = record_folders.load(folder, data, choices=RecordChoices(True), lora=LORA + more)
    layers = loaded.build(0, loaded.layers)
    theirs = with_adapters_of(loaded, layers, model)
    (ids, positions), targets = next(loaded.batches())  # type: ignore[misc]
    value: Any = (ids, positions)
    for layer in layers:
        value = layer(value)
    labels = targets["labels"]  # type: ignore[index, call-overload]
    expected = theirs(input_ids=ids, position_ids=positions, labels=labels, use_cache=False)
    loss = loaded.loss(value, targets)
    torch.testing.assert_close(value, expected.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss, expected.loss)
    loss.backward()
    expected.loss.backward()
    found = {n: p.grad for n, p in named(loaded, layers).items() if p.requires_grad}
    gradients = {n: p.grad for n, p in theirs.named_parameters() if p.requires_grad}
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def with_adapters_of(loaded: Workload, layers: list[Any], model: Any) -> Any:
    """The library's model with peft's own adapters, which have the layers' values; not a PeftModel."""
    settings = loaded.model.hub.settings  # type: ignore[union-attr]
    kinds = {"causal": "CAUSAL_LM", "masked": None}
    asked = loaded.model.hub.adapters.config  # type: ignore[union-attr]
    made = peft.LoraConfig(
        r=4,
        lora_alpha=16,
        target_modules=asked.target_modules,
        modules_to_save=asked.modules_to_save,
        task_type=kinds[settings.task],
        fan_in_fan_out=settings.config.model_type == "gpt2",
    )
    theirs = peft.inject_adapter_in_model(made, model)
    own = {n: p.detach().clone() for n, p in named(loaded, layers).items() if p.requires_grad}
    for name, values in own.items():  # so that the second matrix is not all zeros, and passes gradients on
        if "lora_B" in name:
            torch.nn.init.normal_(values, generator=torch.Generator().manual_seed(len(name)))
    theirs.load_state_dict(own, strict=False)
    with torch.no_grad():
        for name, parameter in named(loaded, layers).items():
            if name in own:
                parameter.copy_(own[name])
    return theirs


def named(loaded: Workload, layers: list[Any]) -> dict[str, Any]:
    """The layers' parameters by their names in the library's model with adapters."""
    names = loaded.model.hub.names  # type: ignore[union-attr]
    return {
        names[index][own]: parameter
        for index, layer in enumerate(layers)
        for own, parameter in layer.named_parameters()
    }


def test_first_values_depend_on_seed_and_layer_only(tmp_path: Path) -> None:
    stored(tmp_path / "m")
    loaded = hub_folders.load(tmp_path / "m", lora=LORA)
    together = loaded.build(0, loaded.layers)
    other = hub_folders.load(tmp_path / "m", lora=LORA, seed=1)
    told = WorkloadSpec.from_dict(loaded.spec.to_dict())
    for index in (1, 2, 4):
        write_layer_weights(loaded.model.stored, [index], tmp_path / "part")  # type: ignore[arg-type]
        node = load_workload(WorkloadSpec(**{**told.to_dict(), "weights": str(tmp_path / "part")}))
        (alone,) = node.build(index, index + 1)
        (another,) = other.build(index, index + 1)
        for name, parameter in together[index].named_parameters():
            assert torch.equal(parameter, alone.get_parameter(name))
            same = torch.equal(parameter, another.get_parameter(name))
            assert same == ("lora_A" not in name)  # the others are stored, or begin at zero


def test_what_is_made_of_frozen_weights_is_made_of_the_stored_ones(tmp_path: Path) -> None:
    """DoRA's magnitudes are norms of rows; a module that is trained whole begins as it is stored."""
    model = stored(tmp_path / "m")
    loaded = hub_folders.load(tmp_path / "m", lora="r=4,use_dora,modules_to_save=lm_head")
    layers = loaded.build(0, loaded.layers)
    weight = model.model.layers[0].self_attn.q_proj.weight
    found = layers[1].attention.q_proj.lora_magnitude_vector["default"].weight
    torch.testing.assert_close(found, weight.norm(dim=1))
    torch.testing.assert_close(layers[-1].modules_to_save["default"].weight, model.lm_head.weight)


def test_frozen_layers_cost_no_gradients_and_ask_for_none(tmp_path: Path) -> None:
    hub = hub_folders.write(tmp_path / "m", hub_folders.CONFIGS["llama"])
    full, lora = hub_folders.load(hub), hub_folders.load(hub, lora=LORA)
    wants = [[t.requires_grad for t in lora.boundary(index, 4)] for index in range(lora.layers)]
    assert wants == [[False], [False], *[[True]] * (lora.layers - 2)]
    costs, fuller = count_layer_costs(lora, 4), count_layer_costs(full, 4)
    for cost, other, layer in zip(costs, fuller, lora.shapes.fake_layers, strict=True):
        trained = sum(p.numel() for p in layer.parameters() if p.requires_grad)
        frozen = sum(p.numel() for p in layer.parameters() if not p.requires_grad)
        buffers = sum(b.nbytes for b in layer.buffers())
        assert cost.state_bytes == 4 * frozen + 16 * trained + buffers
        assert cost.gradient_bytes == 4 * trained
        assert cost.full_state_bytes == other.state_bytes
        assert other.full_state_bytes is None
    assert costs[0].flops == 0
    assert costs[2].flops < 0.75 * fuller[2].flops + 1e6
    assert costs[1].signature != costs[3].signature  # below the first adapters no gradient is wanted
    assert costs[2].signature == costs[4].signature


def test_adapters_are_float32_over_a_frozen_model_in_bfloat16(tmp_path: Path) -> None:
    stored(tmp_path / "m")
    loaded = hub_folders.load(tmp_path / "m", lora=LORA, dtype="bfloat16")
    layers = loaded.build(0, loaded.layers)
    for layer in layers:
        for parameter in layer.parameters():
            assert parameter.dtype is (torch.float32 if parameter.requires_grad else torch.bfloat16)
            assert master_of(parameter) is parameter
    ids, targets = next(loaded.batches())
    value: Any = ids
    for layer in layers:
        value = layer(value)
        assert value.dtype is torch.bfloat16
    loaded.loss(value, targets).backward()
    full = hub_folders.load(tmp_path / "m", dtype="bfloat16")
    for cost, other in zip(count_layer_costs(loaded, 4), count_layer_costs(full, 4), strict=True):
        assert cost.full_state_bytes == other.state_bytes


def test_shards_hold_the_adapters_alone(tmp_path: Path) -> None:
    stored(tmp_path / "m")
    loaded = hub_folders.load(tmp_path / "m", lora=LORA)
    stamp = ShardStamp("r", 3, 1, "l", loaded.layers, loaded.digest, "float32", 0)
    (layer,) = loaded.build(1, 2)
    optimizer = loaded.optimizer(layer.parameters())
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    state = StageState([layer], optimizer, master_of, trained_alone=True)
    optimizer.step()
    state.write(0, tmp_path / "shard", stamp)
    held = safetensors.read_header(tmp_path / "shard").tensors
    assert all(".lora_" in name for name in held)
    (fresh,) = loaded.build(1, 2)
    StageState([fresh], loaded.optimizer(fresh.parameters()), master_of, trained_alone=True).read(
        0, tmp_path / "shard", stamp
    )
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter, fresh.get_parameter(name))


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # peft asks for it
@pytest.mark.parametrize(
    ("kind", "text", "weights"),
    [
        ("llama", "r=4,alpha=8", True),
        ("llama", "r=4,alpha=8", False),
        ("gpt2", "r=4,use_rslora", True),
        ("qwen2", "r=4,use_dora,bias=all,modules_to_save=lm_head", True),
        ("llama", "r=4,targets=embed_tokens,q_proj", True),
        ("bert-classes", "r=4,targets=query,value", True),
        ("mixtral", "r=4", True),
        ("qwen2-moe", "r=4", True),
    ],
)
def test_a_folder_of_peft_and_the_merged_model_score_alike(
    kind: str, text: str, weights: bool, tmp_path: Path
) -> None:
    import transformers

    hub = hub_folders.write(tmp_path / "m", hub_folders.CONFIGS[kind])
    if weights:
        stored(hub, kind)
    loaded = hub_folders.load(hub, lora=text, seed=3)
    layers = loaded.build(0, loaded.layers)
    with torch.no_grad():
        for parameter in (p for layer in layers for p in layer.parameters() if p.requires_grad):
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    save_weights(tmp_path / "w.safetensors", layers, 0, loaded.model)
    saved = (tmp_path / "w.safetensors", f"hf:{hub},context=16", text)
    export_adapters(*saved, tmp_path / "merged", merge=True, seed=3)
    export_adapters(*saved, tmp_path / "adapters")
    auto = {"bert-classes": "AutoModelForSequenceClassification"}.get(kind, "AutoModelForCausalLM")
    merged = getattr(transformers, auto).from_pretrained(str(tmp_path / "merged")).eval()
    ids, _ = next(loaded.batches())
    value: Any = ids
    for layer in layers:
        value = layer.eval()(value)
    torch.testing.assert_close(merged(input_ids=ids).logits, value, rtol=1e-4, atol=1e-4)
    if weights:
        base = getattr(transformers, auto).from_pretrained(str(hub))
        theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapters")).eval()
        torch.testing.assert_close(theirs(input_ids=ids).logits, value, rtol=1e-4, atol=1e-4)


def test_a_run_begins_with_adapters_or_with_another_model(tmp_path: Path) -> None:
    stored(tmp_path / "m")
    loaded = hub_folders.load(tmp_path / "m", lora=LORA)
    layers = loaded.build(0, loaded.layers)
    with torch.no_grad():
        for parameter in (p for layer in layers for p in layer.parameters() if p.requires_grad):
            parameter.add_(1.0)
    save_weights(tmp_path / "w.safetensors", layers, 0, loaded.model)
    source = f"hf:{tmp_path / 'm'},context=16"
    adapters = export_adapters(tmp_path / "w.safetensors", source, LORA, tmp_path / "out")
    for path in (tmp_path / "w.safetensors", adapters):
        again = hub_folders.load(tmp_path / "m", lora=LORA, init_from=str(path), init_sha256="x")
        for layer, other in zip(layers, again.build(0, again.layers), strict=True):
            for name, parameter in layer.named_parameters():
                assert torch.equal(parameter, other.get_parameter(name))
    stored(tmp_path / "other")
    with torch.no_grad():
        base = hub_folders.uncut(tmp_path / "other", seed=5)
    base.save_pretrained(str(tmp_path / "other"))
    again = hub_folders.load(tmp_path / "m", lora=LORA, init_from=str(tmp_path / "other"), init_sha256="x")
    (layer,) = again.build(1, 2)
    assert torch.equal(layer.attention.q_proj.base_layer.weight, base.model.layers[0].self_attn.q_proj.weight)


def test_a_run_goes_on_with_the_frozen_weights_that_it_began_with(tmp_path: Path) -> None:
    stored(tmp_path / "m")
    spec = with_frozen_digest(make_spec(f"hf:{tmp_path / 'm'}", lora=LORA))
    assert find_stored_weights(spec) is not None
    hub_folders.uncut(tmp_path / "m", seed=1).save_pretrained(str(tmp_path / "m"))
    with pytest.raises(WorkloadError, match="have changed since the run began"):
        find_stored_weights(spec)
    full = make_spec(f"hf:{tmp_path / 'm'}")
    assert with_frozen_digest(full) == full


PEFT_FILE = """
import warnings

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM


def model():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = AutoModelForCausalLM.from_pretrained({folder!r})
        return get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))


def data(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(0, 300, (batch_size, 12), generator=generator)
        yield {{"input_ids": ids}}, ids


def loss(outputs, targets):
    logits = outputs["logits"][:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_users_file_that_gives_a_model_of_peft_is_cut_like_any_other(kind: str, tmp_path: Path) -> None:
    stored(tmp_path / "m", kind)
    (tmp_path / "train.py").write_text(PEFT_FILE.format(folder=str(tmp_path / "m")))
    loaded = load_workload(make_spec(str(tmp_path / "train.py"), batch_size=4))
    assert loaded.layers == 4
    assert [t.requires_grad for t in loaded.boundary(1, 4)] == [False]
    assert compare_cut(loaded).verdict == SAME
