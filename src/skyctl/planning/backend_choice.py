"""The backends that carry a run's tensors (``--backend``): what each can't do, and which one is chosen."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from ipaddress import ip_address, ip_network
from typing import Any, cast

from skyctl.compare.number_format import format_seconds
from skyctl.errors import InputError
from skyctl.records.backend import (
    AUTO,
    GLOO,
    NCCL,
    SKYCTL,
    Backend,
    BackendChoice,
    BackendReason,
    BackendRequest,
)
from skyctl.records.cluster import Cluster, device_id, device_kind, node_of
from skyctl.records.plan import Plan
from skyctl.records.problem import Problem
from skyctl.records.profile import (
    HANDLING_NEIGHBOURS,
    DeviceProfile,
    LinkProfile,
    MessageCosts,
    Profile,
)

NEAR = 0.02
"""Gloo's predicted step may be longer than ours by this part of it."""
KINDS: Mapping[Backend, str] = {GLOO: "cpu", NCCL: "cuda"}
"""The kind of devices between which a backend carries tensors; ours does between any."""
_NAMES: Mapping[str, str] = {GLOO: "torch's Gloo", NCCL: "NCCL"}
_KIND_NAMES: Mapping[Backend, str] = {GLOO: "CPUs", NCCL: "CUDA devices"}
_PRIVATE = tuple(
    map(ip_network, ("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16"))
)


def check_backend(backend: str, *, encrypt: bool, pins: bool = False, helpers: bool = False) -> None:
    """Raises InputError where that backend can't do what was asked for beside it; ours and ``auto`` can."""
    if backend not in KINDS:
        return
    if encrypt:
        raise InputError(
            f"--backend {backend} does not go with --encrypt: {_NAMES[backend]} has no TLS",
            hint="--backend skyctl encrypts; or leave --encrypt out on a network that is yours alone",
        )
    if pins:
        raise InputError(
            f"--backend {backend} does not go with --pin-first and --pin-last: what passes from the owners "
            "of data would be open to whoever is at a peer's address",
            hint="--backend skyctl proves every pair from its first byte",
        )
    if helpers and backend == NCCL:
        raise InputError(
            "--backend nccl does not go with --helper: helpers sum in a processor's memory",
            hint="--backend skyctl, or leave --helper out",
        )


def check_backend_of_cluster(backend: str, cluster: Cluster) -> None:
    """Raises InputError where that backend carries the tensors of none of the devices that it lists."""
    listed = [device_id(node.name, device) for node in cluster.nodes for device in node.devices or ()]
    if all(node.devices is not None for node in cluster.nodes) and backend in KINDS:
        _require_carried(backend, listed, "the cluster file lists")


def check_backend_of_plan(plan: Plan, *, encrypt: bool) -> None:
    """Raises InputError where the plan's backend can't carry its tensors."""
    problem, backend = plan.problem, backend_of(plan)
    pins = problem.first_stage is not None or problem.last_stage is not None
    check_backend(backend, encrypt=encrypt or plan.encrypted, pins=pins, helpers=bool(plan.helpers))
    if wrong := uncarried(backend, devices_in(plan)):
        raise InputError(
            f"--backend {backend} carries tensors between {_KIND_NAMES[backend]}, and the plan uses "
            f"{wrong[0]}",
            hint="--backend skyctl carries those of any device",
        )


def backend_of(plan: Plan) -> Backend:
    """The backend that carries a plan's tensors; ours if the plan does not say."""
    return SKYCTL if plan.backend is None else plan.backend.backend


def costs_of(plan: Plan) -> Backend:
    """Whose costs per message a plan reckons with."""
    return SKYCTL if plan.backend is None else plan.backend.costs


def devices_in(plan: Plan) -> list[str]:
    """The devices of a plan that have a rank, helpers last."""
    return [*(stage.device for stage in plan.placed_stages), *plan.helpers]


def uncarried(backend: Backend, devices: Iterable[str]) -> list[str]:
    """Those of the devices whose tensors that backend does not carry."""
    kind = KINDS.get(backend)
    return [] if kind is None else [device for device in devices if device_kind(device) != kind]


def with_asked_backend(plan: Plan, backend: Backend | None, *, encrypt: bool = False) -> Plan:
    """The plan, to be run over a backend that the user names; None: over its own.

    A backend chosen for it, and not asked for, gives way to ours if it does not carry all devices.

    Args:
        encrypt: its run is; then it gives way, too.
    """
    current = plan.backend
    if backend is None:
        chosen = _given_way(current, plan, encrypt=encrypt)
    elif current is not None and current.is_asked and current.backend == backend:
        chosen = current
    else:
        chosen = BackendChoice(backend=backend, reason="asked", costs=costs_of(plan))
    return plan if chosen is current else plan.model_copy(update={"backend": chosen})


# --- which one is chosen


