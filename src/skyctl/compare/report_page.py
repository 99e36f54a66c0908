"""The report: one HTML file that runs no script and loads nothing, made from ``templates/report.html``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from skyctl.compare.certificate_text import describe_certificate
from skyctl.compare.charts.curve_charts import SWEEP_TITLES, loss_charts, strategy_legend, sweep_chart
from skyctl.compare.charts.device_charts import device_speed_chart
from skyctl.compare.charts.step_charts import (
    bound_chart,
    prediction_chart,
    share_charts,
    step_time_chart,
    utilization_chart,
)
from skyctl.compare.charts.templates import template_environment
from skyctl.compare.charts.timeline_charts import timeline_charts
from skyctl.compare.conclusion import Gain, describe_conclusion
from skyctl.compare.deviation import describe_deviation
from skyctl.compare.form_summary import describe_forms, form_table
from skyctl.compare.number_format import (
    UNKNOWN,
    estimate_parts,
    format_estimate,
    format_gap,
    format_number,
    format_percent,
    format_prediction_error,
    format_ratio,
    format_ratio_interval,
    format_seconds,
)
from skyctl.compare.outcome import ALONE, BASELINE, SYNCHRONOUS, ComparisonRow
from skyctl.compare.report_data import ComparisonReport
from skyctl.compare.sweeps import ComparisonSweep, describe_sweep, sweep_table
from skyctl.compare.sync_summary import describe_sync, sync_table
from skyctl.records.measurement import Measurement


def render_report(report: ComparisonReport) -> str:
    """The whole page. Everything in it that is not of the templates is escaped."""
    environment = template_environment()
    plans = [report.plan(row.strategy) for row in report.planned]
    chosen = next((plan for plan in plans if plan.forms), None)
    environment.filters["seconds"] = format_seconds
    return environment.get_template("report.html").render(
        report=report,
        verdict=describe_conclusion(report.conclusion, report.rows),
        heading=describe_conclusion(report.conclusion, report.rows, capitalized=True),
        about_rows=_about_rows(report),
        tiles=_tiles(report),
        failures=[_failure(row) for row in report.rows if row.error],
        step_chart=step_time_chart(report),
        speed_chart=device_speed_chart(report),
        share_group=share_charts(report),
        timeline_group=timeline_charts(report),
        sample_tables=[
            (name, _sync_text(report, row), _sample_table(row))
            for (row, *_), name in report.groups()
            if _has_shares(row)
        ],
        sync_table=_Table(*sync_table(report.syncs), -1) if report.syncs else None,
        form_table=_Table(*form_table(chosen), -1) if chosen is not None else None,
        form_text="; ".join(describe_forms(chosen)) if chosen is not None else "",
        steps_table=_steps_table(report),
        prediction_chart=prediction_chart(report) if report.measured else None,
        deviations=_deviations(report),
        loss_group=loss_charts(report),
        loss_difference=_loss_difference(report),
        validation_table=_validation_table(report),
        bound_chart=bound_chart(report),
        utilization_chart=utilization_chart(report),
        certificates=[describe_certificate(report, row) for row in report.planned],
        sweeps=[_sweep(sweep) for sweep in report.sweeps],
    )


def _about_rows(report: ComparisonReport) -> str:
    """How the plans share the work out."""
    kinds = {report.plan(row.strategy).problem.parallel for row in report.planned}
    if kinds <= {"pipeline"}:
        return "Each strategy gives every machine a range of the model's layers."
    if kinds == {"data"}:
        return "Every machine holds the whole model, and takes a share of each step's samples."
    pipelines = "In a pipeline, every machine holds a range of the model's layers."
    data = "In a data plan, every machine holds the whole model, and takes a share of each step's samples."
    hybrid = "In a hybrid, several pipelines each take such a share."
    parts = {"pipeline": pipelines, "data": data, "hybrid": hybrid}
    return " ".join(text for kind, text in parts.items() if kind in kinds)


class _Failure(NamedTuple):
    strategy: str
    what: str
    reason: str


def _failure(row: ComparisonRow) -> _Failure:
    if row.predicted_s is not None:
        what = "did not run to its end"
    else:
        what = "does not fit" if row.status == "infeasible" else "has no plan"
    return _Failure(row.label, what, row.error or "")


def _tiles(report: ComparisonReport) -> list[tuple[str, str, list[str]]]:
    """(what, figure, small notes) of the figures under the verdict; none where there is no plan."""
    best = report.best
    if best is None:
        return []
    measured = best.measured is not None
    how = ["measured" if measured else "predicted"]
    if not measured and best.predicted_interval is not None:
        how = [f"predicted {estimate_parts(best.predicted_s, best.predicted_interval)[1]}"]
    rows = {row.strategy: row for row in report.planned}
    if BASELINE in rows and rows[BASELINE] is not best:
        base = rows[BASELINE]
        how.append(f"{format_seconds(base.shown_s if measured else base.predicted_s)} under {BASELINE}")
    tiles = [(f"a step under {best.label}", format_seconds(best.shown_s), how)]
    tiles += [
        (f"as fast as {rows[gain.over].label}", format_ratio(gain.ratio), _gain_notes(gain))
        for gain in report.conclusion.gains
        if gain.over in (BASELINE, ALONE, SYNCHRONOUS) and not gain.same_plan
    ]
    errors = [abs(row.prediction_error) for row in report.measured if row.prediction_error is not None]
    if errors:
        notes = ["at most", *([f"over {len(errors)} strategies"] if len(errors) > 1 else [])]
        if within := [row.within_interval for row in report.measured if row.within_interval is not None]:
            notes.append(f"{sum(within)} of {len(within)} within their interval")
        tiles.append(("predictions off by", format_percent(max(errors), sign=False), notes))
    if best.gap is None:
        gap, notes = UNKNOWN, ["no bound is known"]
    elif best.proved:
        gap, notes = "0%", [f"no {report.bounded_name} is predicted faster (proved)"]
    else:
        gap, notes = (
            format_percent(best.gap, sign=False),
            ["at most", "by the proved bound of predicted steps"],
        )
    return [*tiles, ("how far from the best", gap, notes)]


def _gain_notes(gain: Gain) -> list[str]:
    """The small notes under a gain: how it is known, and where it lies in eight cases of ten."""
    notes = ["predicted"] if gain.measured is None else ["measured"]
    if gain.low is not None and gain.high is not None:
        notes[0] += f" ({format_ratio_interval(gain.low, gain.high)})"
    notes += [] if gain.measured is None else [f"predicted {format_ratio(gain.predicted)}"]
    return [*notes, *([] if gain.told else ["no difference that can be told"])]


class _Table(NamedTuple):
    """``best``: which row is set off; −1: none."""

    heads: list[str]
    rows: list[list[str]]
    best: int


def _has_shares(row: ComparisonRow) -> bool:
    """Whether the plan has pipelines that take a share of each step's samples."""
    return any(share.microbatches is not None for share in row.shares)


