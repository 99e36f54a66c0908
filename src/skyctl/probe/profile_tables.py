"""A profile for people: rich tables at a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from skyctl.probe.layer_shapes import layer_names
from skyctl.probe.link_matrix import (
    LEGEND,
    failed_link_lines,
    matrix_lines,
    matrix_table,
    most_columns,
    slow_link_lines,
    summarize_links,
)
from skyctl.records.base import GIB
from skyctl.records.profile import DeviceProfile, LayerTiming, LineProfile, LinkProfile, Profile, unconverged

BAR_CHARS = 12
LARGEST_LAYERS = 3
"""Layers whose times are said where not each layer's are."""

ProfileDetail = Literal["devices", "largest layers", "each layer"]
"""How much is shown: devices and failures alone, or also links and the times of the largest or all layers."""


def profile_lines(profile: Profile, detail: ProfileDetail = "largest layers") -> list[str]:
    """One line a fact, no colour and no columns to cut off: for pipes and logs."""
    lines = []
    for node in profile.nodes:
        lines.append(
            f"node {node.name}: {node.cpu_model}, {node.cpus:g} cpus, "
            f"{_size_text(node.memory_available_bytes)} of {_size_text(node.memory_total_bytes)} free, "
            f"Python {node.python}, torch {node.torch}"
        )
    lines += [f"note {line}" for line in isa_lines(profile)]
    for device in profile.devices:
        lines.append(f"device {device.id}: {device.name}, {_device_text(device)}")
        if detail == "each layer":
            lines += _timing_lines(profile, device)
        elif detail == "largest layers":
            lines += _sum_lines(profile, device)
        if device.conditions is not None:
            lines += [f"  note: {note}" for note in device.conditions.notes]
    if detail != "devices":
        for link in profile.links:
            lines.append(f"link {link.source} -> {link.target}: {link_text(link)}")
        lines += matrix_lines(summarize_links(profile)) + site_lines(profile)
        lines += [f"line {line.node} {line.direction}: {line_text(line)}" for line in profile.lines]
    for failure in profile.failures:
        lines.append(
            f"failed {failure.node}: {failure.error}" + (f" ({failure.hint})" if failure.hint else "")
        )
    return lines


def _timing_lines(profile: Profile, device: DeviceProfile) -> list[str]:
    """A line for each layer and microbatch size that was timed on the device."""
    names = layer_names(profile)
    rough = unconverged(device.timings)
    return [
        f"  {names.get(timing.signature, timing.signature)} × {timing.microbatch_size}: "
        f"{_timing_text(timing, rough=timing in rough)}"
        for timing in device.timings
    ]


def _sum_lines(profile: Profile, device: DeviceProfile) -> list[str]:
    """A line for each microbatch size: what all layers take on the device, and the largest of them."""
    names = layer_names(profile)
    lines = []
    for size in _microbatch_sizes(profile):
        timings = [timing for timing in device.timings if timing.microbatch_size == size]
        skipped = [timing for timing in timings if timing.forward_s is None]
        timed = {t.signature: _layer_s(t) for t in timings if t.forward_s is not None}
        lines += [
            f"  {names.get(timing.signature, timing.signature)} × {size}: {_timing_text(timing, rough=False)}"
            for timing in skipped
        ]
        if not timed:
            continue
        counts = layer_counts(profile, size)
        forward_s, backward_s = _total_s(timings, counts)
        largest = sorted(timed, key=lambda signature: -timed[signature] * counts[signature])[:LARGEST_LAYERS]
        most = ", ".join(
            f"{names.get(signature, signature)} {timed[signature] * 1e3:.3g}" for signature in largest
        )
        lines.append(
            f"  all layers × {size}: forward {forward_s * 1e3:.3g} ms, backward {backward_s * 1e3:.3g} ms; "
            f"the largest, both, each: {most}"
        )
    return lines


def layer_counts(profile: Profile, size: int) -> Mapping[str, int]:
    """By signature, how many layers of the model have it with microbatches of that size; 1 where unknown."""
    counts: Counter[str] = Counter()
    for shape in profile.workload.shapes if profile.workload is not None else ():
        if shape.microbatch_size == size:
            counts.update(layer.signature for layer in shape.layers)
    signatures = {timing.signature for device in profile.devices for timing in device.timings}
    return {signature: counts[signature] or 1 for signature in signatures}


def _layer_s(timing: LayerTiming) -> float:
    return (timing.forward_s or 0.0) + (timing.backward_s or 0.0)


def _total_s(timings: Sequence[LayerTiming], counts: Mapping[str, int]) -> tuple[float, float]:
    """Seconds forward and backward of all layers that were timed, as often as the model has them."""
    return (
        sum((timing.forward_s or 0.0) * counts[timing.signature] for timing in timings),
        sum((timing.backward_s or 0.0) * counts[timing.signature] for timing in timings),
    )


