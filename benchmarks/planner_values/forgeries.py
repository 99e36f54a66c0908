"""Plans with one thing changed that ``verify`` is to refuse, in the words of the plan's file."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

from planner_values.outcomes import made_plan
from skyctl import Plan, Problem, SkyctlError, predict, verify
from skyctl.records.base import parse

Document = dict[str, Any]
Forgery = Callable[[Document], bool | None]
"""Changes a plan's document; False: there is nothing to change in this plan."""
SLOWED = 0.25
"""Of all lines' rate, in the problem whose plan is passed off as the best one."""
WORSE = 1e-3
"""By how much such a plan has to be slower than the best."""


def forged(made: Plan, strategy: str, limit_s: float) -> Iterator[tuple[str, bool]]:
    """By kind of forgery that this plan can have, whether it was refused, by its reader or by ``verify``."""
    original = json.loads(made.to_json())
    for kind, change in FORGERIES.items():
        document = copy.deepcopy(original)
        if change(document) is False or document == original:
            continue
        yield kind, _is_refused(made.problem, document)
    for kind, document in _passed_off(made, strategy, limit_s):
        yield kind, _is_refused(made.problem, document)


def _is_refused(problem: Problem, document: Document) -> bool:
    try:
        return not verify(problem, parse(Plan, json.dumps(document), "plan.json")).ok
    except SkyctlError:
        return True


def _passed_off(made: Plan, strategy: str, limit_s: float) -> Iterator[tuple[str, Document]]:
    """A slower plan, predicted truly, that claims to be the best, or a bound between it and the best."""
    best_s = made.certificate.value_s
    if made.certificate.status != "optimal" or strategy == "auto" or not made.problem.links:
        return
    links = tuple(
        link.model_copy(update={"bandwidth_bytes_per_s": link.bandwidth_bytes_per_s * SLOWED})
        for link in made.problem.links
    )
    fewer = {"links": links, "microbatches": made.problem.microbatches}
    try:
        other = made_plan(made.problem.model_copy(update=fewer), strategy, limit_s)
        truly = predict(made.problem, other)
    except SkyctlError:
        return
    bottleneck = made.problem.objective == "bottleneck"
    value_s = truly.bottleneck_s if bottleneck else truly.iteration_s
    if value_s <= best_s * (1 + WORSE):
        return
    document = json.loads(other.to_json())
    document["problem"] = json.loads(made.to_json())["problem"]
    document["predicted"] = json.loads(other.model_copy(update={"predicted": truly}).to_json())["predicted"]
    for kind, status, bound_s in (
        ("a slower plan called optimal", "optimal", value_s),
        ("a bound above the best plan", "bounded", (value_s + best_s) / 2),
    ):
        proof = {"status": status, "value_s": value_s, "lower_bound_s": bound_s}
        gap = value_s / bound_s - 1
        yield (
            kind,
            {**document, "certificate": {**document["certificate"], **proof, "gap": gap, "witness": None}},
        )


def _stages(document: Document) -> list[list[Document]]:
    """By pipeline, its stages; those of the form ``grid`` keep device and so on in their replica."""
    if "stages" in document:
        return [document["stages"]]
    return [pipeline["stages"] for pipeline in document["pipelines"]]


def _placed(stage: Document) -> Document:
    replica: Document = stage["replicas"][0] if "replicas" in stage else stage
    return replica


def _first(document: Document) -> Document:
    return _placed(_stages(document)[0][0])


def _scaled(*path: str | int, by: float) -> Forgery:
    """Multiplies a figure of the document, where there is one that is not 0."""

    def change(document: Document) -> bool | None:
        at: Any = document
        for key in path[:-1]:
            at = at.get(key) if isinstance(at, dict) else at[key]
            if not at:
                return False
        if not isinstance(at.get(path[-1]), int | float) or not at[path[-1]]:
            return False
        at[path[-1]] *= by
        return None

    return change


def _moved_cut(document: Document) -> bool | None:
    for stages in _stages(document):
        for before, after in itertools.pairwise(stages):
            if after["stop"] - after["start"] > 1:
                before["stop"] += 1
                after["start"] += 1
                return None
            if before["stop"] - before["start"] > 1:
                before["stop"] -= 1
                after["start"] -= 1
                return None
    return False


