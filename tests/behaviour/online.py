"""Commands that start processes on two nodes: what is measured is kept by its shape, losses by value."""

from __future__ import annotations

import importlib.util
import json
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.behaviour import offline
from tests.behaviour.observing import Room, normal
from tests.behaviour.report_figures import report

CLUSTER = """\
name: two
nodes:
  - {name: a, transport: local, threads: 1}
  - {name: b, transport: local, threads: 1, slowdown: 1.5}
"""
TEXT = " ".join(f"word{i * i % 97} is followed by {i * 7 % 31};" for i in range(400))
TRAIN = """\
import torch
from torch import nn


def model():
    blocks = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.GELU())]
    return [nn.Linear(16, 64), nn.GELU(), *blocks, nn.Dropout(0.1), nn.Linear(64, 10)]


def data(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        inputs = torch.randn(batch_size, 16, generator=generator)
        yield inputs, inputs[:, :10].argmax(1)


def validation(batch_size, seed):
    return data(batch_size, seed + 1)
"""
LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
GPT = "gpt:layers=2,hidden=32,heads=2,context=16"
BERT = "bert:layers=2,hidden=32,heads=2,context=16"
HF = "hf:llama,context=12"
SIZED = ("--batch-size", "8", "--microbatches", "4")
TOLD = ("--data", "text.txt")
STEPS = ("--steps", "4", "--checkpoint-every", "0", "-y", "--json")


def furnish(room: Room) -> None:
    room.write("cluster.yaml", CLUSTER)
    room.write("train.py", TRAIN)
    room.write("text.txt", TEXT)
    room.write("llama/config.json", LLAMA)


def losses(room: Room, *words: str) -> dict[str, Any]:
    """A run's losses, step by step, and who trained."""
    done = room.run("launch", *words, *STEPS)
    if done.returncode:
        return {"exit": done.returncode, "stderr": done.stderr[-300:]}
    found = json.loads(done.stdout)
    return {
        "exit": 0,
        "loss": {str(step["step"]): step["loss"] for step in found["steps"]},
        "final_loss": found["final_loss"],
        "validation": {str(v["step"]): {"loss": v["loss"]} for v in found.get("validation", [])},
        "devices": [replica["device"] for replica in found["replicas"]],
        "weights": layout(Path(found["weights"])),
    }


def layout(path: Path) -> dict[str, str]:
    """Names, types and shapes in a safetensors file."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        head = json.loads(file.read(length))
    return {k: f"{v['dtype']}{v['shape']}" for k, v in head.items() if k != "__metadata__"}


def _planned(room: Room, workload: str, cut: int, last: int, *more: str) -> None:
    """``even.json``, ``own.json`` (b first) and ``one.json`` for a workload that is probed here."""
    common = (workload, *SIZED, *more)
    room.run("probe", *common, "-q")
    room.run("plan", *common, "--strategy", "even", "--schedule", "1f1b", "-o", "even.json")
    room.run("plan", *common, "--assign", f"b=0:{cut},a={cut}:{last}", "--schedule", "1f1b", "-o", "own.json")
    room.run("plan", *common, "--assign", f"a=0:{last}", "--schedule", "1f1b", "-o", "one.json")


def gpt_runs(room: Room) -> dict[str, Any]:
    _planned(room, GPT, 2, 6, *TOLD)
    common = (GPT, *SIZED, *TOLD)
    found = {name: losses(room, f"{name}.json", "--ignore-changes", *TOLD) for name in ("even", "own", "one")}
    again = ("even.json", "--ignore-changes", *TOLD)
    cosine = ("--lr-schedule", "cosine", "--warmup-steps", "1", "--min-learning-rate", "1e-4")
    found["recipe"] = losses(room, *again, "--clip-norm", "0.5", *cosine, "--learning-rate", "0.01")
    found["validate"] = losses(room, *again, "--validate-every", "2", "--validate-batches", "2")
    found["encrypt"] = losses(room, *again, "--encrypt")
    for schedule in ("gpipe", "zero-bubble"):
        even = ("--strategy", "even", "--schedule", schedule)
        room.run("plan", *common, *even, "-o", f"{schedule}.json")
        found[schedule] = losses(room, f"{schedule}.json", "--ignore-changes", *TOLD)
    even = ("--strategy", "even", "--schedule", "1f1b", "--link-dtype", "int8")
    room.run("plan", *common, *even, "-o", "int8.json")
    found["links int8"] = losses(room, "int8.json", "--ignore-changes", *TOLD)
    return found


def bert_runs(room: Room) -> dict[str, Any]:
    _planned(room, BERT, 2, 6)
    return {name: losses(room, f"{name}.json", "--ignore-changes") for name in ("even", "own", "one")}


def user_runs(room: Room) -> dict[str, Any]:
    """A user's file with dropout and held-out data."""
    _planned(room, "train.py", 3, 10)
    found = {name: losses(room, f"{name}.json", "--ignore-changes") for name in ("even", "own", "one")}
    found["validate"] = losses(room, "own.json", "--ignore-changes", "--validate-every", "2")
    return found


