"""FedProx's experiment: FedAvg without its stragglers beside FedProx with their partial work.

Li et al. 2020 (1812.06127), by the draws of docs/examples/fedprox.py: synthetic(1,1) and synthetic(0,0), 30
owners, 10 a round, 20 epochs of SGD (rate 0.01, batch 10), 200 rounds, 0, 50 and 90% stragglers. All methods
are played side by side in this process, on one core. Prints one JSON line a data set and draw; figures are of
the last 20 rounds: mean accuracy and loss, and the loss's standard deviation.

    python benchmarks/fedprox.py --write --plot              # ten minutes; table and plot of docs/rhythms.md
    python benchmarks/fedprox.py --flower PYTHON --draw 1    # beside Flower; PYTHON has flwr and ray
    python benchmarks/fedprox.py --owners --rounds 50        # beside a run of skyctl by 30 owners, one set
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from runs.fedprox_owners import RunFailedError, by_owners
from runs.fedprox_peers import FlowerError, by_flower
from runs.fedprox_rounds import METHODS, Federation, History, simulate
from tables.page import machine, markdown, replaced

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "rhythms.md"
PICTURE = ROOT / "docs" / "images" / "fedprox.png"
SETS = ((1.0, 1.0), (0.0, 0.0))
DRAWS = (0, 1, 2)
ROUNDS = 200
LAST = 20
GAIN = {(1.0, 1.0): 0.12, (0.0, 0.0): 0.08}
"""At 90% stragglers FedProx with µ = 1 is to be so much more accurate than FedAvg."""
STEADIER = 10
"""And its loss is to deviate so many times less."""
FLOWER_WITHIN = 0.015
FLOWER_TIMES = 2.0
OWNERS_DRAW = 1
"""It has the fewest samples."""
OWNERS_WITHIN = 1e-6


class Played(NamedTuple):
    """One data set and draw."""

    federation: Federation
    history: History


def title(federation: Federation) -> str:
    """As in ``synthetic(1,1)``."""
    return f"synthetic({federation.alpha:g},{federation.beta:g})"


def figures(accuracy: Any, loss: Any) -> dict[str, float]:
    """Of a method's last rounds."""
    return {
        "accuracy": round(float(accuracy[-LAST:].mean()), 5),
        "loss": round(float(loss[-LAST:].mean()), 5),
        "loss_deviation": round(float(loss[-LAST:].std()), 5),
    }


def line(played: Played) -> dict[str, Any]:
    """The line that is printed of one data set and draw."""
    history, rounds = played.history, len(played.history.loss)
    return {
        "benchmark": "fedprox",
        "set": title(played.federation),
        "draw": played.federation.draw,
        "rounds": rounds,
        "samples": sum(len(labels) for _, labels, _, _ in played.federation.samples),
        "methods": {
            method.label: figures(history.accuracy[:, column], history.loss[:, column])
            for column, method in enumerate(METHODS)
        },
        "round_s": round(history.seconds / rounds, 4),
    }


def verdict(lines: Sequence[dict[str, Any]], federation: Federation) -> dict[str, Any]:
    """At 90% stragglers, FedProx with µ = 1 beside FedAvg: means over the draws."""
    pairs = [(one["methods"]["fedprox 1 90%"], one["methods"]["fedavg 90%"]) for one in lines]
    gain = mean(ours["accuracy"] - plain["accuracy"] for ours, plain in pairs)
    steadier = mean(plain["loss_deviation"] for _, plain in pairs) / mean(
        ours["loss_deviation"] for ours, _ in pairs
    )
    wanted = GAIN[federation.alpha, federation.beta]
    return {
        "benchmark": "fedprox",
        "set": title(federation),
        "draws": [one["draw"] for one in lines],
        "accuracy_gain": round(gain, 4),
        "loss_deviation_times_less": round(steadier, 1),
        "reached": gain >= wanted and steadier >= STEADIER,
    }


def beside_flower(python: str, federation: Federation, rounds: int) -> dict[str, Any]:
    """Flower's figures and ours by method, and seconds a round: all of ours at once, and one alone."""
    own = simulate(federation, rounds)
    methods = {}
    flower = list(by_flower(python, federation, rounds))  # to its end: the two take no time from each other
    for column, (method, found) in enumerate(flower):
        alone = simulate(federation, rounds, [method])
        ours = figures(own.accuracy[:, column], own.loss[:, column])
        flowers = figures(found.accuracy, found.loss)
        methods[method.label] = {
            "accuracy": ours["accuracy"],
            "flower_accuracy": flowers["accuracy"],
            "loss": ours["loss"],
            "flower_loss": flowers["loss"],
            "alone_round_s": round(alone.seconds / rounds, 4),
            "flower_round_s": round(found.round_s, 4),
        }
    apart = max(abs(one["accuracy"] - one["flower_accuracy"]) for one in methods.values())
    flower_s = sum(one["flower_round_s"] for one in methods.values())
    return {
        "benchmark": "fedprox beside flower",
        "set": title(federation),
        "draw": federation.draw,
        "rounds": rounds,
        "methods": methods,
        "round_s": round(own.seconds / rounds, 4),
        "alone_round_s": round(sum(one["alone_round_s"] for one in methods.values()), 4),
        "flower_round_s": round(flower_s, 4),
        "largest_difference": round(apart, 5),
        "reached": apart <= FLOWER_WITHIN and flower_s >= FLOWER_TIMES * own.seconds / rounds,
    }


