"""The values of options: what the shell completes them to, and how typed text becomes a value.

Completion asks no node and imports nothing heavy; what can't be read completes to nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import typer

from skyctl.errors import InputError, SkyctlError

if TYPE_CHECKING:
    from skyctl.planning.link_dtypes import LinkChoice
    from skyctl.planning.parallelism_choice import ParallelChoice
    from skyctl.planning.schedule_choice import ScheduleChoice
    from skyctl.records.cluster import Cluster
    from skyctl.records.problem import Objective, SyncRoutes
    from skyctl.records.sync_format import SyncFormat

SCHEDULES = ("auto", "1f1b", "eager-1f1b", "zero-bubble", "gpipe", "sequential")
OBJECTIVES = ("iteration", "bottleneck")
STRATEGIES = ("even", "alone", "heuristic", "optimal")
PARALLEL = ("auto", "pipeline", "data", "hybrid")
SYNC_ROUTES = ("auto", "ring", "star", "server", "trees")
DTYPES = ("float32", "bfloat16")
SYNC_FORMATS = ("float32", "bfloat16", "fixed32", "int8", "powersgd:4")
"""As the shell completes them; PowerSGD has other ranks, too."""
BYTE_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
MAX_SWEEP_POINTS = 256
"""Points of one sweep, at most."""


def complete_run(incomplete: str) -> list[str]:
    """Completes a run's id, newest first."""
    from skyctl.files import run_ids

    return [run for run in reversed(run_ids()) if run.startswith(incomplete)]


def complete_lab(incomplete: str) -> list[str]:
    """Completes the name of a lab that is up."""
    from skyctl.files import home

    labs = home() / "labs"
    names = sorted(entry.name for entry in labs.iterdir()) if labs.is_dir() else []
    return [name for name in names if name.startswith(incomplete)]


