"""A sweep's trials over a real sshd: two nodes, of which one is lost."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from skyctl.records.cluster import Cluster
from skyctl.records.script_request import ScriptRequest
from skyctl.records.sweep import SweepRequest, TrialState
from skyctl.remote.session_factory import open_session
from skyctl.sweep.sweep_folder import SweepFolder
from skyctl.sweep.sweep_runner import SweepRunner
from skyctl.sweep.trial_devices import find_devices

from ..helpers.processes import parent, until
from .conftest import Sshd

TRIAL = """\
import json, os, sys, time
x = sys.argv[1].partition("=")[2]
print("process", os.getpid(), flush=True)
if x == "2" and not os.path.exists(MARK):
    open(MARK, "w").close()
    time.sleep(600)  # until its node is lost
time.sleep(3)
print(json.dumps({"loss": int(x)}))
open("model.txt", "w").write(x)
"""


def test_trials_of_a_lost_node_run_on_the_other(sshd: Sshd, tmp_path: Path) -> None:
    nodes = (sshd.node(name="one"), sshd.node(name="other"))
    folder = SweepFolder(tmp_path / "sweep")
    request = SweepRequest(
        sweep_id="s",
        created="2026-11-21T06:30:12Z",
        cluster="c",
        cluster_file="cluster.yaml",
        script=ScriptRequest(kind="script", words=("trial.py",), ranks={"one": 1, "other": 1}),
        files={},
        metric="loss",
        trials=4,
    )
    folder.create(request)
    for number in range(1, 5):
        folder.write_trial(TrialState(number=number, parameters={"x": str(number)}))
    cluster = Cluster(name="c", nodes=nodes)

    def kill_an_agent() -> None:
        pid = until(lambda: int(folder.log(2).read_text().split()[1]))
        os.kill(parent(parent(pid)), signal.SIGKILL)

    killer = threading.Thread(target=kill_an_agent)
    with open_session(nodes[0], sshd.options()) as one, open_session(nodes[1], sshd.options()) as other:
        sessions = {"one": one, "other": other}
        files = {"trial.py": TRIAL.replace("MARK", repr(str(tmp_path / "mark"))).encode()}
        runner = SweepRunner(folder, request, cluster, find_devices(cluster), files, sessions)
        killer.start()
        outcome = runner.run()
        killer.join()
    assert [trial.status for trial in outcome.trials] == ["done"] * 4
    assert len(outcome.lost) == 1
    assert {trial.device for trial in outcome.trials[1:]} <= {"one/cpu:0", "other/cpu:0"}
    assert outcome.trials[1].device not in {f"{node}/cpu:0" for node in outcome.lost}
    assert outcome.best is not None
    assert outcome.best.number == 1
    assert (folder.best / "files" / "model.txt").read_text() == "1"