def _sync_text(report: ComparisonReport, row: ComparisonRow) -> str:
    """How the gradients of that row's plan are summed, and what was measured of it."""
    text = describe_sync(report.plan(row.strategy))
    if row.measured_sync_s is None:
        return text
    return f"{text}; {format_seconds(row.measured_sync_s)} measured"


def _sample_table(row: ComparisonRow) -> _Table:
    """A row a device: how many of a step's microbatches and samples its pipeline takes."""
    rows = [
        [
            share.label,
            str(share.microbatches),
            UNKNOWN if share.samples is None else str(share.samples),
            format_percent((share.microbatches or 0) / (row.microbatches or 1), sign=False),
            format_seconds(share.predicted_compute_s),
        ]
        for share in row.shares
    ]
    return _Table(["device", "microbatches", "samples", "of the step", "computes, predicted"], rows, -1)


def _steps_table(report: ComparisonReport) -> _Table:
    measured = bool(report.measured)
    has_intervals = any(row.predicted_interval for row in report.rows)
    heads = ["", "predicted (80%)" if has_intervals else "predicted", "over even", "above bound"]
    heads += ["measured", "p10 – p90", "over even", "prediction", "loss"] if measured else []
    rows = []
    for row in report.rows:
        predicted = format_estimate(row.predicted_s, row.predicted_interval)
        cells = [row.label, predicted, format_ratio(row.predicted_speedup)]
        cells.append(format_gap(row.gap))
        if measured:
            took = row.measured
            spread = f"{format_seconds(took.p10)} – {format_seconds(took.p90)}" if took else UNKNOWN
            cells += [format_seconds(row.measured_s), spread]
            within = {None: "", True: ", within", False: ", outside"}[row.within_interval]
            error = format_prediction_error(row.prediction_error)
            cells += [format_ratio(row.measured_speedup), error + within]
            cells.append(format_number(row.final_loss))
        rows.append(cells)
    return _Table(heads, rows, next((i for i, row in enumerate(report.rows) if row is report.best), -1))


