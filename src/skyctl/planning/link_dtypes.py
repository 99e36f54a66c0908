"""``--link-dtype``: which links carry their numbers in fewer bits, and what that leaves to send."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import get_args

from skyctl.errors import InputError
from skyctl.planner.explanation.what_if import SLOW_BYTES_PER_S, sent_share
from skyctl.records.cluster import node_of
from skyctl.records.plan import Plan
from skyctl.records.problem import Link, LinkDtype, Problem

LINK_DTYPES: tuple[LinkDtype, ...] = get_args(LinkDtype)
SLOW_LINKS = "slow"
"""``@slow``: links below ``SLOW_BYTES_PER_S``."""


@dataclass(frozen=True)
class LinkChoice:
    """One ``--link-dtype``. ``where``: None for every link, ``slow``, or a pair of nodes, ``NODE-NODE``."""

    dtype: LinkDtype
    where: str | None = None


def parse_link_dtype(text: str, nodes: Collection[str] | None = None) -> LinkChoice:
    """``int8``, ``bfloat16@slow`` or ``int8@tower-laptop``.

    Args:
        nodes: those there are, where they are known already.

    Raises:
        InputError: no such dtype, or no such node.
    """
    dtype, at, where = (part.strip() for part in text.partition("@"))
    if dtype not in LINK_DTYPES:
        raise InputError(
            f"--link-dtype {text!r}: {dtype!r} is not one of {', '.join(LINK_DTYPES)}",
            hint="give a dtype for all links (int8), or for some: int8@slow, int8@NODE-NODE",
        )
    if at and where != SLOW_LINKS:
        _node_pair(where, nodes)
    return LinkChoice(dtype, where if at else None)


def with_link_dtypes(problem: Problem, choices: Sequence[LinkChoice], activations: str) -> Problem:
    """The problem with its links' ``dtype`` and ``sent_share`` as chosen; of several choices the last wins.

    Args:
        activations: the dtype of what the layers give; a choice that would send no less leaves a link as
            it is.

    Raises:
        InputError: a choice names a node or device that is not in the problem, or a pair without a link.
    """
    if not choices:
        return problem
    names = {name for device in problem.devices for name in (device.id, node_of(device.id))}
    links = list(problem.links)
    for choice in choices:
        named = [i for i, link in enumerate(links) if _is_chosen(choice, link, names)]
        if not named and choice.where not in (None, SLOW_LINKS):
            raise InputError(
                f"--link-dtype {choice.dtype}@{choice.where}: no link is known between these two, so it "
                "counts as free and has nothing to gain"
            )
        share = sent_share(choice.dtype, activations)
        update = {"dtype": choice.dtype if share < 1 else None, "sent_share": share}
        for i in named:
            links[i] = links[i].model_copy(update=update)
    return problem.model_copy(update={"links": tuple(links)})


def encoded_links(plan: Plan) -> list[Link]:
    """Of the links that a plan sends over, those with a dtype, in pipeline order, there before back."""
    links = {(link.source, link.target): link for link in plan.problem.links}
    pairs = [
        pair for pipeline in plan.pipelines for pair in pairwise(stage.device for stage in pipeline.stages)
    ]
    used = [links.get(ends) for a, b in pairs for ends in ((a, b), (b, a))]
    return [link for link in used if link is not None and link.dtype is not None]


def _is_chosen(choice: LinkChoice, link: Link, names: Collection[str]) -> bool:
    if choice.where is None:
        return True
    if choice.where == SLOW_LINKS:
        return link.bandwidth_bytes_per_s < SLOW_BYTES_PER_S
    a, b = _node_pair(choice.where, names)
    source, target = {link.source, node_of(link.source)}, {link.target, node_of(link.target)}
    return (a in source and b in target) or (b in source and a in target)


def _node_pair(text: str, names: Collection[str] | None) -> tuple[str, str]:
    """``tower-laptop`` as two names; names may have hyphens in them, as long as it can be told which."""
    parts = text.split("-")
    cuts = [("-".join(parts[:i]), "-".join(parts[i:])) for i in range(1, len(parts))]
    cuts = [(a, b) for a, b in cuts if a and b]
    if not cuts:
        raise InputError(
            f"--link-dtype: {text!r} is neither {SLOW_LINKS!r} nor a pair of nodes",
            hint="name two nodes: int8@tower-laptop",
        )
    if names is None:
        return cuts[0]
    fit = [cut for cut in cuts if all(_is_known(name, names) for name in cut)]
    if not fit:
        there = ", ".join(sorted({node_of(name) for name in names})[:12])
        unknown = next((b if _is_known(a, names) else a for a, b in cuts if {a, b} & set(names)), text)
        raise InputError(f"--link-dtype @{text}: there is no node {unknown!r}; there is {there}")
    if len(fit) > 1:
        read = " or ".join(f"{a} and {b}" for a, b in fit)
        raise InputError(
            f"--link-dtype @{text} can be read as {read}",
            hint="name the devices in full: int8@NODE/cpu:0-NODE/cpu:0",
        )
    return fit[0]


def _is_known(name: str, names: Collection[str]) -> bool:
    """Whether it is one of them, or a device of one of them while the devices are not known yet."""
    return name in names or ("/" in name and not any("/" in n for n in names) and node_of(name) in names)
