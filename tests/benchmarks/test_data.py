"""The benchmark of data plans: an equal split's ranks train together, and each case is one of a known lab."""

import json
import socket
import subprocess
import sys

import pytest
from runs.data_prediction import CASES, CLUSTERS
from runs.prediction import LLAMA, WORKLOADS
from runs.torch_runs import RANK, carried

from skyctl.lab.lab_spec import read_lab

TINY = """
import torch
from torch import nn

def model():
    return [nn.Linear(4, 8), nn.Linear(8, 3)]

def data(batch_size, seed):
    while True:
        yield torch.randn(batch_size, 4), torch.randint(0, 3, (batch_size,))
"""
LITTLE = {**LLAMA, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 256}
LITTLE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}
SOURCES = {"train.py": TINY, "config.json": json.dumps(LITTLE)}


def test_eight_cases_of_three_labs(tmp_path):
    assert len(CASES) == 8
    assert {cluster for cluster, _ in CASES.values()} == set(CLUSTERS)
    assert {workload for _, workload in CASES.values()} == set(WORKLOADS)
    for text in CLUSTERS.values():
        (tmp_path / "lab.yaml").write_text(text)
        assert len(read_lab(tmp_path / "lab.yaml").nodes) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "form"),
    [
        ("train.py", "data"),
        pytest.param("train.py", "pipeline", marks=pytest.mark.matrix),
        pytest.param("config.json", "data", marks=pytest.mark.matrix),
        ("config.json", "pipeline"),
    ],
)
def test_ranks_of_torchs_equal_split_train_together(form, source, tmp_path):
    (tmp_path / source).write_text(SOURCES[source])
    path = tmp_path / source if source.endswith(".py") else f"hf:{tmp_path}"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = {"world": 2, "host": "127.0.0.1", "port": port, "interface": "lo"}
    told |= {"batch": 8, "microbatches": 2, "steps": 3, "form": form, **carried(str(path))}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK), json.dumps({**told, "rank": rank})],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        said = rank.communicate()[0].splitlines()
        assert rank.returncode == 0
        assert said[0] == "begun"
        assert len(json.loads(said[1])) == 3