def reason_for_ours(
    *,
    encrypt: bool,
    pins: bool,
    helpers: Sequence[str],
    devices: Sequence[str],
    addresses: Mapping[str, str | None],
) -> tuple[BackendReason, tuple[str, ...]] | None:
    """Why only ``skyctl`` will do, and the nodes or devices that it is for; None: another one may.

    Args:
        encrypt: what passes between ranks goes through TLS.
        pins: nodes are named that alone may hold an end stage.
        helpers: those that hold no layers, and sum.
        devices: those with a rank.
        addresses: by node, where its peers reach it; None: nobody knows.
    """
    if encrypt:
        return "encryption", ()
    if pins:
        return "pins", ()
    if helpers:
        return "helpers", tuple(helpers)
    nodes = dict.fromkeys(map(node_of, devices))
    if unknown := [node for node in nodes if addresses.get(node) is None]:
        return "unknown address", tuple(unknown)
    if public := [node for node in nodes if not is_private(addresses[node] or "")]:
        return "public address", tuple(public)
    kinds = {device_kind(device): device for device in devices}
    if len(kinds) > 1 or not kinds.keys() & set(KINDS.values()):
        return "devices", tuple(kinds.values())
    return None


def is_private(address: str) -> bool:
    """Whether an IPv4 address is loopback, or is of a network that the internet does not route to."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    return any(parsed in network for network in _PRIVATE)


def weigh_gloo(gloo_s: float, skyctl_s: float, helpers: Sequence[str] = ()) -> BackendChoice:
    """The choice between Gloo and ours for CPUs that may use either, by the predicted steps of one placement.

    Args:
        gloo_s, skyctl_s: seconds of a step, by each one's own costs per message.
        helpers: devices that only help to sum in it.
    """
    if helpers:
        return BackendChoice(backend=SKYCTL, reason="helpers", about=tuple(helpers))
    if gloo_s <= skyctl_s * (1 + NEAR):
        return BackendChoice(
            backend=GLOO, reason="near", costs=GLOO, alternative=SKYCTL, alternative_s=skyctl_s
        )
    return BackendChoice(backend=SKYCTL, reason="slower", alternative=GLOO, alternative_s=gloo_s)


def replanned_choice(current: BackendChoice | None, plan: Plan) -> BackendChoice | None:
    """The backend of a plan that takes another one's place, whose backend was ``current``.

    One that a user asked for stays. A chosen one stays if it carries all devices, else ours takes over.
    """
    chosen = _given_way(current, plan)
    if chosen is None or chosen.is_asked:
        return chosen
    return chosen.model_copy(update={"alternative": None, "alternative_s": None})


def _given_way(current: BackendChoice | None, plan: Plan, *, encrypt: bool = False) -> BackendChoice | None:
    """The choice, or ours in its place if nobody asked for it and it can't carry the plan's tensors."""
    if current is None or current.is_asked or current.backend == SKYCTL:
        return current
    ours: dict[str, Any] = {"backend": SKYCTL, "alternative": None, "alternative_s": None}
    if encrypt:
        return current.model_copy(update={**ours, "reason": "encryption", "about": ()})
    if wrong := uncarried(current.backend, devices_in(plan)):
        return current.model_copy(update={**ours, "reason": "devices", "about": tuple(wrong)})
    return current


def choice_at_addresses(current: BackendChoice | None, addresses: Mapping[str, str]) -> BackendChoice | None:
    """The choice once it is known where nodes are reached: what nobody asked for may give way to ours."""
    if current is None or current.is_asked or current.backend == SKYCTL:
        return current
    public = tuple(node for node, address in addresses.items() if not is_private(address))
    if not public:
        return current
    return current.model_copy(update={"backend": SKYCTL, "reason": "public address", "about": public})


# --- what it costs


def measures_gloo(asked: BackendRequest | BackendChoice | None) -> bool:
    """Whether a probe is to measure what messages cost over Gloo, too."""
    return (asked.backend if isinstance(asked, BackendChoice) else asked) in (AUTO, GLOO)


def profile_over(
    profile: Profile, backend: Backend, only_nodes: Collection[str] | None = None
) -> tuple[Profile, list[str]]:
    """The profile as if its messages went over that backend, and the devices whose costs over it are unknown.

    Devices whose tensors it does not carry are left out; those without its figures keep those of ``skyctl``,
    and so do all over NCCL, which nothing has measured. The seconds that links take beyond loopback stay.

    Args:
        only_nodes: those that may be used; None: all.

    Raises:
        InputError: it carries no device's tensors.
    """
    there = [device for device in profile.devices if only_nodes is None or device.node in only_nodes]
    wrong = uncarried(backend, [device.id for device in there])
    devices = [device for device in there if device.id not in wrong]
    _require_carried(backend, [device.id for device in there], f"cluster {profile.cluster!r} was measured on")
    if backend != GLOO:
        return profile.model_copy(update={"devices": tuple(devices)}), []
    more = {device.node: _more_byte_s(device) for device in devices}
    update: dict[str, Any] = {
        "devices": tuple(_with_costs(device, device.gloo) for device in devices),
        "links": tuple(_with_byte_s(link, more) for link in profile.links),
    }
    return profile.model_copy(update=update), [device.id for device in devices if device.gloo is None]


def with_message_costs(problem: Problem, other: Problem) -> Problem:
    """The problem with what messages cost its devices as ``other`` has it."""
    by_id = {device.id: device for device in other.devices}
    names = ("handling_s", "neighbour_s", "step_s", "message_byte_s")
    devices = tuple(
        device.model_copy(update={name: getattr(by_id[device.id], name) for name in names})
        for device in problem.devices
    )
    return problem.model_copy(update={"devices": devices})


def _require_carried(backend: str, devices: Sequence[str], there: str) -> None:
    kind = KINDS.get(cast("Backend", backend))
    if kind is not None and devices and all(device_kind(device) != kind for device in devices):
        raise InputError(
            f"--backend {backend} carries tensors between {_KIND_NAMES[cast('Backend', backend)]}, and "
            f"{there} {_some(devices)}",
            hint="--backend skyctl carries those of any device",
        )


def _with_costs(device: DeviceProfile, costs: MessageCosts | None) -> DeviceProfile:
    if costs is None:
        return device
    return device.model_copy(update=costs.model_dump(exclude={"ring_byte_s"}))


def with_ring_costs(profile: Profile, links: Sequence[LinkProfile]) -> Profile | None:
    """A profile as if messages went over Gloo, whose sums go in rings that its own collective sums over.

    None where that was not measured, or where no link is so fast that processors could hold sums up.

    Args:
        links: those that plans may use.
    """
    devices = []
    for device in profile.devices:
        if device.gloo is None or device.gloo.ring_byte_s is None:
            return None
        devices.append(device.model_copy(update={"message_byte_s": device.gloo.ring_byte_s}))
    fastest = max((link.bandwidth_bytes_per_s or 0.0 for link in links), default=0.0)
    slowest_s = max((device.message_byte_s for device in profile.devices), default=0.0)
    return profile.model_copy(update={"devices": tuple(devices)}) if 2 * slowest_s * fastest > 1 else None


def _more_byte_s(device: DeviceProfile) -> float:
    """The seconds that sending or receiving a byte takes more over Gloo than over ours, on loopback."""
    if device.gloo is None:
        return 0.0
    return (device.gloo.handling_byte_s - device.handling_byte_s) / (2 * HANDLING_NEIGHBOURS)


def _with_byte_s(link: LinkProfile, more: Mapping[str, float]) -> LinkProfile:
    ends = {"source_byte_s": link.source, "target_byte_s": link.target}
    byte_s = {name: getattr(link, name) for name in ends}
    return link.model_copy(
        update={
            name: max(0.0, byte_s[name] + more.get(node, 0.0))
            for name, node in ends.items()
            if byte_s[name] is not None
        }
    )


# --- said


def describe_choice(choice: BackendChoice, step_s: float) -> str:
    """One line: what carries tensors between ranks, and why.

    Args:
        step_s: the plan's predicted step.
    """
    line = f"tensors go over {choice.backend}: {_why(choice)}"
    if choice.alternative is not None and choice.alternative_s is not None:
        line += (
            f" ({format_seconds(step_s)} predicted, {format_seconds(choice.alternative_s)} over "
            f"{choice.alternative})"
        )
    if choice.costs != (GLOO if choice.backend == GLOO else SKYCTL):
        line += f"; predicted with what messages cost over {choice.costs}"
        if choice.is_asked and choice.about:
            line += f", since over {choice.backend} that was not measured on {_some(choice.about)}"
    return line


def _why(choice: BackendChoice) -> str:
    about = _some(choice.about)
    reasons: Mapping[BackendReason, str] = {
        "asked": "asked for",
        "near": f"CPUs at private addresses, and no step is more than {NEAR:.0%} longer than over skyctl",
        "cuda": "CUDA devices at private addresses",
        "encryption": "it alone encrypts",
        "pins": "end stages are pinned, and it alone proves every pair from the first byte",
        "helpers": f"{about} only help to sum",
        "devices": f"it carries tensors of any device, and {about} are of several kinds or of another one",
        "public address": f"{about} are reached at an address that is not private",
        "unknown address": f"nobody knows where peers reach {about}",
        "unmeasured": f"what messages cost over gloo was not measured on {about} (skyctl probe does)",
        "slower": f"over gloo a step would be more than {NEAR:.0%} longer",
        "failed": "gloo could not connect the ranks",
    }
    return reasons[choice.reason]


def describe_left_out(plan: Plan, profile: Profile) -> str | None:
    """The devices of a profile that a plan could not use, since the backend asked for does not carry them."""
    backend = backend_of(plan)
    wrong = uncarried(backend, [device.id for device in profile.devices])
    if plan.backend is None or not plan.backend.is_asked or not wrong:
        return None
    between = f"--backend {backend} carries tensors between {_KIND_NAMES[backend]} alone"
    return f"left out: {_some(wrong)}: {between}"


def _some(names: Collection[str], most: int = 3) -> str:
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
