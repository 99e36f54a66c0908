"""Folders of peft's adapters: read, refused, and generating what ``PeftModel`` generates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.workload.hf import hub_folders
from tests.workload.hf.test_generation import greedy, librarys

from skyctl.errors import WorkloadError
from skyctl.workload.hf.adapter_folder import find_adapters
from skyctl.workload.starting_weights import find_stored_weights, with_adapters
from skyctl.workload.workload import load_workload
from skyctl.workload.workload_spec import make_spec

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings(  # peft asks for it
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


def adapter_folder(
    tmp_path: Path, kind: str = "llama", *, tie_word_embeddings: bool = False, **config: Any
) -> Path:
    """Adapters with random values, for a model of random weights in ``base``, as peft saves them."""
    tied = {"tie_word_embeddings": tie_word_embeddings}
    base = hub_folders.write(tmp_path / "base", {**hub_folders.CONFIGS[kind], **tied})
    model = hub_folders.uncut(base)
    model.save_pretrained(str(base))
    asked = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **config}
    model = peft.get_peft_model(model, peft.LoraConfig(**asked, fan_in_fan_out=kind == "gpt2"))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(str(tmp_path / "adapters"))
    return tmp_path / "adapters"


def changed(folder: Path, **values: Any) -> str:
    """The folder, with other values in its config."""
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **values}))
    return str(folder)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("llama", {}),
        ("gpt2", {"use_rslora": True, "target_modules": ["c_attn", "c_fc"], "bias": "lora_only"}),
        ("qwen3", {"use_dora": True, "modules_to_save": ["lm_head"], "lora_dropout": 0.1}),
    ],
)
def test_greedy_tokens_are_those_of_peft(kind: str, config: dict[str, Any], tmp_path: Path) -> None:
    import transformers

    folder = adapter_folder(tmp_path, kind, **config)
    base = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "base"))
    without = librarys(base.eval())
    wanted = librarys(peft.PeftModel.from_pretrained(base, str(folder)).eval())
    adapters = find_adapters(str(folder))
    assert adapters is not None
    found = greedy(load_workload(with_adapters(make_spec(f"hf:{adapters.base}", batch_size=1), adapters)))
    assert found == wanted != without


def test_nodes_are_sent_the_base_models_weights_and_the_adapters(tmp_path: Path) -> None:
    adapters = find_adapters(str(adapter_folder(tmp_path)))
    assert adapters is not None
    workload = load_workload(with_adapters(make_spec(f"hf:{adapters.base}", batch_size=1), adapters))
    stored = find_stored_weights(workload.spec)
    assert stored is not None
    for index, layer in enumerate(workload.build(0, workload.layers)):
        sent, built = stored.layer(index), layer.state_dict()
        assert sent.keys() == built.keys()
        assert all(torch.equal(built[name], tensor) for name, tensor in sent.items())


def test_the_tokenizer_beside_the_adapters_counts(tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path)
    hub_folders.tokenizer(tmp_path / "base")
    adapters = find_adapters(f"hf:{folder}")
    assert adapters is not None
    assert adapters.tokenizer == tmp_path / "base"
    hub_folders.tokenizer(folder)
    assert adapters.tokenizer == folder


def test_a_whole_model_and_a_run_are_no_adapters(tmp_path: Path) -> None:
    adapter_folder(tmp_path)
    assert find_adapters(str(tmp_path / "base")) is None
    assert find_adapters("ab12") is None
    assert find_adapters("hf:nobody/nothing") is None


@pytest.mark.parametrize(
    ("values", "message", "hint"),
    [
        ({"base_model_name_or_path": "some/model"}, "no folder some/model", "hf download some/model"),
        ({"base_model_name_or_path": "/gone"}, "no folder /gone", "bring it back"),
        ({"base_model_name_or_path": None}, "of which model", "base_model_name_or_path"),
        ({"peft_type": "IA3"}, "'IA3'", "merge_and_unload"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern", "merge_and_unload"),
        ({"init_lora_weights": "pissa"}, "'pissa'", "merge_and_unload"),
        ({"target_modules": ".*q_proj"}, "pattern", "merge_and_unload"),
        ({"revision": "v2"}, "'v2'", "base_model_name_or_path"),
        ({"r": 0}, "r=0", ""),
    ],
)
def test_what_cannot_be_used_is_refused(
    values: dict[str, Any], message: str, hint: str, tmp_path: Path
) -> None:
    folder = changed(adapter_folder(tmp_path), **values)
    with pytest.raises(WorkloadError) as caught:
        find_adapters(folder)
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")


def test_adapters_of_another_model_are_refused(tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path)
    hub_folders.uncut(
        hub_folders.write(tmp_path / "other", {**hub_folders.CONFIGS["llama"], "hidden_size": 64})
    )
    adapters = find_adapters(changed(folder, base_model_name_or_path=str(tmp_path / "other")))
    assert adapters is not None
    with pytest.raises(WorkloadError, match="does not fit hf:other"):
        load_workload(with_adapters(make_spec(f"hf:{adapters.base}", batch_size=1), adapters))
