"""The folder that starts the step clock in scripts that know nothing of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from skyctl.torch import step_clock

INJECTED = Path(step_clock.__file__).parent / "injected"
TRAIN = """
import torch
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(4):
    weight.square().sum().backward()
    optimizer.step()
print(weight.tolist())
"""


def run(code, *options, path=INJECTED, **environment):
    done = subprocess.run(
        [sys.executable, *options, "-c", code],
        env={**os.environ, "PYTHONPATH": str(path), **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_script_that_steps_is_timed(tmp_path):
    timed = run(TRAIN, SKYCTL_STEP_TIMES=str(tmp_path / "times"))
    assert steps(tmp_path / "times") == [1, 2, 3]
    plain = run(TRAIN)
    assert (timed.stdout, timed.stderr) == (plain.stdout, plain.stderr)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_script_that_asks_for_torch_before_it_imports_it_is_timed(tmp_path):
    code = "import importlib.util\nassert importlib.util.find_spec('torch')\n" + TRAIN
    run(code, SKYCTL_STEP_TIMES=str(tmp_path / "times"))
    assert steps(tmp_path / "times") == [1, 2, 3]


def test_a_script_without_torch_gets_none(tmp_path):
    code = "import sys, site; print('torch' in sys.modules, any('skyctl' in name for name in sys.modules))"
    assert run(code, SKYCTL_STEP_TIMES=str(tmp_path / "times")).stdout == "False False\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["-S", "-I", "-E"])
def test_a_python_that_reads_no_sitecustomize_is_left_alone(tmp_path, option):
    code = "import sys; print('sitecustomize' in sys.modules and sys.modules['sitecustomize'].__file__)"
    done = run(code, option, SKYCTL_STEP_TIMES=str(tmp_path / "times"))
    assert str(INJECTED) not in done.stdout


def test_the_sitecustomize_that_it_hides_is_run(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.hidden = __file__\n")
    code = "import sys; print(hidden, sys.modules['sitecustomize'].__file__)"
    done = run(code, path=f"{INJECTED}{os.pathsep}{tmp_path}", SKYCTL_STEP_TIMES=str(tmp_path / "times"))
    assert done.stdout.split() == [str(tmp_path / "sitecustomize.py")] * 2


def test_a_process_that_another_one_starts_does_not_write_into_its_file(tmp_path):
    code = TRAIN + f"import subprocess, sys; subprocess.run([sys.executable, '-c', {TRAIN!r}], check=True)\n"
    run(code, SKYCTL_STEP_TIMES=str(tmp_path / "times"))
    assert steps(tmp_path / "times") == [1, 2, 3]


def test_a_launcher_that_trains_nothing_leaves_the_file_to_its_child(tmp_path):
    code = f"import torch, subprocess, sys; subprocess.run([sys.executable, '-c', {TRAIN!r}], check=True)\n"
    run(code, SKYCTL_STEP_TIMES=str(tmp_path / "times"))
    assert steps(tmp_path / "times") == [1, 2, 3]


def test_a_file_that_can_not_be_written_is_said_once_and_the_script_goes_on(tmp_path):
    done = run(TRAIN, SKYCTL_STEP_TIMES=str(tmp_path / "none" / "times"))
    assert done.stdout == run(TRAIN).stdout
    assert done.stderr.count("skyctl: step times can't be written") == 1


def test_a_python_without_skyctl_finds_it_beside_the_folder(tmp_path):
    """As on a node, where skyctl is only sent."""
    code = "import sys; sys.path[:] = [p for p in sys.path if 'skyctl' not in p]\n"
    code += "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]\n" + TRAIN
    run(code, SKYCTL_STEP_TIMES=str(tmp_path / "times"))
    assert steps(tmp_path / "times") == [1, 2, 3]
