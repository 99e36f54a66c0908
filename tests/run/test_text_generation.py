"""Three stages generate what the library generates on one machine."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
from tests.helpers.commands import library_preloaded
from tests.workload.hf import hub_folders
from tests.workload.hf.test_adapter_folder import adapter_folder

from skyctl.jobs.node_sessions import connect_nodes, require_all
from skyctl.planning.generation_stages import StageLayers
from skyctl.records.cluster import Cluster, Node
from skyctl.remote.base import ConnectOptions
from skyctl.run.text_generation import TextPipeline
from skyctl.worker.rank_order import Sampling
from skyctl.workload.hf.adapter_folder import find_adapters
from skyctl.workload.starting_weights import with_adapters
from skyctl.workload.workload import load_workload
from skyctl.workload.workload_spec import make_spec

NEW_TOKENS = 12
PROMPT = [5, 17, 250, 3, 42]
CLUSTER = Cluster(name="three", nodes=tuple(Node(name=name, transport="local") for name in "abc"))


def generated(
    folder: Path, sampling: Sampling, *, dtype: str = "float32", encrypt: bool = False
) -> list[int]:
    """The tokens of a model on three nodes: the embedding, most layers, the head."""
    adapters = find_adapters(str(folder))
    if adapters is None:
        workload = hub_folders.load(folder, "context=4", batch_size=1, dtype=dtype)
    else:
        spec = make_spec(f"hf:{adapters.base},context=4", batch_size=1, dtype=dtype)
        workload = load_workload(with_adapters(spec, adapters))
    cuts = (0, 1, workload.layers - 1, workload.layers)
    stages = [
        StageLayers(f"{name}/cpu:0", start, stop)
        for name, start, stop in zip("abc", cuts, cuts[1:], strict=False)
    ]
    with library_preloaded(), connect_nodes(CLUSTER.nodes, ConnectOptions()) as nodes:
        require_all(nodes.failures)
        threads = {stage.device: 1 for stage in stages}
        pipeline = TextPipeline(
            CLUSTER, nodes.sessions, workload.spec, stages, threads, sampling, 300, encrypt
        )
        try:
            pipeline.start()
            return list(islice(pipeline.tokens(PROMPT), NEW_TOKENS))
        finally:
            pipeline.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", pytest.param("gemma3", marks=pytest.mark.matrix), "qwen3-moe"])
def test_greedy_tokens_are_the_librarys(name: str, tmp_path: Path) -> None:
    folder = hub_folders.write(tmp_path, {**hub_folders.CONFIGS[name], "tie_word_embeddings": True})
    model = hub_folders.uncut(folder).eval()
    model.save_pretrained(str(folder))
    wanted = model.generate(
        torch.tensor([PROMPT]), do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0
    )
    assert generated(folder, Sampling(), encrypt=name == "gpt2") == wanted[0, len(PROMPT) :].tolist()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_stages_with_adapters_generate_what_peft_generates(tmp_path: Path) -> None:
    import transformers

    peft = pytest.importorskip("peft")
    folder = adapter_folder(tmp_path, "qwen2", tie_word_embeddings=True)
    base = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "base"))
    model = peft.PeftModel.from_pretrained(base, str(folder)).eval()
    wanted = model.generate(
        input_ids=torch.tensor([PROMPT]),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert generated(folder, Sampling()) == wanted[0, len(PROMPT) :].tolist()


@pytest.mark.slow
def test_a_seed_draws_the_same_tokens_again(tmp_path: Path) -> None:
    folder = hub_folders.write(tmp_path, hub_folders.CONFIGS["llama"])
    hub_folders.uncut(folder).save_pretrained(str(folder))
    drawn = [generated(folder, Sampling(1.0, 0.9, seed), dtype="bfloat16") for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
