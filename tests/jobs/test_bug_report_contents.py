"""A bug report holds what is needed, and nothing that was planted: names, hosts, keys, passwords, paths."""

from __future__ import annotations

import io
import json
import os
import socket
import zipfile
from pathlib import Path

import pytest

from skyctl.errors import InputError
from skyctl.files import RunPaths
from skyctl.jobs.bug_report_contents import BugReport, collect_bug_report
from skyctl.jobs.redaction import Redactor

CLUSTER = """\
name: adas-clinic
defaults: {user: lovelace}
nodes:
  - name: tower
    host: tower.clinic.example.org
    identity_file: ~/.ssh/id_clinic
    env: {DB_URL: "db9pw", PIN: "48151623"}
  - {name: attic, host: 203.0.113.77, proxy_jump: "eve@bastion.clinic.example.org:2222", python: /srv/ml/py}
  - {name: b, host: fe80::12ab:34cd, user: charles}
groups: {wards: [tower]}
"""
LOG = """\
Traceback (most recent call last):
  File "/data/patients/study_7.py", line 3, in forward
  File "{home}/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 125, in forward
RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x9 and 8x3) on tower/cpu:0 (rank 1)
connecting lovelace@tower.clinic.example.org from 198.51.100.4:5555, b answers at [fe80::12ab:34cd]
PASSWORD=hunter2 api_key: "abc-def-123" {{"secret": "s3cr3t value"}} AUTHORIZATION: Bearer qwertyuiop
https://ada:pw99@registry.local/x hf_AbCdEfGhIjKlMnOp ghp_0123456789abcdefABCDEF
-----BEGIN OPENSSH PRIVATE KEY-----
b3BlbnNzaC1rZXktdjEAAAAABG5vbmU
-----END OPENSSH PRIVATE KEY-----
step 4 of 10 · loss 2.31 · 127.0.0.1 · 12:34:56 · aa:bb:cc:dd:ee:ff · dataset at ~/study/plan-b.csv
session 0123456789abcdef0123456789abcdef value of the variable: {planted}
"""
PLANTED = (
    *("adas-clinic", "lovelace", "clinic", "tower", "attic", "203.0.113.77", "id_clinic", "db9pw", "eve@"),
    *("bastion", "/srv/ml", "fe80::12ab", "charles", "wards", "patients", "study_7", "198.51.100.4"),
    *(
        "hunter2",
        "abc-def-123",
        "s3cr3t",
        "qwertyuiop",
        "pw99",
        "registry",
        "hf_AbCd",
        "ghp_0123",
        "b3BlbnNz",
    ),
    *(
        "aa:bb:cc",
        "48151623",
        "plan-b",
        "0123456789abcdef0123",
        "planted-in-the-environment",
        "retina",
        "ward-model",
        "st-marys",
        "adas-own",
    ),
)


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BugReport:
    monkeypatch.setenv("HF_TOKEN", "planted-in-the-environment")
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    paths = RunPaths.new()
    state = {
        "run_id": paths.run_id,
        "workload": "/home/lovelace/retina/ward-model.py,width=512,site=st-marys",
        "order": {"spec": {"arguments": {"width": "512", "site": "st-marys"}}},
        "cluster": "adas-clinic",
        "cluster_file": str(tmp_path / "cluster.yaml"),
        "status": "failed",
        "step": 4,
        "detail": "node attic was lost",
        "attempts": [{"devices": ["tower/cpu:0", "oldnode/cpu:0"], "error": "attic did not answer"}],
    }
    paths.state.write_text(json.dumps(state))
    plan = {"machines": [{"device": "tower/cpu:0", "cpu_model": "Ryzen 9"}], "api_token": "hunter2"}
    paths.newest_plan.write_text(json.dumps(plan))
    paths.metrics.write_text("".join(f'{{"step": {i}, "loss": 2.5}}\n' for i in range(90)))
    log = LOG.format(home=Path.home(), planted=os.environ["HF_TOKEN"])
    paths.log(0).write_text("old line\n" * 500 + log)
    event = {"event": "facts", "hostname": "adas-own-laptop.fritz", "rank": 0}
    paths.events.write_text(json.dumps(event) + '\n{"half a li')
    paths.supervisor_log.write_text(
        "2026-11-22 phase: dialling oldnode at tower.clinic.example.org, adas-own-laptop, PIN 48151623\n"
    )
    return collect_bug_report(tmp_path / "cluster.yaml", None)


