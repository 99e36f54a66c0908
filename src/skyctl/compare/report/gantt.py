"""What every stage does when, in one step: as simulated, and as traced where the run was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from skyctl.compare.report import parts
from skyctl.compare.report.facts import Report, Steps
from skyctl.compare.report.markup import Markup, el, join, name
from skyctl.compare.report.scale import Scale, axis, of_seconds
from skyctl.compare.rows import Row
from skyctl.compare.timeline import IDLE, TRANSFER, WORDS, Bar, Step, Timeline
from skyctl.compare.words import percent, seconds

DENSE = 2500
"""With more bars than this in a panel, those of a kind are one shape, without words of their own."""
MANY_ROWS = 16
LEGIBLE = 1.75
"""Per cent of the width: a narrower bar has no room for its microbatch's number."""
SHORTEST = 2e-4
"""Of the scale: shorter bars are not drawn."""
LOOKS = {
    "F": "forward", "B": "backward", "W": "weight gradients", "O": "optimizer", "C": "clipping",
    "S": "sending", IDLE: "waits for another stage", TRANSFER: "waits for the network",
}  # fmt: skip
HIGH = 22


def gantt(report: Report) -> Markup:
    """The section."""
    drawn = [
        (rows, called, report.steps.get(rows[0].strategy, Steps())) for rows, called in parts.groups(report)
    ]
    drawn = [one for one in drawn if one[2].simulated is not None]
    if not drawn:
        return parts.section(
            "gantt", "One step, action by action", None, parts.empty("There is no plan to play.")
        )
    longest_s = max(
        max(step.seconds for step in _typical(steps)) for _, _, steps in drawn
    )  # fmt: skip
    scale = of_seconds(longest_s, 1.005)
    kinds = {bar.kind for _, _, steps in drawn for line in _lines(steps) for bar in line[1]}
    lead = (
        "A row is a stage of the pipeline, a bar one action, its number the microbatch. All panels have one "
        "scale of time."
    )
    if not any(steps.measured for _, _, steps in drawn):
        lead += " These are simulated; with --measure --trace the measured step stands beside each."
    entries = [(parts.swatch(f"k-{kind}"), words) for kind, words in LOOKS.items() if kind in kinds]
    figures = [_figure(rows, called, steps, scale) for rows, called, steps in drawn]
    return parts.section("gantt", "One step, action by action", lead, parts.legend(*entries), figures)


def _typical(steps: Steps) -> list[Step]:
    found = [steps.simulated.steps[0]] if steps.simulated else []
    return [*found, steps.measured.typical()] if steps.measured else found


def _lines(steps: Steps) -> list[tuple[str, Sequence[Bar], float]]:
    """(what, its bars, its length) a panel; measured first, as in the traces' pictures."""
    out: list[tuple[str, Sequence[Bar], float]] = []
    if steps.measured is not None and steps.measured.steps:
        typical = steps.measured.typical()
        out.append((f"measured, step {typical.number + 1}", steps.measured.within(typical), typical.seconds))
    if steps.simulated is not None:
        out.append(("simulated", steps.simulated.steps[0].bars, steps.simulated.steps[0].seconds))
    return out


def _figure(rows: Sequence[Row], called: str, steps: Steps, scale: Scale) -> Markup:
    row = rows[0]
    labels = {share.device: share.label for share in row.shares}
    lines = _lines(steps)
    simulated_s = lines[-1][2]
    panels = []
    for what, bars, length_s in lines:
        off = (
            f", {percent(length_s / simulated_s - 1)} against the simulated one"
            if what != "simulated"
            else ""
        )
        panels.append(
            el("p", el("b", what), f": {seconds(length_s)}{off if simulated_s else ''}", class_="panel")
        )
        panels.append(_panel(_devices(steps), labels, bars, length_s, scale))
    return parts.figure(
        name(called),
        f"{len(row.shares)} stages" if len(row.shares) != 1 else "1 stage",
        panels,
        el("div", axis(scale, "from the step's start"), class_="axis-lane gantt-axis"),
    )


def _devices(steps: Steps) -> Sequence[str]:
    one: Timeline | None = steps.simulated or steps.measured
    return one.devices if one is not None else ()


def _panel(
    devices: Sequence[str], labels: Mapping[str, str], bars: Sequence[Bar], length_s: float, scale: Scale
) -> Markup:
    many = len(devices) > MANY_ROWS
    dense = len(bars) > DENSE
    shown = [bar for bar in bars if bar.seconds > SHORTEST * scale.end]
    high = 9 if many else HIGH
    lanes = []
    for number, device in enumerate(devices):
        own = [bar for bar in shown if bar.row == number]
        drawn = _shapes(own, scale, high) if dense or many else _bars(own, scale, high)
        end = el("line", x1=scale.x(length_s), x2=scale.x(length_s), y1=-1, y2=high + 1, class_="end")
        label = labels.get(device, device)
        busy_s = sum(bar.seconds for bar in own if bar.kind not in (IDLE, TRANSFER, "S"))
        lanes.append(
            el(
                "li",
                el("div", name(label), class_="who", title=label),
                el(
                    "svg",
                    drawn,
                    end,
                    role="img",
                    aria_label=f"{label}: computes {seconds(busy_s)} of the step",
                ),
                class_="lane",
            )
        )
    return el("ul", lanes, class_="lanes gantt many" if many else "lanes gantt")


def _bars(bars: Sequence[Bar], scale: Scale, high: int) -> list[Markup]:
    out = []
    for bar in sorted(bars, key=lambda one: one.kind not in (IDLE, TRANSFER)):
        thin = bar.kind in (IDLE, TRANSFER)
        numbered = bar.kind not in ("O", "C")
        words = f"{WORDS[bar.kind]}{f' {bar.microbatch}' if numbered else ''}: {seconds(bar.seconds)}"
        out.append(
            el(
                "rect",
                parts.title(f"{words}, from {seconds(max(0.0, bar.start_s))}"),
                x=scale.x(bar.start_s),
                width=scale.wide(bar.seconds),
                y=7 if thin else 2,
                height=8 if thin else high - 4,
                class_=f"k-{bar.kind}",
            )
        )
        if bar.kind in ("F", "B", "W") and scale.at(bar.seconds) >= LEGIBLE:
            middle = scale.x((bar.start_s + bar.end_s) / 2)
            out.append(el("text", bar.microbatch, x=middle, y=high / 2 + 4, class_=f"on-{bar.kind}"))
    return out


def _shapes(bars: Sequence[Bar], scale: Scale, high: int) -> Markup:
    """One path a kind, in thousandths of the width."""
    paths = []
    for kind in (IDLE, TRANSFER, "S", "F", "B", "W", "O", "C"):
        own = [bar for bar in bars if bar.kind == kind]
        top, tall = (3, 3) if kind in (IDLE, TRANSFER) else (1, 7)
        line = "".join(
            f"M{10 * scale.at(bar.start_s):.2f} {top}h{max(0.4, 10 * scale.at(bar.seconds)):.2f}v{tall}"
            f"H{10 * scale.at(bar.start_s):.2f}z"
            for bar in own
        )
        if line:
            paths.append(el("path", d=line, class_=f"k-{kind}"))
    return el(
        "svg", join(paths), view_box="0 0 1000 9", preserve_aspect_ratio="none", width="100%", height=high
    )
