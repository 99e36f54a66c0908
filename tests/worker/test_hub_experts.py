"""Experts of ``hf:`` models on hosts: losses, checkpoints and weights are those of ``transformers``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.helpers.commands import run_briefly
from tests.worker.expert_hosts import HostPool, Hosts, recipe
from tests.worker.reference import train
from tests.worker.sums import star
from tests.workload.hf import hub_folders

from skyctl.checkpoint.node import safetensors
from skyctl.errors import WorkloadError
from skyctl.run.expert_spec import expert_setting
from skyctl.worker.experts.expert_check import check_expert_modules
from skyctl.workload.costs import count_layer_costs, part_of_experts
from skyctl.workload.hf.export import export_model
from skyctl.workload.recipe import Recipe
from skyctl.workload.workload import Workload

STEPS = 12
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": hub_folders.CONFIGS["mixtral"],
    "qwen2-moe": {**hub_folders.CONFIGS["qwen2-moe"], "num_experts": 32, "num_experts_per_tok": 1},
    "qwen3-moe": {**hub_folders.CONFIGS["qwen3-moe"], "norm_topk_prob": True},
}
"""With 32 experts, some get no token in a step."""


def holders(name: str) -> dict[int, list[int]]:
    count = MODELS[name].get("num_experts", 4)
    return {2: [n % 2 for n in range(count)], 4: [int(n > 0) for n in range(count)]}


@pytest.fixture(scope="module")
def host_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostPool]:
    """Two hosts, for all tests."""
    pool = HostPool(tmp_path_factory.mktemp("hosts"), 2)
    try:
        yield pool
    finally:
        pool.close()


def hub_workload(folder: Path, name: str = "mixtral", **more: Any) -> Workload:
    text = folder / "text.txt"
    text.write_text("".join(f"{n} bottles, {n * n} more; " for n in range(400)))
    hub = hub_folders.write(folder / name, MODELS.get(name) or hub_folders.CONFIGS[name])
    wanted = {"batch_size": 8, "seed": 3, "learning_rate": 0.01, "data_path": str(text), **more}
    return hub_folders.load(hub, "context=8", **wanted)


def library_model(workload: Workload) -> Any:
    """The model of ``transformers`` itself, with the workload's initial weights."""
    hub = workload.model.hub
    assert hub is not None
    model = hub_folders.uncut(hub.folder)
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for layer, names in zip(workload.build(0, workload.layers), hub.names, strict=True):
            for own, tensor in layer.state_dict().items():
                model.get_parameter(names[own]).copy_(tensor)
    return model


def library_losses(workload: Workload, steps: int) -> tuple[list[float], Any]:
    """The losses that a plain loop with ``transformers`` sees, and the model that it ends with."""
    model, losses = library_model(workload), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _, (ids, targets) in zip(range(steps), workload.batches(), strict=False):
        loss = model(input_ids=ids, labels=targets).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def pipeline(driver: ModuleType, workload: Workload, cuts: Sequence[int], **options: Any) -> Any:
    more = {"recipe": recipe(STEPS), **options}
    return driver.orders(workload.spec.to_dict(), list(cuts), 4, "1f1b", STEPS, **more)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_work_of_experts_is_that_of_their_matrices(name: str, tmp_path: Path) -> None:
    workload, config, samples = hub_workload(tmp_path, name), MODELS[name], 2
    width = config.get("moe_intermediate_size", config["intermediate_size"])
    pairs = samples * 8 * config.get("num_experts_per_tok", 2)
    flops = pairs * 3 * 3 * 2 * config["hidden_size"] * width  # three matrices, in three passes
    costs = count_layer_costs(workload, samples)
    for layer in holders(name):
        assert part_of_experts(workload, layer) * costs[layer].flops == pytest.approx(flops)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_losses_and_exported_weights_are_those_of_transformers(
    name: str, pool: Any, host_pool: HostPool, driver: ModuleType, tmp_path: Path
) -> None:
    workload = hub_workload(tmp_path, name)
    losses, model = library_losses(workload, STEPS)
    seen = []
    for cuts in ([0, 7], [0, 3, 7], [0, 3, 7])[0 if name == "mixtral" else 2 :]:
        with Hosts(pipeline(driver, workload, cuts, weights=True), holders(name), host_pool.take(2)) as hosts:
            outcome = pool.run(hosts.orders)
        assert not outcome.errors, outcome.errors
        assert outcome.losses == pytest.approx(losses, rel=1e-5)
        hosts = [result["experts"]["hosts"].values() for result in outcome.results.values()]
        assert all(sum(sum(by_layer.values()) for by_layer in sent) for sent in hosts)
        seen.append(outcome.losses)
    assert seen[-1] == seen[min(1, len(seen) - 1)]
    files = [safetensors.load(result["weights"]) for result in outcome.results.values()]
    kept = tmp_path / "weights.safetensors"
    safetensors.save(kept, {name: tensor for file in files for name, tensor in file.items()}, {})
    export_model(kept, f"hf:{tmp_path / name},context=8", tmp_path / "out")
    again = type(model).from_pretrained(tmp_path / "out")
    for own, tensor in again.state_dict().items():
        torch.testing.assert_close(tensor, model.state_dict()[own], rtol=1e-3, atol=1e-4, msg=own)