def hf_runs(room: Room) -> dict[str, Any]:
    _planned(room, HF, 2, 6, *TOLD)
    return {name: losses(room, f"{name}.json", "--ignore-changes", *TOLD) for name in ("even", "own", "one")}


def bfloat16_runs(room: Room) -> dict[str, Any]:
    _planned(room, GPT, 2, 6, *TOLD, "--dtype", "bfloat16")
    return {name: losses(room, f"{name}.json", "--ignore-changes", *TOLD) for name in ("even", "own")}


def quick_run(room: Room) -> dict[str, Any]:
    """One probe, one plan, one run."""
    common = ("train.py", *SIZED)
    found: dict[str, Any] = {"probe": room.observe("probe", *common, "--links", "none", "--json", shape=True)}
    even = ("plan", *common, "--strategy", "even", "--schedule", "1f1b", "-o", "even.json", "--json")
    found["plan"] = room.observe(*even, shape=True)
    found["run"] = losses(room, "even.json", "--ignore-changes")
    return found


def measured_commands(room: Room) -> dict[str, Any]:
    """check, probe, plan, launch, compare, and what is said of a run that has ended."""
    common = ("train.py", *SIZED)

    def shape(*words: str) -> dict[str, Any]:
        return room.observe(*words, shape=True)

    found = {
        "check": shape("check", "--json"),
        "check in words": shape("check"),
        "check one": shape("check", "--limit", "b", "--json"),
        "setup": shape("setup", "--dry-run", "--json"),
        "setup workload": shape("setup", "train.py", "--dry-run", "--json"),
        "setup remove": shape("setup", "--remove", "--json"),
        "ps before": shape("ps", "-a", "--json"),
        "plan before": shape("plan", *common, "--json"),
        "quick before": shape("probe", "train.py", "--quick", "--json"),
        "probe bare": shape("probe", "--json", "--links", "none"),
        "probe": shape("probe", *common, "-o", "profile.json", "--json"),
    }
    quick = room.run("probe", *common, "--quick", "--json")
    found["quick"] = {"exit": quick.returncode in (0, 5), "keys": sorted(json.loads(quick.stdout))}
    even = ("--strategy", "even", "--schedule", "1f1b")
    found["plan even"] = shape("plan", *common, *even, "-o", "even.json", "--json")
    found["plan optimal"] = _certain(shape("plan", *common, "--json"))
    found["verify"] = shape("verify", "even.json", "--json")
    found["export"] = shape("plan", *common, *even, "--export", "megatron", "--json")
    found["launch dry"] = shape("launch", "even.json", "--dry-run", "--json")
    train = ("--steps", "3", "--ignore-changes", "-y")
    found["launch"] = shape("launch", "even.json", *train, "--trace", "--json")
    found["launch in words"] = shape("launch", "even.json", *train)
    found["files"] = run_files(room)
    found["metrics"] = metrics(room)
    found["launch bare"] = shape("launch", *common, *even, *train, "--json")
    found["ps"] = shape("ps", "--json")
    found["ps in words"] = shape("ps")
    found["logs"] = shape("logs", "--json")
    found["logs wrong rank"] = shape("logs", "--rank", "nobody", "--json")
    found["logs supervisor"] = shape("logs", "--supervisor")
    found["attach"] = shape("attach", "--json")
    found["stop"] = shape("stop", "--json")
    (newest, *_) = json.loads(room.run("ps", "--json").stdout)["runs"]
    run_id = newest["run_id"]
    found["stop ended"] = shape("stop", run_id, "--json")
    found["join ended"] = shape("join", run_id, "b", "--json")
    found["several"] = shape("logs", run_id[:4], "--json")
    found["from run"] = _certain(
        shape("plan", "train.py", "--from-run", run_id, "--strategy", "even", "--json")
    )
    found["from run settled"] = shape(
        "plan", "train.py", "--from-run", run_id, "--dtype", "float32", "--json"
    )
    found["checkpoints of none"] = shape("checkpoint", "ls", run_id, "--json")
    found["bug-report"] = bug_report(room, run_id)
    measure = ("--measure", "--steps", "3", "--strategy", "even,heuristic", "--schedule", "1f1b", "-o", "out")
    found["compare"] = _certain(shape("compare", *common, *measure, "-y", "--json"))
    return found


