"""A profile for people: rich tables at a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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


def profile_lines(profile: Profile) -> list[str]:
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
        names = layer_names(profile)
        rough = unconverged(device.timings)
        for timing in device.timings:
            label = f"{names.get(timing.signature, timing.signature)} × {timing.microbatch_size}"
            lines.append(f"  {label}: {_timing_text(timing, rough=timing in rough)}")
        if device.conditions is not None:
            lines += [f"  note: {note}" for note in device.conditions.notes]
    for link in profile.links:
        lines.append(f"link {link.source} -> {link.target}: {link_text(link)}")
    lines += matrix_lines(summarize_links(profile)) + site_lines(profile)
    lines += [f"line {line.node} {line.direction}: {line_text(line)}" for line in profile.lines]
    for failure in profile.failures:
        lines.append(
            f"failed {failure.node}: {failure.error}" + (f" ({failure.hint})" if failure.hint else "")
        )
    return lines


def profile_tables(profile: Profile, width: int | None = None) -> RenderableType:
    """Devices, layer times, links and failures, as far as there are any; links as the width allows."""
    parts: list[RenderableType] = [device_table(profile)]
    parts += [layer_table(profile, size) for size in _microbatch_sizes(profile)]
    if profile.links:
        found = summarize_links(profile, most_columns(width))
        parts += [matrix_table(found), Text(LEGEND, style="dim")]
        parts += [Text(words) for words in slow_link_lines(profile, found)]
        parts += [Text.assemble(("✗ ", "bold red"), words) for words in failed_link_lines(profile)]
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


def layer_table(profile: Profile, size: int) -> Table:
    """Milliseconds forward + backward of the distinct layers, a row a device.

    ± is how well the mean is known (95% interval), ``?`` where it did not settle.
    """
    names = layer_names(profile)
    signatures = list(
        dict.fromkeys(t.signature for d in profile.devices for t in d.timings if t.microbatch_size == size)
    )
    samples = "sample" if size == 1 else "samples"
    title = f"Milliseconds forward + backward, microbatch of {size} {samples}"
    table = Table(title=title, title_justify="left")
    table.add_column("device", no_wrap=True)
    for signature in signatures:
        table.add_column(Text(names.get(signature, signature)), justify="right")
    for device in profile.devices:
        found = {t.signature: t for t in device.timings if t.microbatch_size == size}
        rough = {timing.signature for timing in unconverged(device.timings) if timing.microbatch_size == size}
        cells = (Text(_timing_cell(found.get(one), rough=one in rough)) for one in signatures)
        table.add_row(Text(device.id), *cells)
    return table


def site_lines(profile: Profile) -> list[str]:
    """Sites where there are several, and what the nodes of one share."""
    found = []
    if len(profile.sites) > 1:
        found += [f"site {site.name}: {', '.join(site.nodes)}" for site in profile.sites]
    for uplink in profile.uplinks:
        rate, way = _rate_text(uplink.bandwidth_bytes_per_s), "from" if uplink.direction == "in" else "to"
        found.append(f"uplink {uplink.site} {uplink.direction}: {rate} for all its links {way} other sites")
    return found


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
    known = f" ±{timing.interval:.1%}" if timing.interval is not None else ""
    return f"{timing.forward_s * 1e3:.3g} + {timing.backward_s * 1e3:.3g}{known}{'?' if rough else ''}"


def _timing_text(timing: LayerTiming, *, rough: bool) -> str:
    if timing.forward_s is None or timing.backward_s is None:
        return f"skipped: {timing.skipped or 'no figures'}"
    spread = ""
    if timing.spread is not None:
        known = f"±{timing.interval:.1%}, " if timing.interval is not None else ""
        did_not = ", not steady" if rough else ""
        spread = f" ({known}spread {timing.spread:.0%}, {timing.repeats} repeats{did_not})"
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