def test_data_parallel_ranks_use_the_same_hosts(
    pool: Any, host_pool: HostPool, driver: ModuleType, tmp_path: Path
) -> None:
    workload = hub_workload(tmp_path)
    losses, _ = library_losses(workload, STEPS)
    orders = driver.side_by_side(workload.spec.to_dict(), 7, [3, 1], star(2), STEPS, recipe=recipe(STEPS))
    with Hosts(orders, holders("mixtral"), host_pool.take(2)) as hosts:
        outcome = pool.run(hosts.orders)
    assert not outcome.errors, outcome.errors
    assert outcome.losses == pytest.approx(losses, rel=1e-5)


def test_a_run_goes_on_with_hosts_and_without(
    pool: Any, host_pool: HostPool, driver: ModuleType, tmp_path: Path
) -> None:
    workload = hub_workload(tmp_path, "qwen2-moe", dtype="bfloat16")
    plan = Recipe(total_steps=STEPS, lr_schedule="cosine", warmup_steps=2)
    wanted = train(workload.spec.to_dict(), 4, plan)
    folder = tmp_path / "checkpoints"
    keeps = {"folder": str(folder), "every": 6, "keep": 3, "at_end": True}
    orders = pipeline(driver, workload, [0, 3, 7], recipe=plan, checkpoint=keeps)
    with Hosts(orders, holders("qwen2-moe"), host_pool.take(2)) as hosts:
        outcome = pool.run(hosts.orders)
    assert not outcome.errors, outcome.errors
    assert outcome.losses == pytest.approx(wanted.losses, rel=1e-2)
    events = [event for seen in outcome.checkpoints.values() for event in seen if event["step"] == 6]
    layers = {layer: entry["sha256"] for event in events for layer, entry in event["layers"].items()}
    resume = {"step": 6, "folder": str(folder), "layers": layers}
    orders = pipeline(driver, workload, [0, 7], recipe=plan, resume=resume)
    with Hosts(orders, holders("qwen2-moe"), host_pool.take(2)) as hosts:
        for told in (hosts.orders, orders):
            again = pool.run(told)
            assert not again.errors, again.errors
            assert again.losses == pytest.approx(outcome.losses[6:], rel=1e-3)


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe"])
def test_with_calls_failing_the_record_makes_the_same_losses(
    name: str, pool: Any, host_pool: HostPool, driver: ModuleType, tmp_path: Path
) -> None:
    workload = hub_workload(tmp_path, name)
    orders = pipeline(driver, workload, [0, 7])
    with Hosts(orders, holders(name), host_pool.take(2), 10) as hosts:
        outcome = pool.run(hosts.orders)
    assert not outcome.errors, outcome.errors
    record = outcome.results[0]["experts"]["record"]
    assert record["forwards"]
    assert record["backwards"]
    with Hosts(orders, holders(name), host_pool.take(2), record=record) as hosts:
        assert pool.run(hosts.orders).losses == outcome.losses
    for first in ("2.0", "4.0"):
        record["masks"][first]["missing"]["3"] = [0, 1, 2]
    with Hosts(orders, holders(name), host_pool.take(2), record=record) as hosts:
        masked = pool.run(hosts.orders)
    assert not masked.errors, masked.errors
    assert masked.losses[:3] == outcome.losses[:3]
    assert masked.losses[3] != outcome.losses[3]


def test_without_any_host_the_rank_goes_on_by_itself(pool: Any, driver: ModuleType, tmp_path: Path) -> None:
    workload = hub_workload(tmp_path)
    mortals = HostPool(tmp_path, 1)
    try:
        taken = mortals.take(1)

        def kill(_pool: Any, _rank: int, event: dict[str, Any]) -> None:
            if event["event"] == "step" and event["step"] == 4:
                taken[0].kill()

        orders = pipeline(driver, workload, [0, 7], weights=True)
        with Hosts(orders, {2: [0] * 4, 4: [0] * 4}, taken) as hosts:
            outcome = pool.run(hosts.orders, kill)
    finally:
        mortals.close()
    assert not outcome.errors, outcome.errors
    assert {move.get("host") for move in outcome.results[0]["experts"]["record"]["moves"]} == {None}
    assert len(outcome.losses) == STEPS
    assert sum(outcome.losses[-3:]) < sum(outcome.losses[:3])


