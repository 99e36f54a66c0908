"""Changes to a run's training by another plan, beside who computes what: in words, for its user."""

from __future__ import annotations

from skyctl.planning.backend_choice import backend_of, describe_choice
from skyctl.planning.parallelism_choice import DATA, PIPELINE
from skyctl.records.owners import owner_names
from skyctl.records.plan import Plan


def change_notes(had: Plan, made: Plan) -> list[str]:
    """Changes to a run that goes on with ``made`` in place of ``had``, in words; most plans make none."""
    notes = (_form_note(had, made), _rhythm_note(had, made), _alone_note(had, made), backend_note(had, made))
    return [note for note in notes if note is not None] + round_notes(had, made)


def round_notes(had: Plan, made: Plan) -> list[str]:
    """Changes to rounds, in words; none where one of the plans has none."""
    notes = (_local_steps_note(had, made), _average_note(had, made))
    return [note for note in notes if note is not None]


def _average_note(had: Plan, made: Plan) -> str | None:
    """That a round's local steps, or its outer step, are computed with other numbers."""
    before, now = had.problem.rhythm, made.problem.rhythm
    if not (before.is_rounds and now.is_rounds):
        return None
    numbers = (
        ("--prox-mu", before.prox_mu, now.prox_mu),
        ("--outer-lr", before.outer_lr, now.outer_lr),
        ("--outer-momentum", before.outer_momentum, now.outer_momentum),
    )
    others = [f"{flag} {new:g} (it was {old:g})" for flag, old, new in numbers if old != new]
    return f"rounds go on with {', '.join(others)}" if others else None


def _local_steps_note(had: Plan, made: Plan) -> str | None:
    """That owners, or devices where data is nobody's alone, make other numbers of local steps a round."""
    before, now = _local_steps(had), _local_steps(made)
    others = [name for name, steps in now.items() if before.get(name, steps) != steps]
    if not others:
        return None
    each = ", ".join(f"{name} {now[name]} (it was {before[name]})" for name in others)
    return (
        f"local steps of a round are other ones now: {each}; round r begins at batch r times that number, so "
        "batches are left out or come again"
    )


def backend_note(had: Plan, made: Plan) -> str | None:
    """A line that says which backend carries tensors between ranks now, and why; None: the same as before."""
    if made.backend is None or backend_of(had) == backend_of(made):
        return None
    return describe_choice(made.backend, made.predicted.iteration_s)


def _form_note(had: Plan, made: Plan) -> str | None:
    if made.problem.parallel == had.problem.parallel or made.problem.parallel != PIPELINE:
        return None
    why = "the nodes that are left do not make several pipelines"
    if had.problem.parallel == DATA:
        why = "no node that is left holds the whole model"
    return f"{why}: going on with a pipeline"


def _rhythm_note(had: Plan, made: Plan) -> str | None:
    before, now = had.problem.rhythm, made.problem.rhythm
    if before == now or before.is_rounds or now.is_rounds:
        return None
    if now.is_synchronous:
        return f"going on synchronously, without {'staleness' if before.is_stale else 'a delay'}"
    return f"going on with {'staleness' if now.is_stale else 'a delay'} again"


def _alone_note(had: Plan, made: Plan) -> str | None:
    """That one device makes rounds with nobody to average with."""
    if made.problem.owners is not None or not made.problem.rhythm.is_rounds:
        return None
    if len(had.pipelines) == 1 or len(made.pipelines) > 1:
        return None
    alone = made.pipelines[0]
    return (
        f"{alone.stages[0].device} alone is left that can hold the whole model: it goes on with rounds of "
        f"{alone.local_steps} local steps, and averages with nobody"
    )


def _local_steps(plan: Plan) -> dict[str, int]:
    """By owner, or by device where data is nobody's alone, the local steps of a round; empty: no rounds."""
    owners = plan.problem.owners
    names = (
        [pipeline.stages[0].device for pipeline in plan.pipelines] if owners is None else owner_names(owners)
    )
    counts = zip(names, (pipeline.local_steps for pipeline in plan.pipelines), strict=True)
    return {name: count for name, count in counts if count is not None}
