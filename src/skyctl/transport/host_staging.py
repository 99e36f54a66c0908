"""Tensors of an accelerator through host memory, for two ranks that share nothing faster.

Host buffers are pinned and used again. Copies run on streams of their own, one each way, so that they and the
computing go on at the same time. A send's copy waits, on the device, for what had been queued when it was
asked for; a thread waits for the copy and then starts the transfer. A receive is copied to the device once it
has come, and what is queued afterwards on the consumer's stream waits, on the device, for that copy.
All sends of such a pair go through the thread, headers too: messages of one tag must keep their order.

``AcceleratorCopyStreams`` is the one place that touches the device's streams.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch

from skyctl.device.accelerator import make_stream
from skyctl.transport.transfer_errors import TransferClosedError, TransferTimeoutError

Tensor = torch.Tensor
PostTransfer = Callable[[Tensor, int], Any]
"""(host tensor, tag) → the transport's own transfer, with ``wait(timedelta)``."""


class StreamEvent(Protocol):
    """A place in a stream (``torch.Event``)."""

    def query(self) -> bool:
        """Whether the stream has passed it."""

    def synchronize(self) -> None:
        """Blocks the host until it has."""


class CopyStreams(Protocol):
    """The device's side of the staging."""

    def host(self, nbytes: int) -> Tensor:
        """A new host buffer of bytes that the device can copy to and from by itself."""

    def mark(self) -> StreamEvent:
        """The end of what is queued on the current (computing) stream."""

    def copy_out(self, tensor: Tensor, host: Tensor, after: StreamEvent) -> StreamEvent:
        """Queues the copy to the host behind ``after``, beside the computing; the event is its end."""

    def copy_in(self, host: Tensor, tensor: Tensor, after: StreamEvent) -> StreamEvent:
        """Queues the copy to the device likewise."""

    def consume(self, event: StreamEvent) -> None:
        """Makes all that is queued on the current stream from now on wait for the event, but not the host."""


class AcceleratorCopyStreams:
    """Two streams of one accelerator: ``outward`` for copies to the host, ``inward`` for copies from it.

    No test here has had a GPU: the tests' accelerator counts events and refuses a use that waits for none.
    """

    def __init__(self, device: torch.device, outward: torch.Stream, inward: torch.Stream) -> None:
        self._device, self._out, self._in = device, outward, inward

    def host(self, nbytes: int) -> Tensor:
        """A new buffer in pinned memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> StreamEvent:
        """The end of what is queued on the current stream."""
        return torch.accelerator.current_stream(self._device).record_event()

    def copy_out(self, tensor: Tensor, host: Tensor, after: StreamEvent) -> StreamEvent:
        """Queues the copy from the device on a stream of its own."""
        return self._copy(self._out, tensor, host, tensor, after)

    def copy_in(self, host: Tensor, tensor: Tensor, after: StreamEvent) -> StreamEvent:
        """Queues the copy to the device on a stream of its own."""
        return self._copy(self._in, host, tensor, tensor, after)

    def consume(self, event: StreamEvent) -> None:
        """Makes the current stream wait for the event."""
        assert isinstance(event, torch.Event)
        torch.accelerator.current_stream(self._device).wait_event(event)

    def _copy(
        self, stream: torch.Stream, source: Tensor, target: Tensor, there: Tensor, after: StreamEvent
    ) -> StreamEvent:
        assert isinstance(after, torch.Event)
        stream.wait_event(after)
        with stream:
            target.copy_(source, non_blocking=True)
        there.record_stream(stream)  # its memory is not given away before the copy is over
        return stream.record_event()


class BlockingCopyStreams:
    """A device that has one stream only, as MPS: copies that are over when they return."""

    def host(self, nbytes: int) -> Tensor:
        """A new buffer in plain memory."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def mark(self) -> StreamEvent:
        """An event that has passed: the copies block by themselves."""
        return _PassedEvent()

    def copy_out(self, tensor: Tensor, host: Tensor, after: StreamEvent) -> StreamEvent:  # noqa: ARG002
        """Copies from the device, and returns when that is over."""
        host.copy_(tensor)
        return _PassedEvent()

    def copy_in(self, host: Tensor, tensor: Tensor, after: StreamEvent) -> StreamEvent:  # noqa: ARG002
        """Copies to the device, and returns when that is over."""
        tensor.copy_(host)
        return _PassedEvent()

    def consume(self, event: StreamEvent) -> None:
        """Does nothing: the copy was over when it returned."""


class _PassedEvent:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def make_copy_streams(device: torch.device) -> CopyStreams:
    """The streams for a device other than the CPU."""
    outward, inward = make_stream(device), make_stream(device)
    if outward is None or inward is None:
        return BlockingCopyStreams()
    return AcceleratorCopyStreams(device, outward, inward)


