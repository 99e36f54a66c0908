"""``probe --quick`` without a workload: the file that was measured is found, whatever lies where we are."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.helpers.bare_records import OF_PROFILE, OF_WORKLOAD

from skyctl.errors import InputError
from skyctl.jobs.profile_recheck import request_of_profile
from skyctl.records.profile import Profile, WorkloadProfile
from skyctl.workload.shipped_files import digest_workload
from skyctl.workload.workload_spec import make_spec

FILE = """
import torch
from torch import nn
def model(): return [nn.Linear(6, 4)]
def data(batch_size, seed):
    while True: yield torch.randn(batch_size, 6), torch.randint(0, 4, (batch_size,))
"""


def test_from_another_folder_the_cluster_files_own_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    for folder in (home, elsewhere):
        folder.mkdir()
    (home / "train.py").write_text(FILE)
    digest = digest_workload(make_spec(str(home / "train.py")))
    measured = WorkloadProfile(
        source="train.py", digest=digest, batch_size=8, dtype="float32", shapes=(), **OF_WORKLOAD
    )
    profile = Profile(
        cluster="c",
        cluster_digest="d",
        created="now",
        nodes=(),
        devices=(),
        links=(),
        workload=measured,
        **OF_PROFILE,
    )
    monkeypatch.chdir(elsewhere)
    for other in (None, FILE.replace("6, 4", "6, 5")):  # nothing of that name, then another one of it
        if other is not None:
            (elsewhere / "train.py").write_text(other)
        request, workload = request_of_profile(profile, home)
        assert request is not None
        assert workload is not None
        assert request.spec.path == str(home / "train.py")
    monkeypatch.chdir(home)
    assert request_of_profile(profile, elsewhere)[0] is not None
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"train\.py is neither here nor in ") as caught:
        request_of_profile(profile, tmp_path / "lab")
    assert "skyctl probe --quick WORKLOAD" in str(caught.value.hint)
