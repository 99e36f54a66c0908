"""``probe --quick``: a profile beside what the cluster shows in a few seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from skyctl.control.changes import Change, machines, of_machine
from skyctl.control.connect import Connected, need_all
from skyctl.control.probing import progress_words, ship_timed
from skyctl.control.request import Request
from skyctl.errors import InputError
from skyctl.probe.shapes import layer_names
from skyctl.records.base import GIB
from skyctl.records.cluster import Cluster
from skyctl.records.profile import DeviceProfile, LayerTiming, LinkProfile, Profile

if TYPE_CHECKING:
    from skyctl.workload.workload import Workload

BUDGET_S = 1.0
TIMES = 0.25
"""How far a layer's time may be from the profile's, either way (docs/decisions.md)."""
LESS_MEMORY = 0.10
RATE = 0.30
FAST_BYTES_PER_S = 2.5e8
"""Rates above (2 Gbit/s) are the machine's own, its processors' load in them: no plan waits for them."""
LATENCY = 0.5
LATENCY_S = 0.002
"""A latency may be off by half of it and this."""


def request_of_profile(profile: Profile) -> tuple[Request, Workload] | tuple[None, None]:
    """The workload that a profile was taken with, loaded again; Nones where it was taken without.

    Raises:
        InputError: it has changed since, or is not here.
    """
    from skyctl.workload.spec import make_spec
    from skyctl.workload.workload import load

    had = profile.workload
    if had is None:
        return None, None
    spec = make_spec(
        had.source, batch_size=had.batch_size, seed=0, dtype=had.dtype, data_path=None, random_inputs=True
    )
    workload = load(spec)
    if workload.digest != had.digest:
        raise InputError(
            f"{had.source} has changed since it was measured", hint=f"measure it: skyctl probe {had.source}"
        )
    request = Request(workload.spec, microbatches=most_microbatches(profile), encrypt=profile.encrypted)
    return request, workload


def most_microbatches(profile: Profile) -> int | None:
    """Of the sizes measured the smallest microbatch, which is the quickest to time."""
    shapes = profile.workload.shapes if profile.workload is not None else ()
    return max((shape.microbatches for shape in shapes), default=None)


def recheck_cluster(
    cluster: Cluster,
    links: Connected,
    then: Profile,
    request: Request | None,
    workload: Workload | None,
    on_progress: Callable[[str], None],
) -> Profile:
    """What a quick look shows: devices, versions, memory, each device's costliest layer, a ring of links.

    Raises:
        NodeError: no node answered.
    """
    from skyctl.probe.collect import Recheck, probe

    if not links.sessions:
        need_all(links.failures)
    spec, told = ship_timed(request, links, on_progress)
    known = {(link.source, link.target): link for link in then.links}
    return probe(
        cluster,
        {**links.sessions, **links.failures},
        workload,
        spec,
        request.choices() if request is not None else [],
        progress_words(on_progress),
        node_specs=told,
        budget_s=BUDGET_S,
        encrypt=then.encrypted,
        recheck=Recheck(then, lambda now: not _of_link(known.get((now.source, now.target)), now)),
    )


def differences(then: Profile, now: Profile) -> list[Change]:
    """What is not as it was, beyond what two measurements of the same thing may differ by. Pure.

    A node that the profile has no device of, and that failed now, is no difference.
    """
    found: list[Change] = []
    nodes = {node.name for node in now.nodes} | {failure.node for failure in now.failures}
    for failure in now.failures:
        if failure.node in {device.node for device in then.devices}:
            found.append(Change(failure.node, "node", "measured", failure.error))
    there = {device.id: device for device in now.devices}
    failed = {failure.node for failure in now.failures}
    before = {machine.device: machine for machine in machines(then, [d.id for d in then.devices])}
    after = {machine.device: machine for machine in machines(now, list(there))}
    for device in then.devices:
        if device.node not in nodes or device.node in failed:
            continue
        if device.id not in there:
            found.append(Change(device.id, "device", device.name, "not there"))
            continue
        if device.id in before:
            found += of_machine(before[device.id], after[device.id])
        found += _of_device(device, there[device.id], layer_names(then))
    new = there.keys() - {device.id for device in then.devices}
    found += [Change(name, "device", "not measured before", there[name].name) for name in sorted(new)]
    links = {(link.source, link.target): link for link in then.links}
    for link in now.links:
        found += _of_link(links.get((link.source, link.target)), link)
    return found


def _of_device(then: DeviceProfile, now: DeviceProfile, names: dict[str, str]) -> list[Change]:
    found = []
    if now.memory_bytes < then.memory_bytes * (1 - LESS_MEMORY):
        had, has = (f"{one.memory_bytes / GIB:.2f} GiB" for one in (then, now))
        change = f"{now.memory_bytes / then.memory_bytes - 1:+.0%}"
        found.append(Change(then.id, "usable memory", had, has, change))
    known = {(t.signature, t.microbatch_size): t for t in then.timings}
    for timing in now.timings:
        had_t = known.get((timing.signature, timing.microbatch_size))
        had_s = _seconds(had_t) if had_t is not None else None
        if not had_s:
            continue
        has_s = _seconds(timing)
        name = names.get(timing.signature, "a layer").partition(" ×")[0]
        what = f"{name}, microbatch of {timing.microbatch_size}"
        if has_s is None:
            found.append(Change(then.id, what, f"{had_s * 1e3:.2f} ms", timing.skipped or "no figures"))
        elif abs(has_s / had_s - 1) > TIMES:
            change = f"{has_s / had_s - 1:+.0%}"
            found.append(Change(then.id, what, f"{had_s * 1e3:.2f} ms", f"{has_s * 1e3:.2f} ms", change))
    return found


def _seconds(timing: LayerTiming) -> float | None:
    if timing.forward_s is None or timing.backward_s is None:
        return None
    return timing.forward_s + timing.backward_s


def _of_link(then: LinkProfile | None, now: LinkProfile) -> list[Change]:
    """Nothing where it was not measured then."""
    if then is None or then.estimated or then.error is not None:
        return []
    where = f"{now.source} → {now.target}"
    if now.error is not None or now.latency_s is None or now.bandwidth_bytes_per_s is None:
        return [Change(where, "link", "connected", now.error or "no figures")]
    found = []
    had_s, had_rate = then.latency_s, then.bandwidth_bytes_per_s
    if had_s is not None and abs(now.latency_s - had_s) > LATENCY * had_s + LATENCY_S:
        change = f"{(now.latency_s - had_s) * 1e3:+.1f} ms"
        had, has = f"{had_s * 1e3:.1f} ms", f"{now.latency_s * 1e3:.1f} ms"
        found.append(Change(where, "latency", had, has, change))
    fast = min(now.bandwidth_bytes_per_s, had_rate or 0.0) > FAST_BYTES_PER_S
    if had_rate and not fast and abs(now.bandwidth_bytes_per_s / had_rate - 1) > RATE:
        had, has = (f"{rate * 8 / 1e6:.0f} Mbit/s" for rate in (had_rate, now.bandwidth_bytes_per_s))
        found.append(Change(where, "rate", had, has, f"{now.bandwidth_bytes_per_s / had_rate - 1:+.0%}"))
    return found
