"""The benchmark of data plans: an equal split's ranks train together, and each case is one of a known lab."""

import json
import socket
import subprocess
import sys

import pytest
from runs.data_prediction import CASES, CLUSTERS
from runs.prediction import WORKLOADS
from runs.torch_runs import RANK

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


def test_eight_cases_of_three_labs(tmp_path):
    assert len(CASES) == 8
    assert {cluster for cluster, _ in CASES.values()} == set(CLUSTERS)
    assert {workload for _, workload in CASES.values()} == set(WORKLOADS)
    for text in CLUSTERS.values():
        (tmp_path / "lab.yaml").write_text(text)
        assert len(read_lab(tmp_path / "lab.yaml").nodes) == 4


@pytest.mark.parametrize("form", ["data", "pipeline"])
def test_ranks_of_torchs_equal_split_train_together(form):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = {"world": 2, "host": "127.0.0.1", "port": port, "interface": "lo"}
    told |= {"text": TINY, "batch": 8, "microbatches": 2, "steps": 3, "form": form}
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
