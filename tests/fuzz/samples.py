"""The samples to be mutated: small, well-formed inventories, problems, plans, profiles, safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.helpers.bare_records import OF_DEVICE, OF_NODE

WORKLOAD = "gpt:layers=2,hidden=32,heads=2,context=16"

INVENTORY: dict[str, Any] = {
    "name": "home",
    "defaults": {"user": "ada", "identity_file": "~/.ssh/id", "python": "python3", "env": {"A": "1"}},
    "nodes": [
        "alias",
        "ada@example.org",
        {
            "name": "tower",
            "host": "192.0.2.10",
            "port": 22,
            "proxy_jump": "bastion",
            "devices": ["cuda:0", "cuda:1"],
            "threads": 8,
            "memory_gib": 20,
            "interface": "tailscale0",
            "env": {"OMP_NUM_THREADS": "8"},
        },
        {"name": "laptop", "transport": "local", "slowdown": 2.0},
    ],
    "groups": {"fast": ["tower"], "data": ["laptop", "fast"]},
}

INVENTORY_TEXT = b"""\
name: home   # a comment
defaults: &d {user: ada, python: python3}
nodes:
  - alias
  - name: tower
    host: 192.0.2.10
    env:
      OMP_NUM_THREADS: "8"
    devices: [cpu]
  - {name: laptop, transport: local, slowdown: 2.0}
