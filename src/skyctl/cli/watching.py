"""A run on the terminal: phases, steps, the ranks' own lines, and what Ctrl-C asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyctl.cli.common import Output, ask, interactive
from skyctl.cli.output import Ticker

if TYPE_CHECKING:
    from skyctl.launch.events import Progress, Watcher
    from skyctl.launch.spec import RankSpec


def watcher(
    out: Output,
    progress: Ticker,
    *,
    title: str = "",
    show_logs: bool = True,
    yes: bool = False,
    leaving: bool = False,
) -> Watcher:
    """What a run tells the user.

    Args:
        title: goes before every line (the strategy, in a comparison).
        yes: Ctrl-C stops it without a question.
        leaving: whether the run can go on without us.
    """
    from skyctl.launch.events import Watcher

    prefix = f"{title}: " if title else ""

    def step(done: Progress) -> None:
        left = "" if done.left_s is None else f" · {_clock(done.left_s)} left"
        progress(
            f"{prefix}step {done.step + 1} · loss {done.loss:.4f}{_validation(done)} "
            f"· {done.iteration_s:.3f} s · {done.samples_per_s:.1f} samples/s{left}",
            done.step + 1,
            done.steps,
        )

    def log(rank: RankSpec, text: str) -> None:
        if show_logs:
            out.note(f"[{rank.rank} {rank.node}] {text}")

    def interrupted() -> str:
        return "stop" if yes or not interactive() else asked(out, leaving=leaving)

    return Watcher(
        phase=lambda text: progress(f"{prefix}{text}"),
        step=step,
        log=log,
        note=lambda text: out.note(f"{prefix}{text}"),
        warn=lambda text: out.warn(f"{prefix}{text}"),
        interrupted=interrupted,
    )


def asked(out: Output, *, leaving: bool) -> str:
    """What is to become of the run: ``stop``, ``detach`` or ``go on``. A second Ctrl-C stops."""
    choices = ["stop", "detach", "go on"] if leaving else ["stop", "go on"]
    words = (
        "(s)top the run, (d)etach and let it go on, or (g)o on" if leaving else "(s)top the run, or (g)o on"
    )
    while True:
        try:
            answer = ask(out, f"interrupted: {words}? [s]", "s", yes=False).lower()
        except KeyboardInterrupt:
            return "stop"
        for choice in choices:
            if answer and choice.startswith(answer):
                return choice


def _validation(done: Progress) -> str:
    return "" if done.validation_loss is None else f" · validation {done.validation_loss:.4f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
