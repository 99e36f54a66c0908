"""The sizes of the microbatches that a batch is split into. No torch here."""

from __future__ import annotations

from skyctl.errors import WorkloadError


def microbatch_sizes(batch: int, microbatches: int) -> list[int]:
    """Samples of each microbatch: larger ones first, differing by at most one.

    Raises:
        WorkloadError: there are more microbatches than samples, or either is below one.
    """
    if batch < 1 or microbatches < 1:
        raise WorkloadError(
            f"a batch and its microbatches are at least 1: {batch} samples, {microbatches} microbatches"
        )
    if microbatches > batch:
        raise WorkloadError(
            f"{microbatches} microbatches need at least {microbatches} samples, the batch has {batch}",
            hint=f"--microbatches {batch} or fewer, or a larger --batch-size",
        )
    base, more = divmod(batch, microbatches)
    return [base + 1] * more + [base] * (microbatches - more)