@pytest.mark.slow
def test_the_command_trains_stored_weights_with_hosts_and_exports_them(tmp_path: Path) -> None:
    workload = hub_workload(tmp_path, "qwen2-moe")
    library_model(workload).save_pretrained(str(tmp_path / "qwen2-moe"))
    nodes = "".join(f"  - {{name: {name}, transport: local, threads: 1}}\n" for name in "abc")
    (tmp_path / "cluster.yaml").write_text(f"nodes:\n{nodes}")
    typed = ("launch", "hf:qwen2-moe,context=8", "--batch-size", "8", "--microbatches", "4")
    drawn = ("--data", "text.txt", "--seed", "3", "--learning-rate", "0.01")
    more = (*drawn, "--strategy", "even", "--steps", "5", "--json")
    done = run_briefly(tmp_path, *typed, *more, "--expert-hosts", "b,c")
    assert done.returncode == 0, done.stderr
    assert "an even placement takes" in done.stderr
    losses, model = library_losses(hub_workload(tmp_path, "qwen2-moe"), 5)
    assert [step["loss"] for step in json.loads(done.stdout)["steps"]] == pytest.approx(losses, rel=1e-5)
    exported = run_briefly(tmp_path, "checkpoint", "export", "-o", "out")
    assert exported.returncode == 0, exported.stderr
    again = type(model).from_pretrained(tmp_path / "out").state_dict()
    for own, tensor in model.state_dict().items():
        torch.testing.assert_close(again[own], tensor, rtol=1e-3, atol=1e-4)
    refused = run_briefly(tmp_path, *typed, *more, "--expert-hosts", "b,c", "--lora", "r=2")
    assert refused.returncode == 2
    assert "is not trained, as with --lora" in refused.stderr


def test_a_mask_is_the_librarys_own_rule_among_those_that_live(tmp_path: Path) -> None:
    for name in MODELS:
        (tmp_path / name).mkdir()
        workload = hub_workload(tmp_path / name, name)
        mixture = workload.build(2, 3)[0].mlp
        tokens = torch.randn(1, 40, 32, generator=torch.Generator().manual_seed(0))
        living = [n for n in range(mixture.experts.count) if n != 1]
        mixture.experts.alive = [n in living for n in range(mixture.experts.count)]
        seen = mixture(tokens)
        scores = torch.nn.functional.linear(tokens[0], mixture.gate.weight[living]).softmax(-1)
        best, chosen = scores.topk(mixture.experts.top_k, dim=-1)
        if mixture.experts.normalises:
            best = best / best.sum(-1, keepdim=True)
        experts = [mixture.experts.expert(n)(tokens[0]) for n in living]
        each = torch.stack(experts, 1).gather(1, chosen.unsqueeze(-1).expand(-1, -1, 32))
        wanted = (each * best.unsqueeze(-1)).sum(1)
        if hasattr(mixture, "shared_expert"):
            share = torch.sigmoid(mixture.shared_expert_gate(tokens[0]))
            wanted = wanted + share * mixture.shared_expert(tokens[0])
        torch.testing.assert_close(seen[0], wanted, rtol=1e-5, atol=1e-6)


REFUSED = {
    "dense": (hub_folders.CONFIGS["llama"], "has no experts"),
    "biased": (
        {
            "model_type": "dots1",
            **hub_folders.GQA,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "tie_word_embeddings": False,
        },
        "Dots1MoE: its gate has more than one weight",
    ),
    "sigmoid": (
        {
            "model_type": "minimax_m2",
            **hub_folders.GQA,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "tie_word_embeddings": False,
        },
        "its experts are not asked with what its gate gives",
    ),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_other_mixtures_are_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    config, words = REFUSED[name]
    workload = hub_folders.load(hub_folders.write(tmp_path, config))
    with pytest.raises(WorkloadError, match=words) as caught:
        expert_setting(workload, ("c",))
    assert caught.value.hint


def test_experts_are_found_without_values_and_refused_where_they_are_frozen(tmp_path: Path) -> None:
    workload = hub_workload(tmp_path, "qwen3-moe")
    setting = expert_setting(workload, ("c",))
    assert setting is not None
    assert [(layer.layer, layer.experts, layer.top_k) for layer in setting.layers] == [(2, 4, 2), (4, 4, 2)]
    whole = sum(parameter.numel() for parameter in workload.model.layers[2].parameters())
    assert setting.layers[0].part == 3 * 16 * 32 / whole
    layer = workload.build(2, 3)[0]
    layer.mlp.experts.requires_grad_(False)
    with pytest.raises(WorkloadError, match="expert 0 of layer 2 is not trained"):
        check_expert_modules([layer], 2, ())
