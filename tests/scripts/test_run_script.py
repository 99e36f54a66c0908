"""``skyctl run`` on local nodes: what ranks get, how they fail, what comes home, who goes on with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.bare_records import OF_DEVICE, OF_PROFILE

from skyctl.files import save_profile
from skyctl.records.profile import DeviceProfile, Profile
from skyctl.run.scripts.share_trials import MAX_TRIALS
from skyctl.script.script_task import has_accelerator

from ..helpers.commands import Skyctl, run_here
from ..helpers.processes import until

PRINT_ENVIRONMENT = """\
import json, os, sys
names = [n for n in os.environ if n.startswith(("TORCH", "MASTER", "ROLE", "GROUP", "LOCAL", "OMP"))]
names += ["RANK", "WORLD_SIZE"]
said = json.dumps({name: os.environ[name] for name in names} | {"argv": sys.argv[1:]})
os.write(1, (said + "\\n").encode())  # in one piece: torchrun's ranks share a pipe
"""
FAILS = """\
import os, signal, sys, time
how, until_restart = sys.argv[1], int(sys.argv[2])
rank, restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("rank", rank, "restart", restart, flush=True)
if restart < until_restart:
    if rank == 1 and how == "raise":
        raise ValueError("no good")
    if rank == 1 and how == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
    if rank == 1 and how == "exit":
        sys.exit(7)
    time.sleep(600)
"""
TICKS = """\
import os, time
os.makedirs("kept", exist_ok=True)
with open("kept/rank.txt", "w") as file:
    file.write(os.environ["RANK"])
tick = 0
while not os.path.exists(os.environ["ENOUGH"]):
    print("tick", tick, flush=True)
    tick += 1
    time.sleep(0.2)