class HostBufferPool:
    """Host memory for messages, by size: the same few sizes come again and again."""

    def __init__(self, streams: CopyStreams) -> None:
        self._streams = streams
        self._free: dict[int, deque[tuple[Tensor, StreamEvent | None]]] = {}
        self._lock = threading.Lock()
        self.allocated = 0

    def get(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """(the buffer, the same memory with the tensor's shape and dtype)."""
        nbytes = like.numel() * like.element_size()
        with self._lock:
            free = self._free.setdefault(nbytes, deque())
            # where the oldest is still being copied from, another is made rather than waited for
            ready = bool(free) and (free[0][1] is None or free[0][1].query())
            buffer = free.popleft()[0] if ready else None
            self.allocated += buffer is None
        if buffer is None:
            buffer = self._streams.host(nbytes)
        return buffer, buffer.view(like.dtype).view(like.shape)

    def give_back(self, buffer: Tensor, busy_until: StreamEvent | None = None) -> None:
        """``busy_until``: a copy from it that may still be under way."""
        with self._lock:
            self._free.setdefault(buffer.numel(), deque()).append((buffer, busy_until))


class HostStaging:
    """One pair's way through host memory. ``close`` ends its thread.

    Args:
        post_send, post_recv: start the transport's own transfer of a host tensor.
        peer: in the thread's name.
        stages: whether a tensor goes through a host buffer.
    """

    def __init__(
        self,
        streams: CopyStreams,
        post_send: PostTransfer,
        post_recv: PostTransfer,
        peer: str,
        stages: Callable[[Tensor], bool] = lambda tensor: tensor.device.type != "cpu",
    ) -> None:
        self._streams, self._post_send, self._post_recv = streams, post_send, post_recv
        self.stages = stages
        self.buffers = HostBufferPool(streams)
        self._jobs: queue.SimpleQueue[StagedSend | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True, name=f"sends to {peer}")
        self._closed = False
        self._thread.start()

    def send(self, tensor: Tensor, tag: int) -> StagedSend:
        """Queues a send: of a host tensor as it is, of another behind its copy."""
        if not self.stages(tensor):
            job = StagedSend(self.buffers, tag, tensor, None, None, None)
        else:
            buffer, host = self.buffers.get(tensor)
            copied = self._streams.copy_out(tensor, host, self._streams.mark())
            job = StagedSend(self.buffers, tag, host, buffer, copied, tensor)
        self._jobs.put(job)
        if self._closed:
            self._fail_all()
        return job

    def recv(self, tensor: Tensor, tag: int) -> StagedRecv:
        """Starts a receive into a buffer of the host, from which ``wait`` has it copied."""
        room = self._streams.mark()  # whatever used the tensor's memory before must be over
        buffer, host = self.buffers.get(tensor)
        return StagedRecv(self._streams, self.buffers, self._post_recv(host, tag), buffer, host, tensor, room)

    def close(self, *, finish: bool = False) -> None:
        """Ends the thread; sends that have not begun fail, or with ``finish`` begin first. Idempotent."""
        self._closed = self._closed or not finish
        self._jobs.put(None)
        self._thread.join()
        self._closed = True
        self._fail_all()

    def _fail_all(self) -> None:
        with suppress(queue.Empty):
            while True:
                if (job := self._jobs.get_nowait()) is not None:
                    job.fail(_closed_error())

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._closed:
                job.fail(_closed_error())
                continue
            try:
                if job.copied is not None:
                    job.copied.synchronize()
                job.started(self._post_send(job.host, job.tag))
            except Exception as exc:  # noqa: BLE001 — raised by the one who waits for it
                job.fail(exc)


def _closed_error() -> TransferClosedError:
    return TransferClosedError("the connection is closed")


class StagedSend:
    """A send that its pair's thread starts. Holds tensor and buffer until it is over."""

    __slots__ = ("_begun", "_buffer", "_buffers", "_error", "_tensor", "_work", "copied", "host", "tag")

    def __init__(
        self,
        buffers: HostBufferPool,
        tag: int,
        host: Tensor,
        buffer: Tensor | None,
        copied: StreamEvent | None,
        tensor: Tensor | None,
    ) -> None:
        self._buffers, self.tag, self.host, self.copied = buffers, tag, host, copied
        self._buffer, self._tensor = buffer, tensor
        self._begun = threading.Event()
        self._work: Any = None
        self._error: Exception | None = None

    def started(self, work: Any) -> None:
        """The transport has begun the send."""
        self._work = work
        self._begun.set()

    def fail(self, error: Exception) -> None:
        """The send can't begin; ``wait`` raises the error."""
        self._error = error
        self._begun.set()

    def wait(self, limit: timedelta) -> None:
        """Until it is sent (RuntimeError, as the transport's own works)."""
        if not self._begun.wait(limit.total_seconds()):
            raise TransferTimeoutError("earlier sends have not begun in time")
        if self._error is not None:
            raise self._error if isinstance(self._error, RuntimeError) else RuntimeError(str(self._error))
        self._work.wait(limit)
        if self._buffer is not None:
            self._buffers.give_back(self._buffer)
            self._buffer = self._tensor = None


class StagedRecv:
    """A receive under way into a host buffer."""

    __slots__ = ("_buffer", "_buffers", "_host", "_room", "_streams", "_target", "_work")

    def __init__(
        self,
        streams: CopyStreams,
        buffers: HostBufferPool,
        work: Any,
        buffer: Tensor,
        host: Tensor,
        target: Tensor,
        room: StreamEvent,
    ) -> None:
        self._streams, self._buffers, self._work = streams, buffers, work
        self._buffer: Tensor | None = buffer
        self._host, self._target, self._room = host, target, room

    def wait(self, limit: timedelta) -> None:
        """Until it has come and its copy to the device is queued: what uses it there waits for that."""
        if self._buffer is None:
            return
        self._work.wait(limit)
        copied = self._streams.copy_in(self._host, self._target, self._room)
        self._streams.consume(copied)
        self._buffers.give_back(self._buffer, copied)
        self._buffer = None
