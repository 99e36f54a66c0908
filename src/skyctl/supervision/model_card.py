"""The model card of an exported ``hf:`` model: README.md, as the Hugging Face Hub reads it.

It names no path, host or device: people publish it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from skyctl import __version__
from skyctl.checkpoint.launcher.stored_run import StoredRun
from skyctl.files import write_atomic
from skyctl.run.step_history import StepHistory
from skyctl.supervision.run_settings import request_of, surveyed_of
from skyctl.workload.hf import hub_folder
from skyctl.workload.workload_spec import WorkloadSpec

CARD_NAME = "README.md"
DEFAULT_DATA = "the source code of Python's standard library"


def write_model_card(folder: Path, run: StoredRun, step: int, *, merged: bool = False) -> None:
    """Writes a README.md that says what was trained how; one that is there is kept.

    Args:
        folder: that the model was exported to.
        step: steps that were done.
        merged: adapters are merged into the model.

    Raises:
        SkyctlError: the disk is full or not writable, or the run's state is of another version.
    """
    if not (folder / CARD_NAME).exists():
        write_atomic(folder / CARD_NAME, model_card(run, step, merged=merged), mode=None)


def model_card(run: StoredRun, step: int, *, merged: bool = False) -> str:
    """The text of ``write_model_card``."""
    from huggingface_hub import ModelCardData  # late: it comes with transformers

    spec = request_of(run.state).spec
    typed, _ = hub_folder.parse_hub_source(run.state.workload)
    model = hub_name(typed)
    is_adapter = spec.lora is not None and not merged
    data = ModelCardData(
        base_model=model,
        library_name="peft" if is_adapter else "transformers",
        tags=["skyctl", *(["lora"] if spec.lora is not None else [])],
    )
    base = _code(model or typed.resolve().name)
    kind = base
    if spec.lora is not None:
        kind = f"{base} with merged LoRA adapters" if merged else f"A LoRA adapter of {base}"
    rows = "\n".join(f"| {name} | {value} |" for name, value in _rows(run, spec, step))
    return (
        f"---\n{data.to_yaml().strip()}\n---\n\n# {base}, fine-tuned\n\n"
        f"{kind}, trained with skyctl {__version__}.\n\n| | |\n|---|---|\n{rows}\n"
    )


def hub_name(typed: Path) -> str | None:
    """The Hub's name of the model of a folder as it was typed; None: it is not known."""
    if not typed.is_dir() and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(typed)):
        return str(typed)
    cached = re.search(r"/models--([\w.-]+?)--([\w.-]+)/snapshots/", str(typed.resolve()))
    return None if cached is None else f"{cached[1]}/{cached[2]}"


def _rows(run: StoredRun, spec: WorkloadSpec, step: int) -> Iterator[tuple[str, str]]:
    """(what, value) of how the model was trained."""
    recipe, history = request_of(run.state).recipe, StepHistory.read(run.paths.metrics)
    if (init := run.state.init_from) is not None:
        yield "began with", f"run {init.run}" if init.run is not None else _code(Path(init.path).name)
    yield "data", _data(run, spec)
    if spec.lora is not None:
        given = {name: value for name, value in spec.lora.items() if value not in (None, False)}
        yield "LoRA", _code(", ".join(f"{name}={value}" for name, value in given.items()))
    unit = run.plan.problem.rhythm.unit
    yield f"{unit}s", f"{step:,}"
    yield "batch size", f"{spec.batch_size:,}"
    yield "learning rate", _learning_rate(run, spec)
    yield (
        "learning-rate schedule",
        recipe.lr_schedule + (f", {recipe.warmup_steps} warm-up {unit}s" if recipe.warmup_steps else ""),
    )
    yield "precision", spec.dtype
    if step - 1 in history.steps:
        yield "training loss", f"{history.steps[step - 1][0]:.4f}"
    validated = {done + 1: found.loss for done, found in history.validation.items() if done < step}
    if validated:
        last, best = max(validated), min(validated, key=lambda done: validated[done])
        yield "validation loss", f"{validated[last]:.4f} after {unit} {last:,}"
        yield "lowest validation loss", f"{validated[best]:.4f} after {unit} {best:,}"


def _data(run: StoredRun, spec: WorkloadSpec) -> str:
    if spec.random_inputs:
        return "random tokens"
    if spec.data_path is None:
        return DEFAULT_DATA
    text = _code(Path(spec.data_path).name)
    if spec.records is None:
        return text
    counted = surveyed_of(run.state)
    if counted is None:
        return f"{text}: {spec.records['kind']}"
    more = "" if counted["whole"] else "more than "
    return (
        f"{text}: {more}{counted['records']:,} records ({spec.records['kind']}) of {counted['tokens']:,} "
        f"tokens, {counted['learnt']:,} of them learnt"
    )


def _learning_rate(run: StoredRun, spec: WorkloadSpec) -> str:
    """As it was given, else the highest of any step."""
    if spec.learning_rate is not None:
        return f"{spec.learning_rate:g}"
    highest = 0.0
    with suppress(OSError, ValueError, TypeError), run.paths.metrics.open(encoding="utf-8") as lines:
        for line in lines:
            highest = max(highest, float(json.loads(line).get("learning_rate") or 0.0))
    return f"{highest:g}" if highest else "not known"


def _code(text: str) -> str:
    """As code in a cell of a Markdown table."""
    return f"`{text.translate({ord('|'): '/', ord('`'): '_', ord(chr(10)): ' '})}`"