def _deviations(report: ComparisonReport) -> list[tuple[str, list[str]]]:
    """(strategies, what of their run was not as predicted) where there is something to say."""
    deviations = []
    for rows, name in report.groups():
        done = report.outcome(rows[0].strategy).measurement
        if done is not None:
            labels = {share.device: share.label for share in rows[0].shares}
            if sentences := describe_deviation(_labelled(done, labels)):
                deviations.append((name, sentences))
    return deviations


def _labelled(done: Measurement, labels: dict[str, str]) -> Measurement:
    """The same with devices called as in the rest of the report."""
    differences = tuple(
        difference.model_copy(
            update={
                "device": labels.get(difference.device, difference.device) if difference.device else None,
                "target": labels.get(difference.target, difference.target) if difference.target else None,
            }
        )
        for difference in done.differences
    )
    replicas = tuple(
        replica.model_copy(update={"device": labels.get(replica.device, replica.device)})
        for replica in done.replicas
    )
    return done.model_copy(update={"differences": differences, "replicas": replicas})


def _loss_difference(report: ComparisonReport) -> str:
    """By how much the losses of different runs differ at most; empty where there was one run.

    Runs with a rhythm are left out: their losses are other ones on purpose.
    """
    runs = [
        outcome.measurement
        for outcome in report.outcomes
        if outcome.measurement is not None and report.plan(outcome.strategy).problem.rhythm.is_synchronous
    ]
    if len({run.run_id for run in runs}) < 2:
        return ""
    first = {step.step: step.loss for step in runs[0].steps}
    worst = max(
        (abs(s.loss / first[s.step] - 1) for run in runs[1:] for s in run.steps if first.get(s.step)),
        default=0.0,
    )
    if worst == 0:
        return "The losses of all runs are equal to the last digit, at every step."
    return f"The largest relative difference between two runs at any step is {worst:.1e}."


def _validation_table(report: ComparisonReport) -> _Table | None:
    """A row a run: the last validation's loss, and what the user's metrics gave; None: none validated."""
    last = {
        row.label: done.validation[-1]
        for row in report.measured
        if (done := report.outcome(row.strategy).measurement) is not None and done.validation
    }
    if not last:
        return None
    names = list(dict.fromkeys(name for validation in last.values() for name in validation.metrics or {}))
    rows = [
        [label, str(validation.step + 1), format_number(validation.loss)]
        + [format_number((validation.metrics or {}).get(name)) for name in names]
        for label, validation in last.items()
    ]
    return _Table(["", "after steps", "loss", *names], rows, -1)


def _sweep(sweep: ComparisonSweep) -> dict[str, Any]:
    """A sweep as the template wants it. ``chosen``: which row the rest of the report is about; −1: none."""
    heads, rows = sweep_table(sweep)
    strategies: Sequence[str] = sweep.strategies
    return {
        "title": SWEEP_TITLES[sweep.kind],
        "legend": strategy_legend(strategies, strategies),
        "chart": sweep_chart(sweep),
        "sentences": describe_sweep(sweep),
        "heads": heads,
        "rows": rows,
        "chosen": next((i for i, point in enumerate(sweep.points) if point.value == sweep.chosen), -1),
    }