def profile_tables(
    profile: Profile, width: int | None = None, detail: ProfileDetail = "largest layers"
) -> RenderableType:
    """Devices, layer times, links and failures, as far as there are any; links as the width allows."""
    parts: list[RenderableType] = [device_table(profile)]
    most = None if detail == "each layer" else LARGEST_LAYERS
    if detail != "devices":
        parts += [layer_table(profile, size, most) for size in _microbatch_sizes(profile)]
        if most is not None and any(len({t.signature for t in x.timings}) > most for x in profile.devices):
            parts.append(Text("the largest layers; each layer's times: -v", style="dim"))
    if profile.links and detail != "devices":
        summary = summarize_links(profile, most_columns(width))
        parts += [matrix_table(summary), Text(LEGEND, style="dim")]
        parts += [Text(words) for words in slow_link_lines(profile, summary)]
        parts += [Text.assemble(("✗ ", "bold red"), words) for words in failed_link_lines(profile)]
    if detail != "devices":
        parts += [Text(words) for words in site_lines(profile)]
        parts += [Text(f"{line.node} {line.direction}: {line_text(line)}") for line in profile.lines]
    parts += [Text.assemble(("! ", "yellow"), f"{ids}: {note}") for ids, note in condition_notes(profile)]
    parts += [Text.assemble(("! ", "yellow"), line) for line in isa_lines(profile)]
    for failure in profile.failures:
        line = Text.assemble(("✗ ", "bold red"), (failure.node, "bold"), f": {failure.error}")
        if failure.hint:
            line.append(f"\n  next: {failure.hint}", style="dim")
        parts.append(line)
    return Group(*parts)


def condition_notes(profile: Profile) -> list[tuple[str, str]]:
    """(device ids, comma-separated; what a reader of their times should know): each note once."""
    devices: dict[str, list[str]] = {}
    for device in profile.devices:
        for note in device.conditions.notes if device.conditions is not None else ():
            devices.setdefault(note, []).append(device.id)
    return [(", ".join(ids), note) for note, ids in devices.items()]


def isa_lines(profile: Profile) -> list[str]:
    """The nodes that had to be kept to fewer instructions than their processors advertise."""
    dtype = profile.workload.dtype if profile.workload is not None else "it"
    return [
        f"{node.name}: {dtype} works only with ONEDNN_MAX_CPU_ISA={node.max_cpu_isa}, which runs there get"
        for node in profile.nodes
        if node.max_cpu_isa is not None
    ]


def device_table(profile: Profile) -> Table:
    """One row a device, its speed as a bar against the fastest."""
    table = Table(title="Devices", title_justify="left")
    for name, right in (
        ("device", False),
        ("name", False),
        ("cpus", True),
        ("threads", True),
        ("usable memory", True),
        ("from", False),
        ("GFLOP/s", True),
        ("speed", False),
        ("share", True),
    ):
        table.add_column(name, justify="right" if right else "left", no_wrap=name == "device")
    nodes = {node.name: node for node in profile.nodes}
    fastest = max((device.flops_per_s for device in profile.devices), default=1.0)
    for device in profile.devices:
        node = nodes.get(device.node)
        table.add_row(
            Text(device.id),
            Text(device.name + (f", slowed {device.slowdown:g}×" if device.slowdown > 1 else "")),
            "" if node is None else f"{node.cpus:g}",
            "" if device.threads is None else str(device.threads),
            _size_text(max(0.0, device.memory_bytes - device.reserved_bytes)),
            device.memory_from,
            f"{device.flops_per_s / 1e9:.1f}",
            bar(device.flops_per_s / fastest),
            _share_text(device),
        )
    return table


def layer_table(profile: Profile, size: int, most: int | None = None) -> Table:
    """Milliseconds forward + backward of the distinct layers, a row a device; ``most``: of the largest ones.

    ± is how well the mean is known (95% interval), ``?`` where it did not settle.
    """
    names, counts = layer_names(profile), layer_counts(profile, size)
    timings = [t for device in profile.devices for t in device.timings if t.microbatch_size == size]
    signatures = list(dict.fromkeys(timing.signature for timing in timings))
    taken_s = {
        signature: max(_layer_s(t) for t in timings if t.signature == signature) for signature in signatures
    }
    largest = sorted(signatures, key=lambda signature: -taken_s[signature] * counts[signature])[:most]
    shown = [signature for signature in signatures if signature in largest]
    samples = "sample" if size == 1 else "samples"
    title = f"Milliseconds forward + backward, microbatch of {size} {samples}"
    table = Table(title=title, title_justify="left")
    table.add_column("device", no_wrap=True)
    for signature in shown:
        table.add_column(Text(names.get(signature, signature)), justify="right")
    if len(shown) < len(signatures):
        table.add_column(f"all {sum(counts[signature] for signature in signatures)} layers", justify="right")
    for device in profile.devices:
        own = [timing for timing in device.timings if timing.microbatch_size == size]
        by_signature = {timing.signature: timing for timing in own}
        rough = {timing.signature for timing in unconverged(device.timings) if timing.microbatch_size == size}
        cells = [
            Text(_timing_cell(by_signature.get(signature), rough=signature in rough)) for signature in shown
        ]
        if len(shown) < len(signatures):
            forward_s, backward_s = _total_s(own, counts)
            cells.append(Text(f"{forward_s * 1e3:.3g} + {backward_s * 1e3:.3g}"))
        table.add_row(Text(device.id), *cells)
    return table


