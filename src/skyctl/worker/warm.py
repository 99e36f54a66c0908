"""What a nursery (``agent/nursery.py``) does once for all the processes that it forks."""

from __future__ import annotations

import torch

from skyctl.worker import training  # noqa: F401 - imported once, for all ranks


def warm() -> None:
    """One step of an optimizer: its first use imports torch's compiler, 67 MB and a second of CPU time.

    Not of Adam: its step asks whether there is an accelerator, and after that no fork of this process can use
    CUDA. No backward: a fork must find no thread of autograd's. Nothing is drawn: every rank's seeds stay its
    own.
    """
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.SGD([weight]).step()