def write(lines: Sequence[dict[str, Any]]) -> None:
    """Puts the table, means over the draws, into the document."""
    head = [
        "",
        *(f"{name}, {share}" for share in ("0%", "50%", "90%") for name in ("FedAvg", "µ = 0", "µ = 1")),
    ]
    names = [
        name.replace("fedavg 0%", "fedprox 0 0%")
        for share in ("0%", "50%", "90%")
        for name in (f"fedavg {share}", f"fedprox 0 {share}", f"fedprox 1 {share}")
    ]
    rows = []
    for alpha, beta in SETS:
        of_set = [one for one in lines if one["set"] == f"synthetic({alpha:g},{beta:g})"]
        for what, key, form in (
            ("accuracy, %", "accuracy", "{:.1f}"),
            ("loss", "loss", "{:.2f}"),
            ("loss deviates", "loss_deviation", "{:.3f}"),
        ):
            factor = 100 if key == "accuracy" else 1
            means = [mean(one["methods"][name][key] for one in of_set) * factor for name in names]
            rows.append([f"{of_set[0]['set']}, {what}", *map(form.format, means)])
    draws = ", ".join(str(one["draw"]) for one in of_set)
    how = f"Means of draws {draws}. `python benchmarks/fedprox.py --write` · {machine()}."
    body = f"{markdown(head, rows)}\n\n{how}"
    DOCUMENT.write_text(replaced(DOCUMENT.read_text(encoding="utf-8"), "fedprox", body), encoding="utf-8")


def plot_losses(played: Sequence[Played]) -> None:
    """The loss by round, as in the paper's first figure: of the first draw of each data set."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    firsts = [one for one in played if one.federation.draw == played[0].federation.draw]
    figure = Figure(figsize=(10, 3 * len(firsts)), layout="constrained")
    FigureCanvasAgg(figure)
    plots = figure.subplots(len(firsts), 3, squeeze=False, sharex=True)
    looks = {"fedavg": ("tab:orange", ":"), "fedprox 0": ("tab:pink", "--"), "fedprox 1": ("tab:cyan", "-")}
    for row, one in zip(plots, firsts, strict=True):
        for plot, share in zip(row, (0.0, 0.5, 0.9), strict=True):
            for column, method in enumerate(METHODS):
                if method.stragglers == share:
                    colour, line_style = looks[method.name]
                    label = {"fedavg": "FedAvg, stragglers dropped"}.get(
                        method.name, f"FedProx, µ = {method.mu:g}"
                    )
                    plot.plot(one.history.loss[:, column], line_style, color=colour, label=label)
            plot.set_title(f"{title(one.federation)}, {share:.0%} stragglers", fontsize=10)
            plot.set_ylim(0, 4)
        row[0].set_ylabel("training loss")
    for plot in plots[-1]:
        plot.set_xlabel("round")
    plots[0][-1].legend(fontsize=8)
    figure.savefig(PICTURE, dpi=110)


def main() -> int:
    """Exit code 1 where a goal of the experiment is missed (looked at with all draws, or beside Flower)."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draw", type=int, action="append", metavar="SEED", help="of these generator seeds")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N")
    parser.add_argument("--flower", metavar="PYTHON", help="beside Flower, in that interpreter's environment")
    parser.add_argument("--owners", action="store_true", help="beside real owners, of the first set and draw")
    parser.add_argument("--write", action="store_true", help="put the table into docs/rhythms.md")
    parser.add_argument(
        "--plot", action="store_true", help="draw the first draw's losses for docs/rhythms.md"
    )
    given = parser.parse_args()
    try:
        if given.owners:
            return beside_owners(Federation(*SETS[0], (given.draw or [OWNERS_DRAW])[0]), given.rounds)
        return play(given)
    except (FlowerError, RunFailedError) as exc:
        print(f"fedprox: {exc}", file=sys.stderr)
        return 1


def beside_owners(federation: Federation, rounds: int) -> int:
    """FedProx with 90% stragglers as a run of skyctl; exit code 1 where it differs from the simulation."""
    method = next(method for method in METHODS if method.label == "fedprox 1 90%")
    with TemporaryDirectory(prefix="fedprox-") as folder:
        found = by_owners(federation, method, rounds, Path(folder))
    print(json.dumps({"benchmark": "fedprox by owners", "set": title(federation), **found}), flush=True)
    return int(max(found["weights_differ_by"], found["test_loss_differs_by"]) > OWNERS_WITHIN)


def play(given: argparse.Namespace) -> int:
    """The data sets and draws asked for, in this process, or beside Flower."""
    reached = True
    played: list[Played] = []
    lines: list[dict[str, Any]] = []
    for alpha, beta in SETS:
        of_set = []
        for seed in given.draw or DRAWS:
            federation = Federation(alpha, beta, seed)
            if given.flower:
                beside = beside_flower(given.flower, federation, given.rounds)
                print(json.dumps(beside), flush=True)
                reached = reached and beside["reached"]
                continue
            played.append(Played(federation, simulate(federation, given.rounds)))
            of_set.append(line(played[-1]))
            print(json.dumps(of_set[-1]), flush=True)
        if of_set:
            found = verdict(of_set, federation)
            print(json.dumps(found), flush=True)
            reached = reached and (found["reached"] or given.draw is not None)
        lines += of_set
    if given.write and lines:
        write(lines)
    if given.plot and played:
        plot_losses(played)
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