def test_nothing_planted_is_in_it(report: BugReport) -> None:
    with zipfile.ZipFile(io.BytesIO(report.zipped())) as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    names = [name for name in (socket.gethostname(),) if len(name) >= 6 and name != "localhost"]
    for planted in (*PLANTED, str(Path.home()), "oldnode", *names):
        found = [name for name, text in texts.items() if planted.lower() in (name + text).lower()]
        assert not found, f"{planted!r} is in {found}"


def test_what_is_needed_is_in_it(report: BugReport) -> None:
    assert list(report.files)[:3] == ["ABOUT.txt", "versions.json", "cluster.json"]
    cluster = json.loads(report.files["cluster.json"])
    assert [node["name"] for node in cluster["nodes"]] == ["node1", "node2", "node3"]
    assert cluster["nodes"][0]["env"] == {"DB_URL": "[removed]", "PIN": "[removed]"}
    assert cluster["groups"] == {"group1": ["node1"]}
    state = json.loads(report.files["run/state.json"])
    assert (state["status"], state["step"], state["detail"]) == ("failed", 4, "node node2 was lost")
    assert state["order"]["spec"]["arguments"] == {"width": "512", "site": "argument1"}
    log = report.files["run/attempts/1/logs/rank-000.log"]
    assert (
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x9 and 8x3) on node1/cpu:0 (rank 1)" in log
    )
    assert "site-packages/torch/nn/modules/linear.py" in log
    assert "step 4 of 10 · loss 2.31 · 127.0.0.1 · 12:34:56" in log
    assert len(log.splitlines()) == 198  # 200, of which a key's three are one
    assert json.loads(report.files["run/plan.json"])["machines"][0]["cpu_model"] == "Ryzen 9"
    assert report.files["run/metrics.jsonl"].splitlines()[-1] == '{"step": 89, "loss": 2.5}'
    assert "torch" in json.loads(report.files["versions.json"])["packages"]
    for name in list(report.files)[1:]:
        assert name in report.files["ABOUT.txt"]


def test_logs_can_be_left_out(report: BugReport, tmp_path: Path) -> None:
    bare = collect_bug_report(tmp_path / "cluster.yaml", None, logs=False)
    assert set(report.files) - set(bare.files) == {
        "run/attempts/1/events.jsonl",
        "run/attempts/1/logs/rank-000.log",
        "run/supervisor.log",
    }


def test_a_broken_cluster_file_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("nodes:\n  - {name: x, hots: y}\n")
    report = collect_bug_report(tmp_path / "cluster.yaml", None)
    assert list(report.files) == ["ABOUT.txt", "versions.json"]
    assert "did you mean 'host'" in report.files["ABOUT.txt"]


def test_a_run_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run 'nope'"):
        collect_bug_report(None, "nope")


@pytest.mark.parametrize(
    "text",
    [
        "step 12 of 100 · loss 2.4131 · 0.93 s/step",
        "gpt:layers=12,hidden=256,heads=8,context=128",
        "torch 2.13.0+cpu, Python 3.11.7, CUDA 12.8",
        "block.11.attention.q_proj.weight float32[256, 1024]",
        "/usr/lib/python3.11/socket.py:835: ConnectionRefusedError: [Errno 111]",
        "node /tmp is full; skyctl.worker.rank ended with SIGKILL",
    ],
)
def test_what_is_harmless_stays(text: str) -> None:
    assert Redactor().text(text) == text
