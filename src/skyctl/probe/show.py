"""A profile for people: rich tables at a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from skyctl.probe.heat import LEGEND, failed_lines, fitting, grid, heat_lines, heat_table, spread_lines
from skyctl.probe.settled import unsettled
from skyctl.probe.shapes import layer_names
from skyctl.records.base import GIB
from skyctl.records.profile import DeviceProfile, LayerTiming, LineProfile, LinkProfile, Profile

BAR = 12


def plain_lines(profile: Profile) -> list[str]:
    """One line a fact, no colour and no columns to cut off: for pipes and logs."""
    lines = []
    for node in profile.nodes:
        lines.append(
            f"node {node.name}: {node.cpu_model}, {node.cpus:g} cpus, {_gib(node.memory_available_bytes)} of "
            f"{_gib(node.memory_total_bytes)} free, Python {node.python}, torch {node.torch}"
        )
    for device in profile.devices:
        lines.append(f"device {device.id}: {device.name}, {_device_words(device)}")
        names = layer_names(profile)
        rough = unsettled(device.timings)
        for timing in device.timings:
            label = f"{names.get(timing.signature, timing.signature)} × {timing.microbatch_size}"
            lines.append(f"  {label}: {_timing_words(timing, rough=timing in rough)}")
        if device.conditions is not None:
            lines += [f"  note: {note}" for note in device.conditions.notes]
    for link in profile.links:
        lines.append(f"link {link.source} -> {link.target}: {link_words(link)}")
    lines += heat_lines(grid(profile)) + site_words(profile)
    lines += [f"line {line.node} {line.direction}: {line_words(line)}" for line in profile.lines]
    for failure in profile.failures:
        lines.append(
            f"failed {failure.node}: {failure.error}" + (f" ({failure.hint})" if failure.hint else "")
        )
    return lines


def tables(profile: Profile, width: int | None = None) -> RenderableType:
    """Devices, layer times, links and failures, as far as there are any; links as the width allows."""
    parts: list[RenderableType] = [device_table(profile)]
    parts += [layer_table(profile, size) for size in _sizes(profile)]
    if profile.links:
        found = grid(profile, fitting(width))
        parts += [heat_table(found), Text(LEGEND, style="dim")]
        parts += [Text(words) for words in spread_lines(profile, found)]
        parts += [Text.assemble(("✗ ", "bold red"), words) for words in failed_lines(profile)]
    parts += [Text(words) for words in site_words(profile)]
    parts += [Text(f"{line.node} {line.direction}: {line_words(line)}") for line in profile.lines]
    parts += [Text.assemble(("! ", "yellow"), f"{name}: {note}") for name, note in condition_notes(profile)]
    for failure in profile.failures:
        line = Text.assemble(("✗ ", "bold red"), (failure.node, "bold"), f": {failure.error}")
        if failure.hint:
            line.append(f"\n  next: {failure.hint}", style="dim")
        parts.append(line)
    return Group(*parts)


def condition_notes(profile: Profile) -> list[tuple[str, str]]:
    """(device, what a reader of its times should know)."""
    return [
        (device.id, note)
        for device in profile.devices
        for note in (device.conditions.notes if device.conditions is not None else ())
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
        ("had", True),
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
            _gib(max(0.0, device.memory_bytes - device.reserved_bytes)),
            device.memory_from,
            f"{device.flops_per_s / 1e9:.1f}",
            bar(device.flops_per_s / fastest),
            _had(device),
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
        rough = {timing.signature for timing in unsettled(device.timings) if timing.microbatch_size == size}
        cells = (Text(_cell(found.get(one), rough=one in rough)) for one in signatures)
        table.add_row(Text(device.id), *cells)
    return table


def site_words(profile: Profile) -> list[str]:
    """Sites where there are several, and what the nodes of one share."""
    found = []
    if len(profile.sites) > 1:
        found += [f"site {site.name}: {', '.join(site.nodes)}" for site in profile.sites]
    for uplink in profile.uplinks:
        rate, way = _rate(uplink.bandwidth_bytes_per_s), "from" if uplink.direction == "in" else "to"
        found.append(f"uplink {uplink.site} {uplink.direction}: {rate} for all its links {way} other sites")
    return found


def bar(part: float, width: int = BAR) -> str:
    """A bar of that part of the width, at least a sliver for what is above zero."""
    eighths = max(1 if part > 0 else 0, round(min(1.0, part) * width * 8))
    full, rest = divmod(eighths, 8)
    return "█" * full + ("▏▎▍▌▋▊▉"[rest - 1] if rest else "")


def link_words(link: LinkProfile) -> str:
    """``5.12 ms, 98.4 Mbit/s``, or why there are no figures."""
    if link.error is not None or link.latency_s is None or link.bandwidth_bytes_per_s is None:
        return f"no figures: {link.error or 'not measured'}"
    filled = " (filled in from its sites)" if link.estimated else ""
    return f"{link.latency_s * 1e3:.2f} ms, {_rate(link.bandwidth_bytes_per_s)}{filled}"


def line_words(line: LineProfile) -> str:
    """``20 Mbit/s for all its links together (with n1 and n2 at once)``."""
    rate = _rate(line.bandwidth_bytes_per_s)
    return f"{rate} for all its links together (measured with {' and '.join(line.peers)} at once)"


def _rate(bytes_per_s: float) -> str:
    mbit = bytes_per_s * 8 / 1e6
    return f"{mbit / 1000:.1f} Gbit/s" if mbit >= 1000 else f"{mbit:.3g} Mbit/s"


def _sizes(profile: Profile) -> Sequence[int]:
    sizes: Iterable[int] = (t.microbatch_size for d in profile.devices for t in d.timings)
    return sorted(set(sizes))


def _cell(timing: LayerTiming | None, *, rough: bool) -> str:
    if timing is None:
        return "·"
    if timing.forward_s is None or timing.backward_s is None:
        return "skipped"
    known = f" ±{timing.interval:.1%}" if timing.interval is not None else ""
    return f"{timing.forward_s * 1e3:.3g} + {timing.backward_s * 1e3:.3g}{known}{'?' if rough else ''}"


def _timing_words(timing: LayerTiming, *, rough: bool) -> str:
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


def _had(device: DeviceProfile) -> str:
    """How much of the device the probe had."""
    share = None if device.conditions is None else device.conditions.share
    return "" if share is None else f"{share:.0%}"


def _device_words(device: DeviceProfile) -> str:
    threads = f", {device.threads} thread{'s' if device.threads != 1 else ''}" if device.threads else ""
    slowed = f", slowed {device.slowdown:g} times" if device.slowdown > 1 else ""
    return (
        f"{device.flops_per_s / 1e9:.1f} GFLOP/s{threads}{slowed}, {_gib(device.memory_bytes)} usable "
        f"({device.memory_from}), {_gib(device.reserved_bytes)} of it taken before the first layer"
    )


def _gib(number_bytes: float) -> str:
    return f"{number_bytes / GIB:.1f} GiB" if number_bytes >= GIB else f"{number_bytes / 2**20:.0f} MiB"
