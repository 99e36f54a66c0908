"""How each command that the documents show is run. A new one needs a line here, or ``needs`` there."""

from __future__ import annotations

RUN = (
    # in this order, in one folder, by test_commands.py; models, steps and machines made small
    "skyctl --version",
    "skyctl init tower ada@192.0.2.10 --local 1",
    "skyctl init tower oldbox --local 1",
    "skyctl init --from inventory.yml",
    "skyctl init --from hostfile --slots cuda",
    "skyctl init --local 2 --force",
    "skyctl check",
    "skyctl probe gpt:layers=12,hidden=256,heads=8,context=128",
    "skyctl probe gpt:layers=4,hidden=128,heads=4,context=64",
    "skyctl plan gpt:layers=4,hidden=128,heads=4,context=64 -o plan.json",
    "skyctl plan train.py",
    "skyctl plan train.py --limit '!oldbox'",
    "skyctl plan train.py --link-dtype bfloat16@slow -o plan.json",
    "skyctl plan train.py --link-dtype int8 -o plan.json",
    "skyctl compare train.py --link-dtype bfloat16 --link-dtype int8@tower-oldbox",
    "skyctl plan train.py -o plan.json",
    "skyctl verify plan.json",
    "skyctl launch plan.json --trace",
    "skyctl launch plan.json --steps 5000 --detach",
    "skyctl ps",
    "skyctl logs",
    "skyctl logs -f",
    "skyctl attach",
    "skyctl stop",
    "skyctl bug-report -o report.zip",
    "skyctl plan train.py --parallel data",
    "skyctl compare train.py --parallel data",
    "skyctl plan --problem docs/examples/problem.json",
    "skyctl plan --problem docs/examples/problem-data.json",
)

PAGES = {
    # page → the file that runs all its commands
    "docs/finetune.md": "tests/docs/test_finetune.py",
}

MAIN_JOB = ("tests/lab/test_main_job.py", '"compare", WORKLOAD')
PAPER = ("tests/benchmarks/test_paper.py", '"compare", "--paper"')

WALK = ("tests/docs/test_architecture.py", "skyctl init --local 2")

ELSEWHERE = {
    # command → the file that runs it, and a text in that file
    "skyctl init --local 2": WALK,
    "skyctl probe gpt:layers=4,hidden=128,heads=4,context=64 --batch-size 16 --microbatches 4 "
    "-o profile.json": WALK,
    "skyctl plan gpt:layers=4,hidden=128,heads=4,context=64 --batch-size 16 --microbatches 4 --schedule 1f1b "
    "--profile profile.json --assign local-1=0:6,local-2=6:10 -o plan.json": WALK,
    "skyctl launch plan.json --steps 6": WALK,
    "skyctl sweep train.py --grid lr=1e-3,1e-2,3e-2 --grid width=64,256 --metric loss --stop median": (
        "tests/scripts/test_sweep.py",
        "docs/sweep.md",
    ),
    "make demo": ("tests/docs/test_package.py", '"demo"'),
    "make install": (".ci/run", "make check"),  # check makes the environment first
    "make check": (".ci/run", "make check"),
    "make test": ("scripts/run_tests.sh", "pytest"),
    "make test-all": (".ci/run", "make test-all"),
    "make docs": ("Makefile", "mkdocs build --strict --quiet"),  # in `make check`
    "skyctl --install-completion": ("tests/cli/test_completion.py", "--install-completion"),
    "skyctl probe train.py": ("tests/faults/test_dtypes.py", 'here.run("probe", "train.py"'),
    "skyctl launch plan.json --steps 500": ("tests/faults/test_runs.py", '"launch", "plan.json", "--steps"'),
    "skyctl launch gpt:layers=12,hidden=256,heads=8,context=128 --steps 500": (
        "tests/faults/test_dtypes.py",
        'here.run("launch", GPT',
    ),
    "skyctl launch train.py,width=512,depth=4 --steps 500": (
        "tests/faults/test_recipe.py",
        '"launch", "train.py,width=16"',
    ),
    "skyctl probe train.py --limit tower,oldbox -o profile.json": (
        "tests/lab/test_main_job.py",
        '"--limit", "n1,n2"',
    ),
    "skyctl plan gpt:layers=4,hidden=128 --data book.txt": (
        "tests/workload/hf/test_hub_launch.py",
        '"--data", "story.txt"',
    ),
    "skyctl watch": ("tests/cli/test_watch_command.py", '"skyctl", "watch"'),
    "skyctl setup train.py": ("tests/setup/test_setup.py", '"setup"'),
    "skyctl clean --dry-run": ("tests/cli/test_clean_command.py", '"--dry-run"'),
    "skyctl probe hf:models/qwen,context=256": ("tests/workload/hf/test_hub_launch.py", '"launch"'),
    "skyctl launch hf:models/qwen,context=256 --data book.txt --steps 500": (
        "tests/workload/hf/test_hub_launch.py",
        '"launch"',
    ),
    "skyctl launch hf:models/qwen,context=256 --data book.txt --lora r=16,alpha=32 --learning-rate 2e-4": (
        "tests/workload/hf/test_lora_launch.py",
        '"--lora", LORA',
    ),
    "python -m skyctl.workload.hf.export RUN/weights.safetensors hf:DIR OUT": (
        "tests/workload/hf/test_stored_files.py",
        "export.main(words)",
    ),
    "skyctl compare gpt:layers=12,hidden=256,heads=8,context=128": MAIN_JOB,
    "skyctl compare gpt:layers=12,hidden=256,heads=8,context=128 --microbatches 4,8,16,32 --nodes 2..N": (
        "tests/cli/test_compare_command.py",
        '"--microbatches", "2,4", "--nodes", "1..N"',
    ),
    "skyctl compare gpt:layers=8,hidden=256,heads=8,context=128 --measure --trace": (
        "tests/cli/test_compare_command.py",
        '"--measure", "--trace"',
    ),
    "skyctl bench-sync --bytes 40MB --sync ring,star,trees": (
        "tests/cli/test_bench_sync_command.py",
        '"--sync", "ring,star"',
    ),
    "skyctl compare --paper": PAPER,
    "skyctl compare --paper -o paper": PAPER,
    "skyctl compare gpt:layers=12,hidden=256,heads=8,context=128 --measure": MAIN_JOB,
    "skyctl launch gpt:layers=12,hidden=256 --steps 500 --dtype bfloat16 --lr-schedule cosine"
    " --warmup-steps 50 --clip-norm 1 --validate-every 100": ("tests/faults/test_recipe.py", "--lr-schedule"),
    "skyctl compare gpt:layers=4,hidden=128,heads=4,context=64 --measure --steps 20": MAIN_JOB,
}


def small(words: list[str]) -> list[str]:
    """The same command with the README's train.py in the place of built-in models (a probe takes ten seconds,
    so there is one), a few steps, one number of microbatches, and a second to plan in."""
    made = ["train.py" if word.startswith("gpt:") else word for word in words]
    if made[0] in ("probe", "plan", "compare") and "train.py" in made:
        made += ["--microbatches", "4"]
    if made[0] in ("plan", "compare"):
        made += ["--time-limit", "1"]
    if "--steps" in made:
        made[made.index("--steps") + 1] = "15" if "--detach" in made else "3"
    elif made[0] == "launch" or "--measure" in made:
        made += ["--steps", "3"]
    return made
