"""For training scripts on unequal machines: each rank's part of a batch, and gradients weighted by it.

``from skyctl.torch import share, shares, sampler, weigh, step``. The same script runs under plain Python,
under ``torchrun`` and under skyctl: without skyctl all parts are equal. In this package ``import torch`` is
PyTorch.
"""

from __future__ import annotations

from skyctl.torch.gradient_weights import weigh
from skyctl.torch.rank_shares import share, shares
from skyctl.torch.share_advice import step
from skyctl.torch.share_sampler import ShareSampler, sampler

__all__ = ["ShareSampler", "sampler", "share", "shares", "step", "weigh"]
