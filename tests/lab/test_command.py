"""``skyctl lab`` from the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from skyctl.files import home
from skyctl.lab.teardown import down, leftovers

from ..helpers.processes import until

TEXT = "nodes:\n  - {name: n1, cpus: 0.5}\n  - {name: n2, cpus: 0.5, rate_mbit: 50}\n"


@pytest.mark.lab
def test_up_status_down(skyctl, tmp_path):
    file = tmp_path / "home lab.yaml"
    file.write_text(TEXT)
    out = tmp_path / "my cluster"
    try:
        done = skyctl("lab", "up", str(file), "-o", str(out), "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["cluster"] == str(out / "cluster.yaml")
        assert sorted(path.name for path in out.iterdir()) == ["cluster.yaml", "known_hosts", "ssh_config"]
        ssh = ["ssh", "-F", str(out / "ssh_config"), "-o", "BatchMode=yes", "n2", "hostname"]
        done = subprocess.run(ssh, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        assert done.stdout == "n2\n", done.stderr

        done = skyctl("lab", "status", str(file))
        assert done.returncode == 0
        assert "n2" in done.stdout
        assert "50 Mbit/s" in done.stdout
        assert [state["name"] for state in json.loads(skyctl("lab", "status", "--json").stdout)["labs"]] == [
            "home-lab"
        ]

        done = skyctl("lab", "down", str(file))
        assert (done.returncode, "nothing of it is left" in done.stdout) == (0, True), done.stderr
        assert not out.exists()
        assert leftovers("home-lab") == []
        assert skyctl("lab", "down", str(file)).returncode == 0
        assert skyctl("lab", "status", str(file)).returncode == 1
        assert skyctl("lab", "down", "nosuchlab").returncode == 2
    finally:
        down("home-lab")


@pytest.mark.lab
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_interrupted_up_leaves_nothing(tmp_path, signum, code):
    file = tmp_path / "cut.yaml"
    file.write_text("nodes:\n" + "".join(f"  - {{name: n{i}, cpus: 0.5}}\n" for i in range(12)))
    argv = [sys.executable, "-c", "from skyctl.cli.app import main; main()", "lab", "up", str(file)]
    try:
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            state = home() / "labs" / "cut" / "lab.json"
            until(state.exists)
            os.kill(child.pid, signum)
            _, output = child.communicate(timeout=60)
        assert child.returncode == code, output
        assert "Traceback" not in output
        assert leftovers("cut") == []
    finally:
        down("cut")


def test_bad_input_ends_with_2_and_names_file_and_line(skyctl, tmp_path):
    file = tmp_path / "lab.yaml"
    file.write_text(TEXT.replace("rate_mbit", "rate_mbits"))
    done = skyctl("lab", "up", str(file))
    assert done.returncode == 2
    assert f"{file}:3: unknown key 'rate_mbits' in node 'n2'; did you mean 'rate_mbit'?" in done.stderr
    assert skyctl("lab", "up", str(tmp_path / "none.yaml")).returncode == 2
    assert skyctl("lab", "down").returncode == 2


def test_without_root_it_says_so(monkeypatch):
    from skyctl.errors import InputError
    from skyctl.lab import prerequisites

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(InputError, match="needs root"):
        prerequisites.check_machine()


def test_what_is_missing_is_named_with_its_package(monkeypatch):
    from skyctl.errors import UnfitError
    from skyctl.lab import prerequisites

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(
        prerequisites, "find_program", lambda name: None if name in ("sshd", "tc") else f"/bin/{name}"
    )
    with pytest.raises(UnfitError, match="tc, sshd") as caught:
        prerequisites.check_machine()
    assert "openssh-server" in str(caught.value)
    assert "iproute2" in str(caught.value)