print("the end", flush=True)
"""
"""Goes on until a file is there, on any machine."""


def lines(text: str) -> list[str]:
    """The lines that ranks printed, in order of rank, without who it was."""
    return [line.partition("] ")[2] for line in sorted(text.splitlines()) if line.startswith("[")]


def run_id(here: Skyctl) -> str:
    return max(path.name for path in (here.state / "runs").iterdir())


def state(here: Skyctl) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((here.state / "runs" / run_id(here) / "state.json").read_text())
    return found


def test_ranks_get_torchruns_variables(here: Skyctl) -> None:
    (here.folder / "show.py").write_text(PRINT_ENVIRONMENT)
    done = here.run("run", "show.py", "--lr", "0.1", "{share:10}", "{rank}")
    ours = [json.loads(line) for line in lines(done.stdout)]
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "show.py")
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    said = subprocess.run(
        [sys.executable, *torchrun], cwd=here.folder, env=env, capture_output=True, text=True, check=True
    )
    theirs = sorted((json.loads(line) for line in said.stdout.splitlines()), key=lambda one: one["RANK"])
    same = {"RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"}
    other = {"GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"}  # three nodes, not one
    for mine, one in zip(ours, theirs, strict=True):
        assert {name for name in one if not name.startswith("TORCHELASTIC_SIGNALS")} <= mine.keys()
        assert all(mine[name] == one[name] for name in same - other)
        assert (mine["LOCAL_RANK"], mine["LOCAL_WORLD_SIZE"], mine["GROUP_WORLD_SIZE"]) == ("0", "1", "3")
    assert [one["argv"] for one in ours] == [
        ["--lr", "0.1", share, rank] for share, rank in (("4", "0"), ("3", "1"), ("3", "2"))
    ]
    assert len({(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in ours}) == 1


def test_accelerate_is_told_of_nodes_without_an_accelerator(tmp_path: Path) -> None:
    assert not has_accelerator(tmp_path)
    (tmp_path / "nvidiactl").touch()
    assert not has_accelerator(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert has_accelerator(tmp_path)


def test_unlike_numbers_of_ranks_and_any_command(here: Skyctl) -> None:
    words = (
        "--per-node",
        "b=2,a=1",
        "--env",
        "COLOUR=red",
        "--",
        "sh",
        "-c",
        "echo $RANK {local_rank} $COLOUR",
    )
    done = here.run("run", *words)
    assert lines(done.stdout) == ["0 0 red", "1 0 red", "2 1 red"]


def test_a_module_a_program_and_a_script_elsewhere(here: Skyctl, tmp_path: Path) -> None:
    (here.folder / "pack").mkdir()
    (here.folder / "pack" / "go.py").write_text("import sys; print('module', sys.argv[1:])")
    assert lines(here.run("run", "--limit", "a", "-m", "pack.go", "x").stdout) == ["module ['x']"]
    program = here.folder / "prog"
    program.write_text("#!/bin/sh\necho program $1\n")
    program.chmod(0o755)
    assert lines(here.run("run", "--limit", "a", "--", "./prog", "{rank}").stdout) == ["program 0"]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "go.py").write_text("import helper; print(helper.NAME)")
    (tmp_path / "elsewhere" / "helper.py").write_text("NAME = 'helped'")
    assert lines(here.run("run", "--limit", "a", "../elsewhere/go.py").stdout) == ["helped"]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", "rank 1 (node b, 127.0.0.1) ended with exit status 1"),
        ("signal", "rank 1 (node b, 127.0.0.1) was ended by SIGSEGV"),
        ("exit", "rank 1 (node b, 127.0.0.1) ended with exit status 7"),
    ],
)
def test_the_rank_that_fails_is_named_and_the_others_end(here: Skyctl, how: str, said: str) -> None:
    (here.folder / "fails.py").write_text(FAILS)
    done = here.run("run", "fails.py", how, "9", code=None)
    assert done.returncode == 1
    assert said in done.stderr
    assert ("ValueError: no good" in done.stderr) == (how == "raise")
    assert state(here)["status"] == "failed"


def test_all_ranks_are_started_anew(here: Skyctl) -> None:
    (here.folder / "fails.py").write_text(FAILS)
    done = here.run("run", "--max-restarts", "2", "--json", "fails.py", "exit", "1")
    found = json.loads(done.stdout)
    assert (found["status"], found["restarts"]) == ("done", 1)
    assert [rank["returncode"] for rank in found["ranks"]] == [0, 0, 0]
    assert [one["why"] for one in state(here)["attempts"]] == ["launched", "restart 1 of 2"]


def test_output_comes_home_and_equal_names_are_kept(here: Skyctl) -> None:
    (here.folder / "writes.py").write_text(
        "import os\n"
        "rank = os.environ['RANK']\n"
        "before = sorted(os.listdir('out'))\n"
        "open(f'out/{rank}.txt', 'w').write(rank)\n"
        "open('out/all.txt', 'w').write(rank)\n"
        "print(before)\n"
    )
    assert lines(here.run("run", "--output", "out", "writes.py").stdout) == ["[]"] * 3
    out = here.folder / "out"
    found = {p.relative_to(out).as_posix(): p.read_text() for p in out.rglob("*") if p.is_file()}
    assert found == {
        "0.txt": "0",
        "1.txt": "1",
        "2.txt": "2",
        "all.txt": "0",
        "rank-1/all.txt": "1",
        "rank-2/all.txt": "2",
    }
    assert (
        lines(here.run("run", "--output", "out", "writes.py").stdout)
        == ["['0.txt', '1.txt', '2.txt', 'all.txt']"] * 3
    )
    assert {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()} == set(found)


def test_all_that_is_written_comes_home(here: Skyctl) -> None:
    (here.folder / "helper.py").write_text("NAME = 'model.pt'\n")
    (here.folder / "train.py").write_text(
        "import os, sys\nimport helper\n"
        "first = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
        "print(os.path.exists(helper.NAME))\n"
        "if first and os.environ['RANK'] == '0':\n"
        "    open(helper.NAME, 'w').write('trained')\n"
        "    sys.exit(3)\n"
        "if first:\n    import time; time.sleep(100)\n"
    )
    before = {path.name for path in here.folder.iterdir()}
    done = here.run("run", "--output", ".", "--max-restarts", "1", "train.py")
    assert lines(done.stdout).count("True") == 3
    assert {path.name for path in here.folder.iterdir()} == before | {"model.pt"}
    assert (here.folder / "model.pt").read_text() == "trained"


def test_ctrl_c_ends_it_and_output_comes_home(here: Skyctl) -> None:
    (here.folder / "ticks.py").write_text(TICKS)
    child = here.start("run", "--output", "kept", "ticks.py", ENOUGH="/nowhere")
    until(lambda: "[0 a] tick 2" in child.out, lambda: child.text)
    child.interrupt()
    done = child.end(130)
    assert "output files have come to" in done.stderr
    assert (here.folder / "kept" / "rank.txt").read_text() == "0"
    assert state(here)["status"] == "stopped"


def test_detached_it_is_listed_attached_to_and_ends(here: Skyctl) -> None:
    enough = here.folder / "enough"
    (here.folder / "ticks.py").write_text(TICKS)
    words = ("run", "--detach", "--json", "--output", "kept", "ticks.py")
    left = json.loads(here.run(*words, ENOUGH=str(enough)).stdout)
    assert left == {"run_id": run_id(here), "detached": True}
    (listed,) = json.loads(here.run("ps", "--json").stdout)["runs"]
    assert (listed["status"], listed["steps"], listed["workload"]) == ("running", None, "ticks.py")
    until(lambda: here.run("logs", "-n", "1", "--rank", "1").stdout.startswith("tick "))
    child = here.start("attach")
    until(lambda: "[2 c] tick " in child.out, lambda: child.text)
    enough.touch()
    child.end(0)
    assert (here.folder / "kept" / "rank-1" / "rank.txt").read_text() == "1"
    again = json.loads(here.run("attach", "--json").stdout)
    assert (again["status"], again["output_files"]) == ("done", 3)


def test_a_killed_launcher_is_followed(here: Skyctl) -> None:
    enough = here.folder / "enough"
    (here.folder / "ticks.py").write_text(TICKS)
    child = here.start("run", "ticks.py", ENOUGH=str(enough))
    until(lambda: "[0 a] tick 2" in child.out, lambda: child.text)
    child.kill()
    (found,) = json.loads(here.run("ps", "--json").stdout)["runs"]
    assert found["detail"] == "ranks on 3 of 3 nodes go on"
    enough.touch()
    here.run("attach")
    log = here.state / "runs" / run_id(here) / "logs" / "rank-000.log"
    *ticks, last = log.read_text().splitlines()
    assert (ticks, last) == ([f"tick {number}" for number in range(len(ticks))], "the end")
    assert state(here)["status"] == "done"


def test_stopped_from_another_terminal(here: Skyctl) -> None:
    (here.folder / "ticks.py").write_text(TICKS)
    here.run("run", "--detach", "ticks.py", ENOUGH="/nowhere")
    (ended,) = json.loads(here.run("stop", "--json").stdout)["runs"]
    assert ended["status"] == "stopped"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "what is to be run?"),
        (("trian.py",), "there is no script trian.py; did you mean train.py?"),
        (("train",), "train is no Python file"),
        (("--lr", "0.1", "train.py"), "skyctl run train.py --lr 0.1"),
        (("--per-node", "x", "train.py"), "--per-node x is no number"),
        (("--per-node", "d=1", "train.py"), "names node 'd', which does not take part"),
        (("--dry-run", "--per-node", "gpu", "train.py"), "no GPU is known of a, b, c"),
        (("--shares", "a=3,b=1", "train.py"), "--shares gives c no samples"),
        (("train.py", "{share:2}"), "can't give each of 3 ranks a sample"),
        (("--env", "NOWHERE", "train.py"), "NOWHERE is not set here"),
        (("--min-nodes", "4", "train.py"), "--min-nodes 4: the run has 3 nodes"),
        (("--output", "train.py", "train.py"), "--output train.py is a file"),
        (("--workdir", "w", "--ship", "x", "train.py"), "--ship does not go with it"),
        (("--", "./nothere"), "there is no program ./nothere"),
        (("--balance", "3", "--", "sh", "x"), "a command has none that is known"),
        (("--balance", "3", "--shares", "a=1,b=1,c=1", "train.py"), "leave one of them out"),
        (("--turns", "fare", "train.py"), "needs fifo, fair, srtf, pack or priority=N"),
        (("--turns", "srtf", "train.py"), "a script does not say how many steps it makes"),
        (("--turns", "fair", "--", "sh", "x"), "a command has none that is known"),
        (
            ("--turns", "fair", "--env", "CUDA_VISIBLE_DEVICES=1", "train.py"),
            "and --env CUDA_VISIBLE_DEVICES",
        ),
    ],
)
def test_mistakes_are_said_before_anything_runs(
    words: tuple[str, ...],
    said: str,
    here: Skyctl,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (here.folder / "train.py").write_text("print('never')")
    monkeypatch.chdir(here.folder)
    done = run_here(capsys, "run", *words)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--shares", "a=3,b=1,c=1", "train.py", "{share:64}"), 2, "the shares add up to 5"),
        (("--workdir", "/nowhere", "train.py"), 1, "there is no folder /nowhere on this node"),
        (("--", "nowhere-to-be-found"), 1, "there is no program 'nowhere-to-be-found' on this node"),
        (("--per-node", "gpu", "train.py"), 2, "no GPU on a (torch there finds none), b (torch there"),
        (("--ship", "nothing", "train.py"), 2, "--ship nothing: there is no such file"),
    ],
)
def test_mistakes_that_nodes_notice(here: Skyctl, words: tuple[str, ...], code: int, said: str) -> None:
    (here.folder / "train.py").write_text("print('never')")
    done = here.run("run", *words, code=code)
    assert said in done.stderr
    assert "never" not in done.stdout


def test_a_port_that_is_taken_is_said(here: Skyctl) -> None:
    import socket

    (here.folder / "train.py").write_text("print('never')")
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen(1)
        port = str(taken.getsockname()[1])
        done = here.run("run", "--master-port", port, "train.py", code=None)
    assert done.returncode == 1
    assert f"port {port} is not free on this node" in done.stderr


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import torch\n", ()),
        ("import torch\n", ("--", "--model", "x")),
        ("import os\nrank = os.environ['RANK']\ndef model(): ...\n", ()),
        (
            "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--x', required=True)\n"
            "parser.parse_args()\ndef model(): ...\n",
            (),
        ),
    ],
)
def test_launch_of_a_script_points_here(
    source: str,
    words: tuple[str, ...],
    here: Skyctl,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (here.folder / "train.py").write_text(source)
    monkeypatch.chdir(here.folder)
    done = run_here(capsys, "launch", "train.py", *words)
    assert done.returncode == 2
    assert "skyctl run train.py" in " ".join(done.stderr.split())


def test_a_rank_that_hangs_is_named_and_says_where(here: Skyctl) -> None:
    hangs = str(here.folder / "hangs")
    (here.folder / "hangs.py").write_text(
        "import os, time\n"
        "def stuck():\n"
        "    time.sleep(10_000)\n"
        "if os.environ['RANK'] == '1':\n"
        f"    open({hangs!r}, 'w').close()\n"
        "else:\n"
        f"    while not os.path.exists({hangs!r}):\n"
        "        pass\n"
        "    began = time.process_time()\n"
        "    while time.process_time() - began < 2.5:\n"
        "        pass\n"
        "stuck()\n"
    )
    done = here.run("run", "--stall", "4", "hangs.py", code=None)
    assert done.returncode == 1
    assert "rank 1 (node b) hangs" in done.stderr
    assert 'hangs.py", line 3 in stuck' in done.stderr


UNEQUAL = """\
import gc
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

