"""The examples shown below each command's ``--help``. Tests parse every one with the command's own parser."""

from __future__ import annotations

GPT = "gpt:layers=12,hidden=256,heads=8,context=128"

EXAMPLES: dict[str, tuple[str, ...]] = {
    "init": (
        "skyctl init tower ada@192.0.2.10 --local 1",
        "skyctl init --from inventory.yml",
        "skyctl init --from hostfile --slots cuda -o gpus.yaml",
    ),
    "check": (
        "skyctl check",
        "skyctl check --limit 'fast,!tower' --accept-new-host-keys",
        "skyctl check -c lab/cluster.yaml --json",
    ),
    "setup": (
        "skyctl setup --dry-run",
        "skyctl setup train.py --limit oldbox",
        "skyctl setup --remove",
    ),
    "probe": (
        f"skyctl probe {GPT}",
        "skyctl probe train.py --limit tower,laptop -o profile.json",
        "skyctl probe --quick",
    ),
    "plan": (
        f"skyctl plan {GPT} -o plan.json",
        "skyctl plan train.py --strategy even --pin-first laptop",
        "skyctl plan train.py --parallel hybrid",
        "skyctl plan --problem problem.json --json",
    ),
    "verify": (
        "skyctl verify plan.json",
        "skyctl verify plan.json --json",
    ),
    "run": (
        "skyctl run train.py --epochs 3",
        "skyctl run --output ckpt train_ddp.py --batch-size '{share:64}'",
        "skyctl run --per-node tower=2,laptop=1 --max-restarts 3 -m mypackage.train",
        "skyctl run -- ./simulate --seed {rank}",
    ),
    "sweep": (
        "skyctl sweep train.py --grid lr=1e-3,3e-4 --grid width=64,128 --metric loss",
        "skyctl sweep train.py --random 20 --range lr=1e-4:1e-2:log --metric loss -- --epochs 3",
        "skyctl sweep train.py --from trials.csv --per-device 2",
        "skyctl sweep --resume ab12",
    ),
    "launch": (
        "skyctl launch plan.json --steps 500",
        "skyctl launch train.py --steps 5000 --detach",
        "skyctl launch --resume ab12 --steps 1000",
        "skyctl launch train.py --batch-size 64 --init-from ab12",
    ),
    "ps": (
        "skyctl ps",
        "skyctl ps -a --json",
        "skyctl ps --offline",
    ),
    "logs": (
        "skyctl logs -f",
        "skyctl logs ab12 --rank 0 -n 20",
        "skyctl logs --supervisor",
    ),
    "attach": (
        "skyctl attach",
        "skyctl attach ab12",
    ),
    "watch": (
        "skyctl watch",
        "skyctl watch ab12 --port 8080 --no-open",
    ),
    "stop": (
        "skyctl stop",
        "skyctl stop ab12 --now",
        "skyctl stop --all",
    ),
    "compare": (
        f"skyctl compare {GPT}",
        f"skyctl compare {GPT} --measure --steps 20 -o compared",
        "skyctl compare train.py --strategy even,optimal",
        "skyctl compare train.py --parallel pipeline --measure",
    ),
    "bench-sync": (
        "skyctl bench-sync",
        "skyctl bench-sync --bytes 40MB --sync ring,star,trees",
        "skyctl bench-sync --limit tower,laptop --sync-format bfloat16 --json",
    ),
    "generate": (
        "skyctl generate ab12 'Why is the sky blue?'",
        "skyctl generate hf:models/qwen 'def fib(n):' --raw --max-tokens 100",
        "skyctl generate hf:Qwen/Qwen3-4B 'A haiku on gradients' --dtype bfloat16 --temperature 0.7 --json",
    ),
    "join": (
        "skyctl join ab12 laptop",
        "skyctl join 20261121-063012-ab12 tower oldbox",
    ),
    "checkpoint ls": (
        "skyctl checkpoint ls",
        "skyctl checkpoint ls ab12 --offline --json",
    ),
    "checkpoint export": (
        "skyctl checkpoint export ab12",
        "skyctl checkpoint export ab12 -o weights.pt",
        "skyctl checkpoint export ab12 --step 60 -o weights.safetensors",
    ),
    "checkpoint rm": (
        "skyctl checkpoint rm ab12",
        "skyctl checkpoint rm 20261121-063012-ab12 -y",
    ),
    "clean": (
        "skyctl clean --dry-run",
        "skyctl clean 'fast,!tower'",
        "skyctl clean --environments",
    ),
    "config": (
        "skyctl config",
        "skyctl config launch",
        "skyctl config checkpoint export --json",
    ),
    "bug-report": (
        "skyctl bug-report",
        "skyctl bug-report ab12 -o report.zip",
        "skyctl bug-report --no-logs --dry-run",
    ),
    "demo": (
        "skyctl demo",
        "skyctl demo --steps 30 -o demo",
    ),
    "lab up": (
        "skyctl lab up lab.yaml",
        "skyctl lab up lab.yaml --name home --python n4=/opt/venv/bin/python",
    ),
    "lab status": (
        "skyctl lab status",
        "skyctl lab status lab.yaml --json",
    ),
    "lab down": (
        "skyctl lab down lab.yaml",
        "skyctl lab down --all",
    ),
}
"""By command two to four examples, the most common first."""


def format_examples(name: str) -> str:
    """A command's examples as help shows them, one a line."""
    return "\n".join(["Examples:", *(f"$ {example}" for example in EXAMPLES[name])])