def site_lines(profile: Profile) -> list[str]:
    """Sites where there are several, and what the nodes of one share."""
    lines = []
    if len(profile.sites) > 1:
        lines += [f"site {site.name}: {', '.join(site.nodes)}" for site in profile.sites]
    for uplink in profile.uplinks:
        rate, way = _rate_text(uplink.bandwidth_bytes_per_s), "from" if uplink.direction == "in" else "to"
        lines.append(f"uplink {uplink.site} {uplink.direction}: {rate} for all its links {way} other sites")
    return lines


def bar(part: float, width: int = BAR_CHARS) -> str:
    """A bar of that part of the width, at least a sliver for what is above zero."""
    eighths = max(1 if part > 0 else 0, round(min(1.0, part) * width * 8))
    full, rest = divmod(eighths, 8)
    return "█" * full + ("▏▎▍▌▋▊▉"[rest - 1] if rest else "")


def link_text(link: LinkProfile) -> str:
    """``5.12 ms, 98.4 Mbit/s``, or why there are no figures."""
    if link.error is not None or link.latency_s is None or link.bandwidth_bytes_per_s is None:
        return f"no figures: {link.error or 'not measured'}"
    filled = " (filled in from its sites)" if link.estimated else ""
    return f"{link.latency_s * 1e3:.2f} ms, {_rate_text(link.bandwidth_bytes_per_s)}{filled}"


def line_text(line: LineProfile) -> str:
    """``20 Mbit/s for all its links together (with n1 and n2 at once)``."""
    rate = _rate_text(line.bandwidth_bytes_per_s)
    return f"{rate} for all its links together (measured with {' and '.join(line.peers)} at once)"


def _rate_text(bytes_per_s: float) -> str:
    mbit = bytes_per_s * 8 / 1e6
    return f"{mbit / 1000:.1f} Gbit/s" if mbit >= 1000 else f"{mbit:.3g} Mbit/s"


def _microbatch_sizes(profile: Profile) -> Sequence[int]:
    sizes: Iterable[int] = (t.microbatch_size for d in profile.devices for t in d.timings)
    return sorted(set(sizes))


def _timing_cell(timing: LayerTiming | None, *, rough: bool) -> str:
    if timing is None:
        return "·"
    if timing.forward_s is None or timing.backward_s is None:
        return "skipped"
    interval = f" ±{timing.interval:.1%}" if timing.interval is not None else ""
    return f"{timing.forward_s * 1e3:.3g} + {timing.backward_s * 1e3:.3g}{interval}{'?' if rough else ''}"


def _timing_text(timing: LayerTiming, *, rough: bool) -> str:
    if timing.forward_s is None or timing.backward_s is None:
        return f"skipped: {timing.skipped or 'no figures'}"
    spread = ""
    if timing.spread is not None:
        interval = f"±{timing.interval:.1%}, " if timing.interval is not None else ""
        did_not = ", not steady" if rough else ""
        spread = f" ({interval}spread {timing.spread:.0%}, {timing.repeats} repeats{did_not})"
    return (
        f"forward {timing.forward_s * 1e3:.3g} ms, backward {timing.backward_s * 1e3:.3g} ms, "
        f"optimizer {(timing.optimizer_s or 0.0) * 1e3:.3g} ms{spread}"
    )


def _share_text(device: DeviceProfile) -> str:
    """How much of the device the probe had."""
    share = None if device.conditions is None else device.conditions.share
    return "" if share is None else f"{share:.0%}"


def _device_text(device: DeviceProfile) -> str:
    threads = f", {device.threads} thread{'s' if device.threads != 1 else ''}" if device.threads else ""
    slowed = f", slowed {device.slowdown:g} times" if device.slowdown > 1 else ""
    return (
        f"{device.flops_per_s / 1e9:.1f} GFLOP/s{threads}{slowed}, {_size_text(device.memory_bytes)} usable "
        f"({device.memory_from}), {_size_text(device.reserved_bytes)} of it taken before the first layer"
    )


def _size_text(number_bytes: float) -> str:
    return f"{number_bytes / GIB:.1f} GiB" if number_bytes >= GIB else f"{number_bytes / 2**20:.0f} MiB"
