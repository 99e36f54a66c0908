"""The backend that carries tensors between the ranks of a run, and the reason for its choice."""

from __future__ import annotations

from typing import Literal, get_args

from skyctl.records.base import Name, Record, Seconds, Seq

Backend = Literal["skyctl", "gloo", "nccl"]
"""Ours: each pair is proved from its first byte, any device, TLS. Gloo: torch's, between CPUs, in the clear.
NCCL: between CUDA devices, in the clear, over pairs that ours has proved."""
BackendRequest = Literal["auto", "gloo", "nccl", "skyctl"]
SKYCTL: Backend = "skyctl"
GLOO: Backend = "gloo"
NCCL: Backend = "nccl"
AUTO: BackendRequest = "auto"
BACKENDS: tuple[Backend, ...] = get_args(Backend)
DEFAULT_BACKEND: BackendRequest = AUTO
"""The request if neither an option nor the cluster file names one."""
BACKEND_REQUESTS: tuple[BackendRequest, ...] = get_args(BackendRequest)

BackendReason = Literal[
    "asked",
    "near",
    "cuda",
    "encryption",
    "pins",
    "helpers",
    "devices",
    "public address",
    "unknown address",
    "unmeasured",
    "slower",
    "failed",
]


class BackendChoice(Record):
    """The backend of a plan, decided once.

    Attributes:
        reason: ``asked``: the user named it. ``near``, ``cuda``: CPUs whose predicted step is hardly longer
            than over ``skyctl``, or CUDA devices alone, and nothing that only ``skyctl`` has is needed. For
            ``skyctl``, what it is needed for: ``encryption``; ``pins`` of end stages; ``helpers`` that only
            sum; ``devices`` of several kinds; an address that is neither private nor loopback (``public
            address``) or that nobody knows; Gloo ``unmeasured`` in the profile, predicted to be ``slower``,
            or ``failed`` in an attempt before.
        about: the nodes or devices that the reason speaks of.
        costs: whose costs per message the plan's prediction reckons with.
        alternative: another backend that the same placement was predicted with; None: none was.
        alternative_s: seconds of its predicted step.
    """

    backend: Backend
    reason: BackendReason
    about: Seq[Name] = ()
    costs: Backend = SKYCTL
    alternative: Backend | None = None
    alternative_s: Seconds | None = None

    @property
    def is_asked(self) -> bool:
        """Whether the user named it, so that nothing else may take its place."""
        return self.reason == "asked"