groups: {fast: [tower], 'data set': [laptop, fast]}
"""


def problem(devices: int = 3) -> dict[str, Any]:
    """Unequal layers and devices, links, a shared line, everything that version 2 has."""
    names = [f"n{i}/cpu:0" for i in range(devices)]
    layers = [
        {
            "name": f"block.{i // 2}.{'attention' if i % 2 == 0 else 'mlp'}",
            "flops": 1e9 * (1 + i % 2),
            "state_bytes": 1e8,
            "activation_bytes": 1e6 * (1 + i % 3),
            "output_bytes": 1e5,
            "workspace_bytes": 1e5,
            "deferred_bytes": 1e5,
        }
        for i in range(5)
    ]
    times = {
        "forward_s": [0.01] * 5,
        "backward_s": [0.02] * 5,
        "weight_s": [0.01] * 5,
        "optimizer_s": [0.001] * 5,
    }
    return {
        "kind": "skyctl/problem",
        "version": 2,
        "layers": layers,
        "devices": [
            {
                "id": name,
                "flops_per_s": 1e10 * (1 + i),
                "memory_bytes": 1e9,
                "reserved_bytes": 1e6,
                "handling_s": 1e-4,
            }
            for i, name in enumerate(names)
        ],
        "times": {names[0]: times},
        "links": [
            {"source": a, "target": b, "latency_s": 0.001, "bandwidth_bytes_per_s": 1e7}
            for a in names
            for b in names
            if a != b
        ],
        "shared": [{"name": "uplink", "bandwidth_bytes_per_s": 5e6, "links": [[names[0], names[1]]]}],
        "first_stage": [names[0]],
        "last_stage": None,
        "microbatches": 4,
        "receive_window": 1,
        "schedule": "1f1b",
        "objective": "iteration",
        "recompute": True,
    }


def repeated() -> dict[str, Any]:
    """Repeated layers and the largest stage as objective: proved in another way."""
    made = {**problem(4), "objective": "bottleneck", "times": {}, "shared": [], "first_stage": None}
    made["layers"] = [{**made["layers"][i % 2], "name": f"l{i}"} for i in range(8)]
    return made


def plans() -> list[dict[str, Any]]:
    """One a strategy and objective, with their certificates and proofs."""
    from skyctl import Problem
    from skyctl import plan as make

    found = []
    for raw in (problem(), repeated()):
        for strategy in ("even", "heuristic", "optimal"):
            made = make(Problem.model_validate_json(json.dumps(raw)), strategy=strategy, time_limit_s=2.0)
            found.append(json.loads(made.to_json()))
    return found


def profile(digest: str, nodes: tuple[str, ...] = ("a", "b")) -> dict[str, Any]:
    """Two nodes measured with the workload; a line, sites, an uplink and what a run saw."""
    signatures = ("attention", "mlp")
    layer = {
        "flops": 3e6,
        "state_bytes": 1e6,
        "activation_bytes": 1e5,
        "output_bytes": 1e4,
        "workspace_bytes": 0.0,
        "gradient_bytes": 2e5,
        "gradient_matrices": [],
    }
    timings = [
        {
            "signature": signature,
            "microbatch_size": 2,
            "forward_s": 0.01,
            "backward_s": 0.02,
            "optimizer_s": 0.001,
            "spread": 0.01,
            "repeats": 5,
            "interval": 0.01,
            "weight_s": 0.01,
            "split_s": 0.021,
        }
        for signature in signatures
    ]
    conditions = {"wall_s": 2.0, "own_cpus": 1.0, "others_cpus": 0.1, "share": 0.9, "notes": ["busy"]}
    return {
        "kind": "skyctl/profile",
        "version": 13,
        "cluster": "home",
        "cluster_digest": "d",
        "created": "2026-01-01T00:00:00Z",
        "nodes": [
            {
                "name": name,
                "hostname": name,
                "platform": "Linux",
                "python": "3.11.7",
                "torch": "2.13.0",
                "cpu_model": "x",
                "cpus": 2.0,
                "memory_total_bytes": 1e9,
                "memory_available_bytes": 1e9,
                "address": "192.0.2.1",
                "interface": "eth0",
                **OF_NODE,
                "site": name,
            }
            for name in nodes
        ],
        "devices": [
            {
                "id": f"{name}/cpu:0",
                "node": name,
                "name": "x",
                "threads": 1,
                "slowdown": 1.0,
                "memory_bytes": 1e9,
                "memory_from": "free memory",
                "reserved_bytes": 1e6,
                "flops_per_s": 1e9,
                "timings": timings,
                **OF_DEVICE,
                "handling_s": 1e-4,
                "reduce_byte_s": 3e-10,
                "message_byte_s": 1e-9,
                "conditions": conditions,
            }
            for name in nodes
        ],
        "links": [
            {"source": f"{a}/cpu:0", "target": f"{b}/cpu:0", "latency_s": 0.001, "bandwidth_bytes_per_s": 1e7}
            for a in nodes
            for b in nodes
            if a != b
        ],
        "lines": [
            {"node": nodes[0], "direction": "in", "bandwidth_bytes_per_s": 1e6, "peers": list(nodes[1:])}
        ],
        "sites": [{"name": name, "nodes": [name]} for name in nodes],
        "uplinks": [
            {
                "site": nodes[0],
                "direction": "out",
                "bandwidth_bytes_per_s": 1e6,
                "pairs": [[nodes[0], nodes[1]]],
            }
        ],
        "workload": {
            "source": WORKLOAD,
            "digest": digest,
            "batch_size": 8,
            "dtype": "float32",
            "shapes": [
                {
                    "microbatch_size": 2,
                    "microbatches": 4,
                    "layers": [
                        {
                            **layer,
                            "name": f"block.{i}.{signature}",
                            "signature": signature,
                            "deferred_bytes": 0.0,
                        }
                        for i in range(2)
                        for signature in signatures
                    ],
                }
            ],
            "ties": [],
            "comparison": {"verdict": "same"},
        },
        "encrypted": False,
        "interrupted": False,
        "observations": [
            {
                "run_id": "r",
                "seen": "2026-01-01T00:00:00Z",
                "steps": 9,
                "spread": 1.1,
                "device": f"{nodes[0]}/cpu:0",
                "digest": digest,
                "microbatch_size": 2,
                "probed_s": 0.1,
                "seen_s": 0.12,
                "layers": [0, 2],
            }
        ],
    }


def tensors(path: Path) -> bytes:
    """A safetensors file with two layers."""
    import torch

    from skyctl.checkpoint.node.safetensors import save

    state = {
        "0.weight": torch.ones(2, 3),
        "0.bias": torch.zeros(0),
        "1.weight": torch.ones(4, dtype=torch.bfloat16),
    }
    save(path, state, {"format": "pt"})
    return path.read_bytes()