def complete_node(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completes the name of a node in the cluster file in use."""
    return [name for name in _known_names(ctx, groups=False) if name.startswith(incomplete)]


def complete_nodes(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completes the last node or group of a pattern (``fast,!tow`` to ``fast,!tower``)."""
    before, comma, last = incomplete.rpartition(",")
    sign = last[:1] if last[:1] in ("!", "&") else ""
    names = [name for name in _known_names(ctx, groups=True) if name.startswith(last[len(sign) :])]
    return [f"{before}{comma}{sign}{name}" for name in names]


def complete_choices(*words: str) -> Callable[[str], list[str]]:
    """A function that completes an option to one of a few words."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete


def _known_names(ctx: typer.Context, *, groups: bool) -> list[str]:
    """The nodes (and groups) of the cluster file that the command line names; none where it can't be read."""
    from skyctl.inventory.cluster_file import cluster_path, read_cluster

    given = ctx.params.get("cluster")
    try:
        cluster = read_cluster(cluster_path(Path(given) if given else None))
    except SkyctlError:
        return []
    return [node.name for node in cluster.nodes] + (sorted(cluster.groups) if groups else [])


def is_plan_file(text: str) -> bool:
    """Whether what is to be launched is a plan file; a script may have an argument that ends as one does."""
    return text.endswith(".json") and ".py," not in text


def suggest_similar(word: str, words: Collection[str]) -> str:
    """``; did you mean 'optimal'?``, or an empty string where nothing known is similar."""
    from difflib import get_close_matches

    close = get_close_matches(word, list(words), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def require_choice(flag: str, value: str, allowed: Sequence[str]) -> str:
    """``value`` itself, if it is one of ``allowed``.

    Raises:
        InputError: it is not; the message lists what is allowed.
    """
    if value not in allowed:
        raise InputError(
            f"{flag} {value!r} is not one of {', '.join(allowed)}{suggest_similar(value, allowed)}"
        )
    return value


def parse_schedule(name: str | None) -> ScheduleChoice | None:
    """The schedule that --schedule names (InputError where there is none of that name)."""
    return None if name is None else cast("ScheduleChoice", require_choice("--schedule", name, SCHEDULES))


def parse_parallel(name: str | None) -> ParallelChoice | None:
    """The form that --parallel names (InputError where there is none of that name)."""
    return None if name is None else cast("ParallelChoice", require_choice("--parallel", name, PARALLEL))


def parse_sync_format(name: str | None) -> SyncFormat | None:
    """The format that --sync-format names (InputError where there is nothing of that name)."""
    if name is None:
        return None
    from skyctl.records.sync_format import check_sync_format

    try:
        return check_sync_format(name)
    except ValueError as exc:
        raise InputError(f"--sync-format {name!r} is no format", hint=str(exc)) from exc


def parse_sync(name: str | None) -> SyncRoutes | None:
    """The routes that --sync names (InputError where there are none of that name)."""
    return None if name is None else cast("SyncRoutes", require_choice("--sync", name, SYNC_ROUTES))


def parse_sync_list(text: str) -> tuple[SyncRoutes, ...]:
    """``ring,trees`` → their names, each once (InputError where one names no routes)."""
    names = [require_choice("--sync", name.strip(), SYNC_ROUTES) for name in text.split(",")]
    return tuple(cast("SyncRoutes", name) for name in dict.fromkeys(names))


def parse_bytes(flag: str, text: str) -> int:
    """``10MB``, ``64MiB``, ``40000000`` → bytes. Raises InputError for anything else."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([kMGKi]{0,2})B?", text.strip())
    if match is None or match[2] not in BYTE_UNITS:
        raise InputError(f"{flag} {text!r} is no size", hint=f"as in {flag} 10MB, 64MiB or 40000000")
    return round(float(match[1]) * BYTE_UNITS[match[2]])


def parse_helpers(names: Sequence[str] | None, cluster: Cluster | None) -> list[str] | None:
    """The nodes that --helper names, once or more; without a cluster as they are given; None: not given.

    Raises:
        InputError: a name matches no node of the cluster.
    """
    if not names or cluster is None:
        return list(names) if names else None
    return list(dict.fromkeys(node for name in names for node in select_node_names(cluster, name) or ()))


def parse_objective(name: str | None) -> Objective | None:
    """The objective that --objective names (InputError where there is none of that name)."""
    return None if name is None else cast("Objective", require_choice("--objective", name, OBJECTIVES))


def parse_link_dtypes(given: Sequence[str] | None, cluster: Cluster | None = None) -> list[LinkChoice]:
    """The choices of --link-dtype (InputError for an unknown dtype, or a node that is not in the cluster)."""
    from skyctl.planning.link_dtypes import parse_link_dtype

    nodes = None if cluster is None else [node.name for node in cluster.nodes]
    return [parse_link_dtype(text, nodes) for text in given or ()]


def select_node_names(cluster: Cluster, pattern: str | None) -> list[str] | None:
    """The names of the nodes that a pattern matches (names, globs, groups); None without a pattern."""
    if pattern is None:
        return None
    from skyctl.inventory.node_patterns import select_nodes

    return [node.name for node in select_nodes(cluster, pattern).nodes]


def parse_numbers(flag: str, text: str) -> tuple[int, ...]:
    """``4,8,16`` → (4, 8, 16), without repetitions, in the order given.

    Raises:
        InputError: the text is no such list, or a number is below 1.
    """
    parsed = [_parse_number(flag, part, text) for part in text.split(",")]
    return tuple(dict.fromkeys(parsed))


def parse_node_counts(flag: str, text: str) -> Callable[[int], tuple[int, ...]]:
    """``2..N`` or ``1,2,4`` → a function from N (how many there are) to the numbers, in rising order.

    Raises:
        InputError: the text is no such list, a range falls, or (by the function) too many numbers.
    """
    ends: list[tuple[int | None, int | None]] = []
    for part in (part.strip() for part in text.split(",")):
        low, dots, high = part.partition("..")
        first = _parse_range_end(flag, low, text)
        last = _parse_range_end(flag, high, text) if dots else first
        if first is not None and last is not None and last < first:
            raise InputError(
                f"{flag} {text}: {part} falls", hint=f"write the smaller one first: {last}..{first}"
            )
        ends.append((first, last))

    def counts_of(total: int) -> tuple[int, ...]:
        counts: set[int] = set()
        for first, last in ends:
            low, high = total if first is None else first, total if last is None else last
            if high < low:
                raise InputError(f"{flag} {text}: there {'is' if total == 1 else 'are'} {total} only")
            counts |= set(range(low, min(high, low + MAX_SWEEP_POINTS) + 1))
        if len(counts) > MAX_SWEEP_POINTS:
            raise InputError(f"{flag} {text}: at most {MAX_SWEEP_POINTS} numbers")
        return tuple(sorted(counts))

    return counts_of


def _parse_range_end(flag: str, text: str, whole: str) -> int | None:
    return None if text.strip().lower() == "n" else _parse_number(flag, text, whole)


def _parse_number(flag: str, part: str, whole: str) -> int:
    try:
        value = int(part.strip())
    except ValueError:
        value = 0
    if not 1 <= value <= 1_000_000_000:
        raise InputError(
            f"{flag} {whole!r}: {part.strip()!r} is no number from 1 up",
            hint=f"one number, or several with commas: {flag} 4,8,16"
            + ("; or a range: 2..N" if flag == "--nodes" else ""),
        )
    return value
