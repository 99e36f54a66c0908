"""Plans of the user's own (``--assign``): ranges of layers for a pipeline, or shares of the microbatches."""

from __future__ import annotations

import re
from collections.abc import Sequence

from skyctl.errors import InputError
from skyctl.planner.api import assigned
from skyctl.records.cluster import split_device_id
from skyctl.records.plan import Plan
from skyctl.records.problem import Problem

NUMBER = re.compile("[0-9]{1,18}")
"""A number of a layer or of microbatches as `--assign` takes it."""


def plan_assigned(
    problem: Problem,
    ranges: Sequence[tuple[str, int, int]] | None,
    shares: Sequence[tuple[str, int]] | None,
) -> Plan:
    """The plan of the user's own; a node's name means its only device.

    Args:
        ranges: (device or node, start, stop) in pipeline order.
        shares: (device or node, microbatches), where every device holds all layers; one of both is given.

    Raises:
        InputError: the problem asks for another parallelism, or see ``api.assigned``.
        InfeasibleError: see ``api.assigned``.
    """
    if problem.parallel == "hybrid":
        raise InputError(
            "--assign gives one pipeline its layers, or devices that hold all layers their microbatches; "
            "--parallel hybrid has no way to say both",
            hint="--parallel pipeline, or --parallel data",
        )
    is_data = problem.parallel == "data"
    if ranges is not None:
        if is_data:
            raise InputError(
                "--assign with ranges of layers makes a pipeline; with --parallel data every device has all",
                hint='give microbatches: --assign "n1=5,n2=3"',
            )
        return assigned(problem, [(_device_of(name, problem), start, stop) for name, start, stop in ranges])
    if not is_data:
        raise InputError(
            "--assign with numbers of microbatches goes with --parallel data",
            hint='a pipeline takes ranges of layers: --assign "n1=0:5,n2=5:12"',
        )
    return assigned(problem, [(_device_of(name, problem), count) for name, count in shares or ()])


def _device_of(name: str, problem: Problem) -> str:
    """The device's id; a node's name means its only device. InputError where there is no such device."""
    ids = [device.id for device in problem.devices]
    owned = [name] if name in ids else [i for i in ids if split_device_id(i)[0] == name]
    if len(owned) != 1:
        why = f"that node has {len(owned)} devices" if owned else "no device is so called"
        raise InputError(f"--assign names {name!r}; {why}. Devices: {', '.join(ids)}")
    return owned[0]


def parse_assign(text: str) -> list[tuple[str, int, int]]:
    """``n1=0:5,n2=5:12`` → [(n1, 0, 5), (n2, 5, 12)]; ranges are half-open.

    Raises:
        InputError: naming the part that does not fit.
    """
    out = []
    for part in text.split(","):
        name, equals, span = part.strip().rpartition("=")
        start, colon, stop = span.partition(":")
        if not (equals and colon and name and all(map(NUMBER.fullmatch, (start, stop)))):
            raise InputError(
                f"--assign {part.strip()!r} is not NODE=START:STOP",
                hint='give half-open ranges that follow each other: --assign "n1=0:5,n2=5:12"; with '
                '--parallel data microbatches: --assign "n1=5,n2=3"',
            )
        out.append((name, int(start), int(stop)))
    return sorted(out, key=lambda item: item[1])


def parse_assigned_shares(text: str) -> list[tuple[str, int]] | None:
    """``n1=5,n2=3`` → [(n1, 5), (n2, 3)]; None where a part is of another form, such as a range of layers."""
    out = []
    for part in text.split(","):
        name, _, count = part.strip().rpartition("=")
        if not (name and NUMBER.fullmatch(count)):
            return None
        out.append((name, int(count)))
    return out