def _moved_share(document: Document) -> bool | None:
    pipelines = document.get("pipelines", ())
    giving = next((one for one in pipelines if one["microbatches"] > 1), None)
    taking = next((one for one in pipelines if one is not giving), None)
    if giving is None or taking is None:
        return False
    giving["microbatches"] -= 1
    taking["microbatches"] += 1
    return None


def _fewer_microbatches(document: Document) -> bool | None:
    if "pipelines" in document:
        document["pipelines"][0]["microbatches"] += 1
    else:
        _first(document)["microbatches"] += 1
    return None


def _swapped_devices(document: Document) -> bool | None:
    """All names as in the problem, but two stages' devices change places in the stages alone."""
    placed = [_placed(stage) for stages in _stages(document) for stage in stages]
    if len(placed) < 2:
        return False
    placed[0]["device"], placed[-1]["device"] = placed[-1]["device"], placed[0]["device"]
    return None


def _unused_device(document: Document) -> bool | None:
    """An unused device holds the first stage, everywhere that it is named."""
    if not document["unused"]:
        return False
    old, new = _first(document)["device"], document["unused"][0]["device"]
    problem = document.pop("problem")
    text = json.dumps(document).replace(json.dumps(old), '"?"')
    text = text.replace(json.dumps(new), json.dumps(old)).replace('"?"', json.dumps(new))
    document.clear()
    document.update({**json.loads(text), "problem": problem})
    return None


def _unknown_device(document: Document) -> None:
    _first(document)["device"] = "nobody/cpu:0"


def _in_flight(by: int) -> Forgery:
    def change(document: Document) -> None:
        _first(document)["in_flight"] += by

    return change


def _recomputes(document: Document) -> None:
    placed = _first(document)
    placed["recompute"] = not placed.get("recompute", False)


def _defers(document: Document) -> None:
    placed = _first(document)
    placed["weights_behind"] = placed.get("weights_behind", 0) + 1


def _routes(document: Document) -> list[Document]:
    return [route for group in (document.get("sync") or {}).get("groups", ()) for route in group["routes"]]


def _dropped_edge(document: Document) -> bool | None:
    routes = _routes(document)
    if not routes:
        return False
    routes[0]["up"] = routes[0]["up"][1:]
    return None


def _turned_edge(document: Document) -> bool | None:
    routes = _routes(document)
    if not routes:
        return False
    routes[0]["down"][0] = routes[0]["down"][0][::-1]
    return None


def _other_root(document: Document) -> bool | None:
    routes = _routes(document)
    if not routes:
        return False
    route = routes[0]
    names = {name for edge in route["up"] for name in edge} - {route["root"]}
    route["root"] = min(names)
    return None


def _less_routed(document: Document) -> bool | None:
    routes = _routes(document)
    if not routes:
        return False
    routes[0]["share"] *= 0.9
    return None


def _smaller_group(document: Document) -> bool | None:
    groups = (document.get("sync") or {}).get("groups", ())
    if not groups or groups[-1]["stop"] - groups[-1]["start"] < 2:
        return False
    groups[-1]["stop"] -= 1
    return None


def _other_format(document: Document) -> bool | None:
    if not document.get("sync"):
        return False
    given = document["sync"].get("format", "float32")
    document["sync"]["format"] = "bfloat16" if given != "bfloat16" else "float32"
    return None


def _called_unused(document: Document) -> None:
    document["unused"] = [*document["unused"], {"device": _first(document)["device"], "reason": "slow"}]


def _faster(document: Document) -> None:
    """Value and prediction agree, and are both too low."""
    proof = document["certificate"]
    proof.update(value_s=proof["value_s"] * 0.99, status="feasible", lower_bound_s=None, gap=None)
    proof.pop("witness", None)
    for name in ("iteration_s", "bottleneck_s"):
        document["predicted"][name] *= 0.99


def _bound_above(document: Document) -> bool | None:
    """A bound above the plan's own value, called bounded."""
    proof = document["certificate"]
    if proof["lower_bound_s"] is None:
        return False
    proof.update(status="bounded", lower_bound_s=proof["value_s"] * 1.01, gap=1 / 1.01 - 1)
    return None


def _no_gap(document: Document) -> bool | None:
    """A bound with a gap, called optimal."""
    proof = document["certificate"]
    if proof["lower_bound_s"] is None:
        return False
    proof.update(status="optimal", lower_bound_s=proof["value_s"] * 0.9, gap=1 / 0.9 - 1)
    return None


