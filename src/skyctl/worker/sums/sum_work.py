"""One sum over routes that is under way: a rank's own numbers, how far they are, and how it ended.

As the ``Work`` of a collective in torch.distributed, but for numbers that may come bucket by bucket.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch

from skyctl.transport.transfer_errors import SpoiltPartError, SpoiltSumError
from skyctl.worker.sums.sum_layout import Chunk, SumLayout

Tensor = torch.Tensor
TAME = 1e30
"""The largest magnitude of numbers of which any sum is finite: as float32, over all ranks and a chunk."""
LINGER_S = 1.0
"""A rank that has found a sum spoilt stays for so long: peers that are still at it are to find that as well,
or one that only passed it on would seem to have made it."""


class SumWork:
    """One sum over routes, as one rank sees it.

    Attributes:
        errors: as given.
        all_tame: whether all ranks have agreed that their own numbers are tame; False: nobody has asked.
        agreed, agreed_at: what ranks have agreed on in the background (``RouteSum.agree_later``), and when
            that was known here, in seconds of ``time.perf_counter``.

    Args:
        layout: how the numbers are cut into chunks; the same on every rank.
        step: of the run, or round.
        kind: what is summed (``sum_messages``); the same on every rank, as is ``step``.
        format: what chunks are sent as (``sum_codecs``).
        helps: this rank has no numbers of its own, and only adds what others have.
        errors: by bucket, flat tensors like the numbers' own: they get what this rank's encoding has lost of
            its partial sums, to be added to its next numbers (error feedback). None: that is lost.
    """

    def __init__(
        self,
        layout: SumLayout,
        step: int,
        *,
        kind: int,
        format: str = "float32",  # noqa: A002 — as the plan calls it
        helps: bool = False,
        errors: Sequence[Sequence[Tensor]] | None = None,
    ) -> None:
        self.layout, self.step, self.kind, self.format, self.helps = layout, step, kind, format, helps
        self.errors = errors
        self._buckets: list[Sequence[Tensor]] = []
        self._changed = threading.Condition()
        self._unfinished = 0
        self._error: BaseException | None = None
        self._extremes: list[Tensor] = []
        self._spoilt: SpoiltSumError | None = None
        self.all_tame = False
        self.agreed, self.agreed_at = b"", 0.0

    @property
    def ready_buckets(self) -> int:
        """How many buckets this rank has its own numbers of."""
        return len(self._buckets)

    def add_bucket(self, tensors: Sequence[Tensor]) -> None:
        """The next bucket's numbers are there: flat tensors, which will hold the sum in the end."""
        for tensor in tensors:
            if tensor.numel() and tensor.is_floating_point():
                self._extremes += torch.aminmax(tensor)
        with self._changed:
            self._buckets.append(tensors)
            self._changed.notify_all()

    def wait(self) -> None:
        """Until every chunk is summed; then the numbers are held no longer.

        Raises:
            RunError: a peer is gone, or has sent something else than what was expected.
            SpoiltSumError: a peer has sent numbers that are not finite, and all ranks' own are tame.
        """
        with self._changed:
            while self._unfinished and self._error is None:
                self._changed.wait()
            if self._error is not None:
                raise self._error
            self._buckets = []  # else a step's gradients would live until the next step's are there
        if self._spoilt is not None and self.all_tame:
            time.sleep(LINGER_S)
            raise self._spoilt

    def fail(self, error: BaseException) -> None:
        """Ends it; the first error counts."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    @property
    def error(self) -> BaseException | None:
        """The error that ended this sum before all chunks were summed; None: none has."""
        return self._error

    @property
    def is_tame(self) -> bool:
        """Whether this rank's own numbers are finite, and so small that no sum of such ones overflows."""
        return all(abs(extreme.item()) <= TAME for extreme in self._extremes)

    def doubt(self, error: SpoiltSumError) -> None:
        """Notes that a peer's numbers are not finite: that is an error where all ranks' own numbers are tame.

        The first one counts, but parts come before sums.
        """
        if self._spoilt is None or isinstance(error, SpoiltPartError) > isinstance(
            self._spoilt, SpoiltPartError
        ):
            self._spoilt = error

    def begin(self, threads: int) -> None:
        """So many threads will each say when they have finished."""
        self._unfinished = threads

    def add_thread(self) -> None:
        """One thread more will say so."""
        with self._changed:
            self._unfinished += 1

    def finish_thread(self) -> None:
        """One of the threads has done its part."""
        with self._changed:
            self._unfinished -= 1
            self._changed.notify_all()

    def wait_bucket(self, bucket: int) -> None:
        """Until this rank has its own numbers of that bucket; raises what ended the sum."""
        with self._changed:
            while not self.helps and len(self._buckets) <= bucket and self._error is None:
                self._changed.wait()
            if self._error is not None:
                raise self._error

    def sum_bucket(self, bucket: int, add_up: Callable[[Tensor], None]) -> Tensor:
        """Has ``add_up`` make the sum of a whole bucket in the place of the rank's own numbers.

        Returns:
            The sum, flat.
        """
        tensors = self._buckets[bucket]
        if len(tensors) == 1 and tensors[0].is_contiguous():
            add_up(tensors[0])
            return tensors[0]
        flat = torch.cat(list(tensors))
        add_up(flat)
        for tensor, part in zip(
            tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True
        ):
            tensor.copy_(part)
        return flat

    def gather(self, chunk: Chunk, out: Tensor) -> None:
        """Copies a chunk's own numbers into ``out``, in host memory; a helper has zeros."""
        if self.helps:
            out.zero_()
            return
        tensors, at = self._buckets[chunk.bucket], 0
        for piece in chunk.pieces:
            size = piece.stop - piece.start
            out[at : at + size].copy_(tensors[piece.tensor][piece.start : piece.stop])
            at += size

    def scatter(self, chunk: Chunk, values: Tensor) -> None:
        """Puts a chunk's sum in the place of the rank's own numbers."""
        if self.helps:
            return
        _put(chunk, values, self._buckets[chunk.bucket])

    def keep_error(self, chunk: Chunk, error: Tensor) -> None:
        """Keeps what the encoding of a chunk's partial sum has lost."""
        assert self.errors is not None
        _put(chunk, error, self.errors[chunk.bucket])


def _put(chunk: Chunk, values: Tensor, tensors: Sequence[Tensor]) -> None:
    """Puts a chunk's numbers where they belong in a bucket's tensors."""
    at = 0
    for piece in chunk.pieces:
        size = piece.stop - piece.start
        tensors[piece.tensor][piece.start : piece.stop].copy_(values[at : at + size])
        at += size