def _certain(found: dict[str, Any]) -> dict[str, Any]:
    """Of plans by what was measured: which keys there are, not who holds what."""
    document = found.get("json", {})
    for key in ("stages", "unused", "predicted", "certificate"):
        if key in document:
            document[key] = "…"
    if "schedule" in document.get("problem", {}):
        document["problem"]["schedule"] = "…"
    for row in document.get("rows", []):
        for key, value in row.items():
            if key != "strategy":
                row[key] = value if isinstance(value, dict) else "…"
    return found


def run_files(room: Room) -> list[str]:
    """The names of all files and folders in the newest run's folder."""
    newest = max((room.top / "state" / "runs").iterdir())
    names = {re.sub(r"tfevents.*", "tfevents", str(p.relative_to(newest))) for p in newest.rglob("*")}
    return sorted(names)


def metrics(room: Room) -> list[list[str]]:
    newest = max((room.top / "state" / "runs").iterdir())
    return [sorted(json.loads(line)) for line in (newest / "metrics.jsonl").read_text().splitlines()]


def bug_report(room: Room, run_id: str) -> dict[str, Any]:
    done = room.run("bug-report", run_id, "-o", "report.zip", "--json")
    document = json.loads(done.stdout)
    with zipfile.ZipFile(room.folder / "report.zip") as archive:
        inside = sorted(archive.namelist())
    return {
        "exit": done.returncode,
        "keys": sorted(document),
        "files": normal(sorted(document["files"])),
        "inside": normal(inside),
    }


def mismatch(room: Room) -> dict[str, Any]:
    """A plan for other machines is refused with a table."""
    room.write("cluster.yaml", offline.CLUSTER)
    offline.furnish(room)
    plan_it = ("plan", offline.GPT, "--batch-size", "8", "--microbatches", "4", "--profile", "profile.json")
    room.run(*plan_it, "--strategy", "even", "-o", "p.json")
    done = room.run("launch", "p.json", "--steps", "1", "-y", "--json")
    error = json.loads(done.stdout)["error"]
    changes = [{"where": c["where"], "keys": sorted(c)} for c in error.pop("changes")]
    changes = [c for i, c in enumerate(changes) if c not in changes[:i]]
    return {"exit": done.returncode, "keys": sorted(error), "changes": changes}


def checkpoints(room: Room) -> dict[str, Any]:
    """Kept on the way, listed, exported, not gone on from (the run has ended well), removed."""
    common = ("train.py", *SIZED)
    room.run("probe", *common, "--links", "none", "-q")
    room.run("plan", *common, "--strategy", "even", "--schedule", "1f1b", "-o", "even.json")
    kept = ("--checkpoint-every", "2", "--keep-here", "--ignore-changes", "-y")
    found = {"launch": room.observe("launch", "even.json", "--steps", "4", *kept, "--json", shape=True)}
    (run,) = json.loads(room.run("ps", "-a", "--json").stdout)["runs"]
    run_id = run["run_id"]
    # Copied to this machine in the background: the last step may not be, and one is passed over for a newer.
    copies = json.loads(room.run("checkpoint", "ls", run_id, "--offline", "--json").stdout)["steps"]
    kept_step = max(s["step"] for s in copies if s["whole"])
    for name, words in {"ls": (), "ls offline": ("--offline",)}.items():
        done = room.run("checkpoint", "ls", run_id, *words, "--json")
        document = json.loads(done.stdout)
        found[name] = {"exit": done.returncode, "keys": sorted(document), "layers": document["layers"]}
        steps = [{**s, "step": 2} for s in document["steps"] if s["step"] == kept_step]
        found[name]["step 2"] = normal(steps, shape=True)
    for name, step in {"2": kept_step, "3": 3}.items():
        out = ("--step", str(step), "-o", f"w{name}.safetensors")
        found[f"export {name}"] = room.observe("checkpoint", "export", run_id, *out, "--json", shape=True)
    found["export 2"]["json"]["step"] -= kept_step - 2
    found["keys"] = {"weights": layout(room.folder / "w2.safetensors")}
    found["resume"] = room.observe("launch", "--resume", run_id, "--steps", "2", "-y", "--json", shape=True)
    for name in ("rm", "rm again"):
        found[name] = room.observe("checkpoint", "rm", run_id, "-y", "--json", shape=True)
    found["ls empty"] = room.observe("checkpoint", "ls", run_id, "--json", shape=True)
    return found