def _closed_gap(document: Document) -> bool | None:
    """A bound that was not proved to be the value, said to be it."""
    proof = document["certificate"]
    if proof["status"] != "bounded" or proof["gap"] < WORSE:
        return False
    proof.update(status="optimal", lower_bound_s=proof["value_s"], gap=0.0)
    return None


def _without_bound(document: Document) -> bool | None:
    proof = document["certificate"]
    if proof["lower_bound_s"] is None:
        return False
    proof["lower_bound_s"] = None
    return None


def _dearer_prices(document: Document) -> bool | None:
    witness = document["certificate"].get("witness")
    if not witness:
        return False
    if witness.get("route_prices"):
        witness["route_prices"][0]["byte_s"] *= 1.1
    else:
        witness["layer_prices"] = [10 * price for price in witness["layer_prices"]]
    return None


def _other_steps(document: Document) -> bool | None:
    pipeline = document.get("pipelines", [{}])[0]
    if not pipeline.get("local_steps"):
        return False
    pipeline["local_steps"] += 1
    return None


def _interval_off(document: Document) -> bool | None:
    interval = document["predicted"].get("interval")
    if not interval:
        return False
    interval["high_s"] *= 2
    interval["low_s"] = document["predicted"]["iteration_s"] * 1.5
    return None


def _faster_form(document: Document) -> bool | None:
    """The chosen form's step is not the one that the plan takes."""
    chosen = document["problem"].get("parallel", "pipeline")
    outcome = next((one for one in document.get("forms", ()) if one["parallel"] == chosen), None)
    if outcome is None:
        return False
    outcome["iteration_s"] *= 0.9
    return None


def _form_bound(document: Document) -> bool | None:
    """Another form's bound is above what that form was found to take."""
    chosen = document["problem"].get("parallel", "pipeline")
    for one in document.get("forms", ()):
        if one["parallel"] != chosen and one["lower_bound_s"] is not None:
            one["lower_bound_s"] = one["iteration_s"] * 1.01
            return None
    return False


def _faster_links(document: Document) -> bool | None:
    """The problem in the plan is another one."""
    for link in document["problem"].get("links", ()):
        link["bandwidth_bytes_per_s"] *= 2
    return bool(document["problem"].get("links"))


FORGERIES: dict[str, Forgery] = {
    "layers: a cut moved": _moved_cut,
    "share: a microbatch moved": _moved_share,
    "share: one microbatch more": _fewer_microbatches,
    "device: two swapped": _swapped_devices,
    "device: an unused one in another's place": _unused_device,
    "device: unknown": _unknown_device,
    "device: one that is used, called unused": _called_unused,
    "stage: one more in flight": _in_flight(1),
    "stage: one fewer in flight": _in_flight(-1),
    "stage: recomputes or not": _recomputes,
    "stage: weight gradients put off": _defers,
    "route: an edge dropped": _dropped_edge,
    "route: an edge turned": _turned_edge,
    "route: another root": _other_root,
    "route: a share smaller": _less_routed,
    "sum: a group without its last layer": _smaller_group,
    "sum: another format": _other_format,
    "value: 1% lower": _scaled("certificate", "value_s", by=0.99),
    "value and step: 1% lower": _faster,
    "step: 1% lower": _scaled("predicted", "iteration_s", by=0.99),
    "step: slowest stage 1% lower": _scaled("predicted", "bottleneck_s", by=0.99),
    "step: sum 10% lower": _scaled("predicted", "sync_s", by=0.9),
    "step: busy time 1% lower": _scaled("predicted", "replicas", 0, "compute_s", by=0.99),
    "step: idle time 10% lower": _scaled("predicted", "replicas", 0, "idle_s", by=0.9),
    "memory: 1% lower": _scaled("predicted", "replicas", 0, "memory_bytes", by=0.99),
    "gap: 10% lower": _scaled("certificate", "gap", by=0.9),
    "bound: above the value": _bound_above,
    "bound: 10% off, called optimal": _no_gap,
    "bound: unproved, called optimal": _closed_gap,
    "bound: none, but a status with one": _without_bound,
    "bound: its prices raised": _dearer_prices,
    "rounds: a local step more": _other_steps,
    "interval: beside the step": _interval_off,
    "forms: the chosen one faster": _faster_form,
    "forms: a bound above a step": _form_bound,
    "problem: links twice as fast": _faster_links,
}
