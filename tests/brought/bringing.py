"""One user's file brought to skyctl: trained by two, and by plain torch beside; or refused.

The two are nodes, by skyctl's own commands, or ranks alone, which takes a second instead of ten.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from porting import plain_torch
from safetensors.torch import load_file
from tests.brought.cases import Case
from tests.helpers.commands import Skyctl
from tests.worker import driver
from torch import nn

from skyctl.errors import WorkloadError
from skyctl.worker.cut_check.comparison import compare_cut
from skyctl.worker.rank_order import RankOrder, RoutePlace, SumGroupOrder, SumOrder
from skyctl.workload.workload import Workload
from skyctl.workload.workload_spec import make_spec

BATCH, MICROBATCHES, STEPS = 8, 4, 6
SIZES = ("--batch-size", str(BATCH), "--microbatches", str(MICROBATCHES))
LENGTH = ("--steps", str(STEPS), "--checkpoint-every", "0", "--max-restarts", "0", "--yes")
SCHEDULE = os.environ.get("SKYCTL_BROUGHT_SCHEDULE", "auto")
PROGRAM = str(Path(__file__).with_name("short_probe.py"))
EQUAL = 1e-5
BUFFERS_EQUAL = 1e-4
"""Of a tensor's largest entry: sums over a batch may be added up in another order."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of bringing a file.

    Attributes:
        how: ``trained``, ``refused`` (exit code 2, with a hint), or another end, as ``failed with 1``.
        text: of the losses how far they are apart; else what the command said.
        difference: the largest relative difference of a step's loss, or of a buffer at the end.
    """

    how: str
    text: str
    difference: float = 0.0


class _EndedError(Exception):
    """A command did not do what it was asked for."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.text)
        self.outcome = outcome


def bring_to_nodes(skyctl: Skyctl, path: Path, case: Case) -> Outcome:
    """Probes, plans and launches it on two nodes, then compares."""
    try:
        _run(skyctl, "probe", str(path), *SIZES)
        run = _launch(skyctl, path, "even", SCHEDULE)
        alone = _launch(skyctl, path, "alone", "auto") if case.draws else None
    except _EndedError as exc:
        return exc.outcome
    losses, others = ([step["loss"] for step in one["steps"]] if one else None for one in (run, alone))
    assert losses is not None
    return _compare(path, losses, load_file(run["weights"]), others)


