"""What carries tensors between a run's ranks (``--backend``), and what each of these can't do."""

from __future__ import annotations

from skyctl.errors import InputError
from skyctl.records.cluster import split_device_id
from skyctl.records.plan import Plan

SKYCTL, GLOO = BACKENDS = ("skyctl", "gloo")
"""Ours: each pair is proved from its first byte, any device, TLS. Gloo: torch's, on CPUs, in the clear."""


def check_backend(backend: str, *, encrypt: bool, pins: bool = False) -> None:
    """Raises InputError where that backend can't do what was asked for beside it."""
    if backend == GLOO and encrypt:
        raise InputError(
            "--backend gloo does not go with --encrypt: torch's Gloo has no TLS",
            hint="--backend skyctl encrypts; or leave --encrypt out on a network that is yours alone",
        )
    if backend == GLOO and pins:
        raise InputError(
            "--backend gloo does not go with --pin-first and --pin-last: what passes from the owners of data "
            "would be open to whoever is at a peer's address",
            hint="--backend skyctl proves every pair from its first byte",
        )


def check_backend_of_plan(backend: str, plan: Plan, *, encrypt: bool) -> None:
    """Raises InputError where that backend can't carry the plan's tensors."""
    problem = plan.problem
    pins = problem.first_stage is not None or problem.last_stage is not None
    check_backend(backend, encrypt=encrypt or plan.encrypted, pins=pins)
    if backend == GLOO:
        for device in (*(stage.device for stage in plan.placed_stages), *plan.helpers):
            if not split_device_id(device)[1].startswith("cpu"):
                raise InputError(
                    f"--backend gloo carries tensors between CPUs, and the plan uses {device}",
                    hint="--backend skyctl carries those of any device",
                )
