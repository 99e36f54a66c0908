"""Scripts as the documentation of five frameworks has them: ``skyctl run`` on unequal nodes next to torchrun.

DDP, accelerate, ``Trainer``, TRL's ``SFTTrainer`` and Lightning (examples/scripts), with one thread and the
same world size, on three nodes over real SSH. Prints one JSON line: by framework, whether all losses that
were printed are the same, how far the weights that came home are from torchrun's, and the seconds of both.

    sudo .venv/bin/python benchmarks/frameworks.py     # 5 minutes, and as much for the environment at first

The frameworks are in an environment of their own, build/frameworks, which is made where it is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from runs.labs import Bench, lab

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "examples" / "scripts"
NODES = 3
LAB = """\
nodes:
  - {name: n1, cpus: 0.8}
  - {name: n2, cpus: 0.6}
  - {name: n3, cpus: 0.4}
"""
PACKAGES = ("accelerate", "transformers", "trl", "lightning", "datasets")
LOSS = re.compile(r"loss\D{0,4}(\d+\.\d+(?:e-?\d+)?)")
OTHER_RANK = re.compile(r"\[[1-9]\d* ")
APART = """\
import json, sys
from pathlib import Path
import torch

def tensors(path):
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file
        return load_file(path)
    found = torch.load(path, map_location="cpu", weights_only=False)
    return found.get("state_dict", found)

ours, theirs = (Path(name) for name in sys.argv[1:])
worst, files = 0.0, 0
for path in sorted(p for p in theirs.rglob("*") if p.suffix in (".pt", ".safetensors", ".ckpt")):
    files += 1
    a, b = tensors(ours / path.relative_to(theirs)), tensors(path)
    for name, value in b.items():
        if torch.is_tensor(value) and value.is_floating_point():
            worst = max(worst, ((a[name] - value).abs().max() / value.abs().max().clamp_min(1e-12)).item())
print(json.dumps([files, worst]))
"""


def make_environment() -> Path:
    """The Python that has the frameworks, and the torch that this one has."""
    folder = ROOT / "build" / "frameworks"
    python = folder / "bin" / "python"
    if not (folder / "made").exists():
        venv.create(folder, with_pip=True, clear=True)
        torch = f"torch=={version('torch').partition('+')[0]}"
        subprocess.run([python, "-m", "pip", "install", "--quiet", torch, *PACKAGES], check=True)
        (folder / "made").touch()
    return python


def use_python(bench: Bench, python: Path) -> None:
    """Has every node of the lab use that Python."""
    path = Path(bench.env["SKYCTL_CLUSTER"])
    cluster = yaml.safe_load(path.read_text())
    for node in cluster["nodes"]:
        node["python"] = str(python)
    path.write_text(yaml.safe_dump(cluster))


def played(words: list[str], folder: Path, env: dict[str, str]) -> tuple[list[float], float]:
    """The losses that rank 0 of a script printed, in order, and the seconds of the run.

    Some frameworks print on one rank of each node: under skyctl lines begin with their rank.
    """
    began = time.monotonic()
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(words)} ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
    lines = [line for line in done.stdout.splitlines() if not OTHER_RANK.match(line)]
    return [float(value) for value in LOSS.findall("\n".join(lines))], time.monotonic() - began


def compare(bench: Bench, python: Path, script: Path) -> dict[str, Any]:
    """One script, both ways, each in a folder of its own."""
    env = {**bench.env, "OMP_NUM_THREADS": "1"}
    folders = {name: bench.folder / f"{script.stem}-{name}" for name in ("skyctl", "torchrun")}
    for folder in folders.values():
        folder.mkdir()
        shutil.copy(script, folder)
    local = [
        str(python),
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={NODES}",
        script.name,
    ]
    theirs, theirs_s = played(local, folders["torchrun"], {**env, "ACCELERATE_USE_CPU": "1"})
    run = [sys.executable, "-m", "skyctl", "run", "--env", "OMP_NUM_THREADS=1", "--output", ".", script.name]
    ours, ours_s = played(run, folders["skyctl"], env)
    apart = subprocess.run(
        [python, "-c", APART, *map(str, folders.values())], capture_output=True, text=True, check=True
    )
    files, worst = json.loads(apart.stdout)
    return {
        "losses": len(theirs),
        "same_losses": ours == theirs,
        "weight_files": files,
        "weights_relatively_apart": worst,
        "skyctl_s": round(ours_s, 1),
        "torchrun_s": round(theirs_s, 1),
    }


def main() -> None:
    """Brings the lab up, runs every script both ways, takes it down again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("scripts", nargs="*", help="names in examples/scripts; default: all")
    given = parser.parse_args()
    chosen = [SCRIPTS / name for name in given.scripts] or sorted(SCRIPTS.glob("*.py"))
    python = make_environment()
    with lab(LAB) as bench:
        use_python(bench, python)
        found = {script.stem: compare(bench, python, script) for script in chosen}
    print(json.dumps({"benchmark": "frameworks", "nodes": NODES, "scripts": found}))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