samples = int(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
found = os.listdir("kept")
for _ in range(40):  # so many that a trial of three steps ends before them
    time.sleep((0.01, 0.03, 0.03)[rank] * samples)
    optimizer.zero_grad()
    model(torch.randn(samples, 8)).square().mean().backward()
    optimizer.step()
open(f"kept/{rank}.txt", "w").write(str(samples))
print(samples, found)
del model, optimizer
gc.collect()
dist.barrier()  # else a rank of DDP over Gloo may abort as it ends (torch 2.13)
dist.destroy_process_group()
"""


def balanced(said: list[str]) -> list[int]:
    """The shares of 15 that two or three ranks have told of, the first of which is three times as fast."""
    assert all(line.endswith(" []") for line in said), "nothing of a trial is there"
    shares = [int(line.split()[0]) for line in said]
    assert sum(shares) == 15
    # Of equal ones 8 of two and 5 of three; 11 and 9 where nothing else runs.
    assert shares[0] >= {2: 9, 3: 7}[len(shares)]
    return shares


def test_shares_are_balanced_by_the_scripts_own_steps(here: Skyctl) -> None:
    (here.folder / "train.py").write_text(UNEQUAL)
    done = here.run("run", "--balance", "3", "--output", "kept", "train.py", "{share:15}")
    shares = balanced(lines(done.stdout))
    assert "shares a {}, b {}, c {}".format(*shares) in done.stderr
    *trials, last = [(one["why"], one.get("trial", False)) for one in state(here)["attempts"]]
    assert trials in ([("timing 3 steps", True)] * 2, [("timing 3 steps", True)] * MAX_TRIALS)
    assert last == ("shares by measured speed", False)
    assert json.loads((here.state / "runs" / run_id(here) / "outcome.json").read_text())["restarts"] == 0


ASKS = UNEQUAL.replace("samples = int(sys.argv[1])", "from skyctl.torch import share").replace(
    "found = ", "samples = share(15)\nfound = "
)


def test_detached_shares_that_the_script_asks_for_are_balanced_first(here: Skyctl) -> None:
    (here.folder / "train.py").write_text(ASKS)
    words = ("--limit", "a,b", "--balance", "3", "--output", "kept", "train.py")
    begun = here.run("run", "--detach", *words)
    shares = balanced(lines(here.run("attach").stdout)[-2:])
    assert "shares a {}, b {}".format(*shares) in begun.stderr
    *trials, last = [one.get("trial", False) for one in state(here)["attempts"]]
    assert trials in ([True] * 2, [True] * MAX_TRIALS)
    assert not last


def test_balance_refuses_a_script_that_asks_for_no_share(here: Skyctl) -> None:
    (here.folder / "train.py").write_text(UNEQUAL.replace("int(sys.argv[1])", "1"))
    done = here.run("run", "--limit", "a,b", "--balance", "3", "--output", "kept", "train.py", code=2)
    assert "--balance has no batch to divide" in done.stderr
    assert state(here)["status"] == "failed"


def test_a_script_asks_for_its_share_by_the_probed_speeds(
    here: Skyctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = tuple(
        DeviceProfile(
            id=f"{node}/cpu:0",
            node=node,
            name="cpu",
            threads=1,
            slowdown=1.0,
            memory_bytes=1e9,
            memory_from="free memory",
            reserved_bytes=0.0,
            flops_per_s=flops_per_s,
            **OF_DEVICE,
        )
        for node, flops_per_s in (("a", 4e10), ("b", 1e10), ("c", 1e10))
    )
    known = Profile(
        cluster="three",
        cluster_digest="d",
        created="2026-11-21T06:30:12Z",
        nodes=(),
        devices=devices,
        links=(),
        **OF_PROFILE,
    )
    monkeypatch.setenv("SKYCTL_HOME", str(here.state))
    save_profile(known)
    (here.folder / "train.py").write_text(
        "import os\nfrom skyctl.torch import share, shares\n"
        "print(share(64), shares(6), os.environ.get('SKYCTL_SHARES'))\n"
    )
    assert lines(here.run("run", "train.py").stdout) == [
        "43 (4, 1, 1) None",
        "11 (4, 1, 1) None",
        "10 (4, 1, 1) None",
    ]
    assert lines(here.run("run", "--shares", "a=1,b=1,c=2", "train.py").stdout) == [
        f"{share} (2, 1, 3) 1,1,2" for share in (16, 16, 32)
    ]


def test_a_launcher_killed_in_a_trial_has_it_begun_anew(here: Skyctl) -> None:
    (here.folder / "train.py").write_text(UNEQUAL.replace("range(40)", "range(16)"))
    two = ("--limit", "a,b", "--output", "kept")
    child = here.start("run", "--balance", "10", *two, "train.py", "{share:15}")
    until(lambda: '"event": "step"' in events(here), lambda: child.text)
    child.kill()
    done = here.run("attach", "-y")
    balanced(lines(done.stdout)[-2:])


def events(here: Skyctl) -> str:
    """The events of the first attempt's ranks so far, as text."""
    found = list((here.state / "runs").glob("*/attempts/1/events.jsonl"))
    return found[0].read_text() if found else ""


def test_a_script_too_short_to_be_timed_keeps_equal_shares(here: Skyctl) -> None:
    (here.folder / "train.py").write_text("import sys\nprint(sys.argv[1])\n")
    done = here.run("run", "--balance", "3", "train.py", "{share:6}")
    assert lines(done.stdout)[-3:] == ["2", "2", "2"]
    assert "shares stay equal" in done.stderr


SEALED = """\
import os
import sys
import torch
import torch.distributed as dist

dist.init_process_group("skyctl")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print(total.item(), "skyctl" in dist.get_backend())
dist.destroy_process_group()
"""


def test_with_its_backend_asked_for_a_script_may_use_it(here: Skyctl) -> None:
    (here.folder / "train.py").write_text(SEALED)
    here.run("run", "train.py", code=1)  # nobody has given its ranks a secret
    cluster = here.folder / "cluster.yaml"
    cluster.write_text("backend: skyctl\n" + cluster.read_text())
    done = here.run("run", "train.py")
    assert lines(done.stdout) == ["6.0 True"] * 3, done.stderr