def bring_to_ranks(pool: driver.Pool, path: Path, case: Case, schedule: str) -> Outcome:
    """Loads it and compares the cut here, as a probe does, has two ranks train it, then compares losses."""
    try:
        workload = plain_torch.load(path, BATCH)
        compare_cut(workload)
    except WorkloadError as exc:
        return Outcome("refused", f"{exc.message} | next: {exc.hint}" if exc.hint else f"no hint: {exc}")
    try:
        run = _ranks(pool, workload, path, [0, (workload.layers + 1) // 2, workload.layers], schedule)
        alone = _ranks(pool, workload, path, [0, workload.layers], "1f1b") if case.draws else None
    except _EndedError as exc:
        return exc.outcome
    weights = {}
    for rank in run.results.values():
        for name, tensor in load_file(rank["weights"]).items():  # by the layer's index and its own name
            index, _, own = name.partition(".")
            weights[workload.weight_names(int(index))[own]] = tensor
    return _compare(path, run.losses, weights, alone and alone.losses)


def _ranks(
    pool: driver.Pool, workload: Workload, path: Path, cuts: list[int], schedule: str
) -> driver.Outcome:
    spec = make_spec(str(path), batch_size=BATCH).to_dict()
    orders = driver.orders(spec, cuts, MICROBATCHES, schedule, STEPS, weights=True)
    if len(cuts) > 2:
        _tell_of_ties(orders, workload, cuts[1])
    outcome = pool.run(orders)
    if outcome.errors:
        first = min(outcome.errors.values(), key=lambda error: "Peer" in error.get("type", "Peer"))
        said = f"{first.get('message')} | next: {first.get('hint')}"
        good = first.get("exit_code") == 2 and first.get("hint")
        how = "refused" if good else f"failed with {first.get('exit_code')}"
        raise _EndedError(Outcome(how, said))
    return outcome


def _tell_of_ties(orders: list[RankOrder], workload: Workload, cut: int) -> None:
    """Tells both ranks of the parameters that they share, as ``skyctl.run.sum_spec`` does."""
    shared = {one.layers for one in workload.shared_parameters if one.gradient_bytes}
    ties = sorted(layers for layers in shared if layers[0] < cut <= layers[-1])
    for rank, order in enumerate(orders if ties else ()):
        children, parent = ((1,), None) if rank == 0 else ((), 0)
        route = RoutePlace(1.0, children, parent, parent, children)
        groups = [SumGroupOrder(number, 4 * number, (route,), tie=tie) for number, tie in enumerate(ties)]
        orders[rank] = replace(order, sync=SumOrder("float32", 64, tuple(groups)))


def _compare(
    path: Path, losses: list[float], weights: dict[str, torch.Tensor], others: list[float] | None
) -> Outcome:
    """How far the losses are from ``others``; None: from plain torch's, and so are the buffers."""
    buffers = 0.0
    if others is None:
        with plain_torch.single_thread():
            file = plain_torch.ModelFile.load(path)
            begun = plain_torch.initial_weights(plain_torch.load(path, BATCH))
            others, model = plain_torch.train_model(file, begun, BATCH, MICROBATCHES, STEPS)
        buffers = _buffers_apart(model, weights)
    apart = plain_torch.largest_difference(losses, others)
    text = f"losses differ by {apart:.1e}, buffers by {buffers:.1e}; last loss {losses[-1]:.6f}"
    return Outcome("trained", text, max(apart, buffers * EQUAL / BUFFERS_EQUAL))


def is_right(outcome: Outcome, case: Case, path: Path) -> str:
    """The fault of the outcome; empty if there is none."""
    if outcome.how == "trained":
        if not case.may_train:
            return f"it must be refused, and trains: {outcome.text}"
        return "" if outcome.difference <= EQUAL else outcome.text
    if outcome.how != "refused" or not case.may_be_refused:
        return f"{outcome.how}: {outcome.text}"
    return wrong_refusal(outcome.text, case, path)


def wrong_refusal(text: str, case: Case, path: Path) -> str:
    """The fault of a refusal's message; empty if it names the line."""
    named = {int(number) for number in re.findall(rf"{path.name}, line (\d+)", text)}
    wanted = lines_with(path, case.lines)
    if not named:
        return f"it names no line of {path.name}: {text}"
    if not named & wanted:
        return f"it must name line {' or '.join(map(str, sorted(wanted)))}: {text}"
    return ""


def lines_with(path: Path, texts: Sequence[str]) -> set[int]:
    """The numbers of the file's lines that have one of these texts; no texts: of all lines."""
    lines = enumerate(path.read_text().splitlines(), 1)
    return {number for number, line in lines if not texts or any(text in line for text in texts)}


def _run(skyctl: Skyctl, *words: str) -> dict[str, Any]:
    """One command's document.

    Raises:
        _EndedError: it did not end with 0.
    """
    done = skyctl.start(*words, "--json", program=(PROGRAM,)).wait()
    try:
        document: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        document = {}
    error = document.get("error", {})
    said = f"{error.get('message') or done.stderr[-1500:]} | next: {error.get('hint')}"
    if done.returncode == 2 and error.get("hint") and "Traceback" not in done.stderr:
        raise _EndedError(Outcome("refused", said))
    if done.returncode != 0:
        raise _EndedError(Outcome(f"failed with {done.returncode}", f"{words[0]}: {said}"))
    return document


def _launch(skyctl: Skyctl, path: Path, strategy: str, schedule: str) -> dict[str, Any]:
    plan = str(skyctl.folder / f"{path.stem}-{strategy}.json")
    made = _run(skyctl, "plan", str(path), *SIZES, "--strategy", strategy, "--schedule", schedule, "-o", plan)
    assert strategy == "alone" or len(made["stages"]) == 2, made["stages"]
    return _run(skyctl, "launch", plan, *LENGTH)


def _buffers_apart(model: nn.Module, trained: dict[str, torch.Tensor]) -> float:
    apart = [0.0]
    kept = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in kept:
            there, here = trained[name].double(), buffer.double()
            apart.append(float((there - here).abs().max() / here.abs().max().clamp(min=1e-6)))
    return max(apart)
