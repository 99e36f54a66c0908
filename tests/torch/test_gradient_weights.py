import json
from pathlib import Path

import pytest
import torch
from tests.torch.ranks import SCRIPTS, run_ranks
from torch import nn

from skyctl.errors import InputError
from skyctl.torch import weigh

CASES = [
    "unequal",
    "last partial batch",
    "accumulation",
    "several buckets",
    "static graph",
    "static graph, accumulation",
    "bucket views",
    "unused parameters",
    "unused by all",
    "recomputing",
    "keyword",
    "nested",
    "compiled",
    "tokens",
    "join",
    "empty",
]


@pytest.fixture(scope="module")
def differences(tmp_path_factory):
    ends = run_ranks(SCRIPTS / "weighted_gradients.py", 3, tmp_path_factory.mktemp("ranks"))
    assert [end.returncode for end in ends] == [0, 0, 0], "".join(end.stderr for end in ends)
    return json.loads(ends[0].stdout)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process_with_the_whole_batch(differences, case):
    assert differences[case] < 1e-6


def test_bfloat16_gradients_are_as_near_as_their_digits(differences):
    assert differences["bfloat16"] < 2**-6
    assert set(differences) == {*CASES, "bfloat16"}


def test_what_can_not_be_weighted_is_refused_on_every_rank(tmp_path: Path):
    ends = run_ranks(SCRIPTS / "refused_weights.py", 2, tmp_path)
    for end in ends:
        assert end.returncode == 0, end.stderr
        errors = json.loads(end.stdout)
        assert "it needs a DistributedDataParallel" in errors["plain module"]
        assert "only once" in errors["twice"]
        assert "finds no tensor" in errors["no tensor"]
        assert "has counted no samples" in errors["inner module"]


def test_a_world_of_one_rank_needs_no_weights(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    model = nn.Linear(2, 2)
    assert weigh(model) is model
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="it needs a DistributedDataParallel"):
        weigh(model)
    assert not torch.distributed.is_initialized()
