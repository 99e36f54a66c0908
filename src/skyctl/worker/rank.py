"""The task that is one rank of a run: ``main(payload, channel)``.

::

    rank → {"event": "facts", …}                          with ``facts`` in its payload: see ``facts.found``
    → rank {"op": "build"}                                then only does it build anything
    rank → {"event": "listening", "port", "address"}      a rank with a successor
    → rank {"op": "connect", "host", "port"}              to the rank that comes after
    rank → {"event": "ready"}                             built and connected
    → rank {"op": "start"}
    rank → {"event": "step", "step", "iteration_s", "compute_s", "transfer_s", "idle_s", "forward_s",
            "backward_s", "weight_s", "optimizer_s", "input_message_s", "gradient_message_s", "loss",
            "samples", "peak_memory_bytes"}
    rank → {"event": "validation", "step", "loss", "wall_s"}    the last one, after a step that "validates"
    rank → {"event": "alive", "phase", "waiting"}         every few seconds, from the start to the end
    → rank {"op": "stop"}                                 an early end: see below

A step's event also has ``grad_norm`` (None without clipping), ``learning_rate`` (None for a stage that trains
nothing) and ``validates``.

``iteration_s`` is the time from the step's start to the next one's (the last step: to its end), validation
left out, and
``compute_s + transfer_s + idle_s`` of it: ``compute_s`` is all that is not waiting, so it also holds what the
rank does beside its layers. ``idle_s`` and ``transfer_s``: see ``messages``. ``input_message_s`` and
``gradient_message_s``: median seconds on the way of those messages that were waited for from before their
start (None: none was). ``loss`` is None but on the last
stage. An early end is rank 0's to decide: told to stop, it marks the last activation of the step under way,
or of the next one, and every rank ends after that same step; other ranks need not be told.

Payload beside what the launcher's ``rank_specs`` gives: ``secret``, shared by the run's ranks, without which
nobody joins; ``tls`` (``{"cert", "key"}``, PEM): what passes between them is encrypted; ``timeout_s``
(default 1800), the longest a rank waits for a peer. With ``trace`` the result names a file with what this
rank did when, on its own clock (``recorder.document``).
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

from skyctl.device.heap import keep_freed_memory
from skyctl.errors import SkyctlError

if TYPE_CHECKING:
    from skyctl.worker.training import Channel


def main(payload: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """Trains one stage; returns where its weights lie, its peak memory and the steps done.

    Raises:
        ModuleNotFoundError: this Python has no torch.
        PeerLostError: a neighbour is gone; some other rank has the cause.
        RunError: anything else that went wrong, with the phase it went wrong in.
        SkyctlError: the workload's own errors, unchanged.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else it warns of every host without reverse DNS
    keep_freed_memory()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        import torch  # noqa: F401 — where it is missing, that is the error to report

        from skyctl.worker.training import Training

        training = Training(payload, channel)
        try:
            return training.run()
        except Exception as exc:
            told = training.explain(exc)
            if told is exc:
                raise
            assert isinstance(told, SkyctlError)
            raise told from exc
        finally:
            training.close()