def detached(room: Room) -> dict[str, Any]:
    """A run in the background: listed, joined, stopped after a last checkpoint."""
    common = ("train.py", *SIZED)
    room.run("probe", *common, "--links", "none", "-q")
    room.run("plan", *common, "--strategy", "even", "--schedule", "1f1b", "-o", "even.json")
    words = ("launch", "even.json", "--steps", "1000000", "--detach", "--ignore-changes", "-y", "--json")
    found = {"launch": room.observe(*words, shape=True)}
    (run,) = json.loads(room.run("ps", "--json").stdout)["runs"]
    found["ps"] = normal({k: v for k, v in run.items() if k in ("status", "supervised", "steps", "detail")})
    found["ps keys"] = {"keys": sorted(run)}
    found["join"] = room.observe("join", run["run_id"], "b", "--json", shape=True)
    found["join nobody"] = room.observe("join", run["run_id"], "nobody", "--json", shape=True)
    stopped = room.run("stop", "--json")
    (told,) = json.loads(stopped.stdout)["runs"]
    found["stop"] = {
        "exit": stopped.returncode,
        "run": {**normal(told, shape=True), "checkpoint": told["checkpoint"] is not None},
    }
    found["stop again"] = room.observe("stop", run["run_id"], "--json", shape=True)
    found["attach"] = room.observe("attach", run["run_id"], "--json", shape=True)
    listed = json.loads(room.run("checkpoint", "ls", run["run_id"], "--json").stdout)
    found["ls"] = {"keys": sorted(listed), "whole": [s["whole"] for s in listed["steps"]][-1:]}
    return found


def fixed_plans(room: Room) -> dict[str, Any]:
    """Plans for a workload, by a profile whose figures are set."""
    offline.furnish(room)
    common = ("plan", offline.GPT, "--batch-size", "8", "--profile", "profile.json", "--json")
    even = ("--strategy", "even")
    found = {}
    for name, words in {
        "even": ("--strategy", "even", "--microbatches", "4", "--schedule", "1f1b"),
        "heuristic": ("--strategy", "heuristic", "--microbatches", "4", "--schedule", "1f1b"),
        "optimal": ("--microbatches", "4", "--schedule", "1f1b"),
        "any number": ("--schedule", "1f1b"),
        "bottleneck": ("--objective", "bottleneck", "--microbatches", "2", "--schedule", "1f1b"),
        "assigned": ("--assign", "c=0:1,a=1:4,b=4:6", "--microbatches", "4", "--schedule", "zero-bubble"),
        "eager": ("--assign", "c=0:1,a=1:4,b=4:6", "--microbatches", "4", "--schedule", "eager-1f1b"),
        "limited": ("--limit", "fast", "--microbatches", "4", "--schedule", "1f1b"),
        "left out": ("--limit", "!a", "--microbatches", "4", "--schedule", "1f1b"),
        "pinned": ("--pin-first", "c", "--pin-last", "fast", "--microbatches", "4", "--schedule", "1f1b"),
        "blocks": ("--whole-blocks", "--microbatches", "4", "--schedule", "1f1b"),
        "int8": (
            "--link-dtype",
            "int8@slow",
            "--microbatches",
            "4",
            *even,
            "--schedule",
            "gpipe",
        ),
        "pair": ("--link-dtype", "bfloat16@a-c", "--microbatches", "4", "--strategy", "even"),
        "wrong pair": ("--link-dtype", "bfloat16@a-nobody", "--microbatches", "4"),
        "not measured": ("--microbatches", "8", "--schedule", "1f1b"),
        "another batch": ("--batch-size", "16"),
        "another dtype": ("--dtype", "bfloat16"),
        "encrypted": ("--encrypt",),
    }.items():
        found[name] = offline.without_ties(room.observe(*common, *words))
        if name == "pair":
            document = found[name]["json"]
            document["certificate"] = document["predicted"] = "…"
    found["without a profile"] = room.observe("plan", offline.GPT, "--json")
    found["another workload"] = room.observe("plan", "train.py", "--profile", "profile.json", "--json")
    return found


def demo(room: Room) -> dict[str, Any]:
    found = _certain(room.observe("demo", "--steps", "2", "-y", "-o", "demo", "--json", shape=True))
    found["wrote"] = sorted(path.name for path in (room.folder / "demo").iterdir())
    return found


ROOMS: dict[str, Callable[[Room], dict[str, Any]]] = {
    "quick run": quick_run,
    "report": report,
    "fixed plans": fixed_plans,
    "measured commands": measured_commands,
    "mismatch": mismatch,
    "checkpoints": checkpoints,
    "detached": detached,
    "gpt runs": gpt_runs,
    "bert runs": bert_runs,
    "user runs": user_runs,
    "hf runs": hf_runs,
    "bfloat16 runs": bfloat16_runs,
    "demo": demo,
}


def possible(name: str) -> bool:
    return name != "hf runs" or importlib.util.find_spec("transformers") is not None


def observed(name: str) -> dict[str, Any]:
    with Room() as room:
        furnish(room)
        return ROOMS[name](room)
