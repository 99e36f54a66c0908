"""One rank from its payload to its weights: build, connect, steps, end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from skyctl.agent.task import AgentGoneError
from skyctl.checkpoint.shards import StageState
from skyctl.device.pace import Pace
from skyctl.errors import RunError
from skyctl.schedule.actions import ZERO_BUBBLE
from skyctl.transport import clocks
from skyctl.transport.addresses import address_towards
from skyctl.transport.pair import Pair
from skyctl.worker.checkpointing import Checkpointer, Options, Origin
from skyctl.worker.clipping import Neighbour, clipping
from skyctl.worker.executor import Executor, Ports
from skyctl.worker.facts import found
from skyctl.worker.failures import explained
from skyctl.worker.feed import Feed
from skyctl.worker.machine import peak_memory_bytes, use_device
from skyctl.worker.messages import Boundary, Inbox, Outbox, message_bytes, window
from skyctl.worker.optimizing import Rate
from skyctl.worker.randomness import Randomness
from skyctl.worker.recorder import Recorder
from skyctl.worker.resuming import resume
from skyctl.worker.saving import save
from skyctl.worker.stage import Stage
from skyctl.worker.stepping import Steps
from skyctl.worker.validating import validation
from skyctl.workload.mixed import master_of
from skyctl.workload.recipe import Recipe
from skyctl.workload.spec import WorkloadSpec
from skyctl.workload.split import sizes
from skyctl.workload.workload import load

CONNECT_TIMEOUT_S = 60.0
"""For a pair to connect, once its listening side is there."""

PEERS_TIMEOUT_S = 3600.0
"""For the peers to be built; the launcher watches them, this is only the end of all patience."""

BEAT_S = 3.0


class Channel(Protocol):
    """The line to the launcher (``agent.task.TaskChannel``)."""

    folder: Path

    def send(self, message: dict[str, Any], body: bytes = b"") -> None: ...
    def recv(self, timeout_s: float | None = None) -> tuple[dict[str, Any], bytes] | None: ...


class Training:
    """One rank of a run. ``run`` once, then ``close`` in any case."""

    def __init__(self, payload: dict[str, Any], channel: Channel) -> None:
        self.payload, self.channel = payload, channel
        self.phase = "build"
        self._pairs: dict[str, Pair] = {}
        self._latency_s: dict[str, float] = {}
        self._executor: Executor | None = None
        self._stop = False
        self._ended = threading.Event()
        self._recorder = Recorder() if payload.get("trace") else None

    def run(self) -> dict[str, Any]:
        """Everything, in order; what ``rank.main`` returns."""
        threading.Thread(target=self.beat, daemon=True, name="beat").start()
        if self.payload.get("threads"):
            torch.set_num_threads(int(self.payload["threads"]))
        if self.payload.get("facts"):
            self.phase = "telling what is here"
            self.channel.send(found(self.payload["device"]))
            self._expect("build")
            self.phase = "build"
        self.device = use_device(self.payload["device"])
        spec = WorkloadSpec.from_dict(self.payload["workload"])
        torch.manual_seed(spec.seed)
        self.recipe = Recipe.from_dict(
            self.payload.get("recipe") or {"total_steps": int(self.payload["steps"])}
        )
        self.workload = load(spec)
        self.start, self.stop = self.payload["layers"]
        self._randomness = Randomness(spec.seed, self.start, self.device)
        self.sizes = sizes(spec.batch_size, self.payload["microbatches"])
        layers = self.workload.build(self.start, self.stop, self.device)
        recompute = bool(self.payload.get("recompute"))
        stage = Stage(
            layers,
            takes=self._boundary(self.start),
            takes_tuple=self.workload.is_tuple(self.start),
            gives=None if self.payload["next"] is None else self._boundary(self.stop),
            loss=self.workload.loss if self.payload["next"] is None else None,
            before_layer=self._randomness,
            recompute=recompute,
            defer_weights=self.payload["schedule"] == ZERO_BUBBLE and not recompute,
        )
        parameters = stage.parameters
        optimizer = self.workload.optimizer(parameters) if parameters else None
        trained = any(parameter.requires_grad for parameter in parameters)
        step0, checkpointer = self._resume(spec, layers, optimizer)
        self._rate = Rate(optimizer if trained else None, self.recipe, step0)
        self.phase = "connect"
        self._connect()
        self._executor = Executor(
            stage=stage,
            ports=self._ports(),
            pace=Pace(
                float(self.payload.get("slowdown") or 1.0),
                single_thread=torch.get_num_threads() == 1,
                device=self.device,
            ),
            sizes=self.sizes,
            schedule=self.payload["schedule"],
            in_flight=self.payload["in_flight"],
            weights_behind=int(self.payload.get("weights_behind") or 0),
            optimizer=optimizer,
            is_last=self.payload["next"] is None,
            device=self.device,
            recorder=self._recorder,
        )
        sides = {side: Neighbour(pair, self._latency_s[side]) for side, pair in self._pairs.items()}
        self._clip = clipping(self.recipe, self._executor, sides, f"layers {self.start}–{self.stop}")
        self._validator = validation(
            self.recipe, self.workload, self._executor, self._randomness, self.workload.is_tuple(self.start)
        )
        self.channel.send({"event": "ready"})
        self._expect("start")
        done = self._steps(self._executor, step0, checkpointer)
        self._executor.drain()
        if self._clip is not None:
            self._clip.drain()
        self.phase = "end"
        self._compare_clocks()
        for pair in self._pairs.values():
            pair.close(politely=True)
        self.phase = "saving the weights"
        path = self.channel.folder / f"weights-{self.payload['rank']}.safetensors"
        names = self.workload.names
        return {
            "weights": save(path, stage.layers, self.start, names) if self.payload.get("weights") else None,
            "trace": self._save_trace(),
            "peak_memory_bytes": peak_memory_bytes(self.device),
            "steps": done,
        }

    def beat(self) -> None:
        """Says every ``BEAT_S`` that this rank is alive, what it is at, and whether it only waits for a peer.

        Runs in a thread of its own until the process ends. What the launcher hears of a rank that computes
        for long, and does not hear of one that is stopped or dead, is how it knows whom to name.
        """
        while not self._ended.wait(BEAT_S):
            executor = self._executor
            waiting = executor is not None and executor.waiting
            try:
                self.channel.send({"event": "alive", "phase": self._doing(), "waiting": waiting})
            except AgentGoneError:
                return

    def _doing(self) -> str:
        return self.phase if self._executor is None or self.phase != "steps" else self._executor.phase

    def close(self) -> None:
        """Lets go of the peers; what waits for them ends. Idempotent."""
        self._ended.set()
        for pair in self._pairs.values():
            pair.close()

    def explain(self, exc: Exception) -> Exception:
        """The error to report: with the phase it happened in, and the cause in the first line."""
        return explained(exc, self._doing(), self.payload["device"])

    @property
    def _timeout_s(self) -> float:
        return float(self.payload.get("timeout_s") or 1800.0)

    def _boundary(self, index: int) -> Boundary:
        """The tensors before layer ``index``, by microbatch; two sizes of microbatch at most."""
        by_size = {size: tuple(self.workload.boundary(index, size)) for size in set(self.sizes)}
        return lambda microbatch: by_size[self.sizes[microbatch]]

    def _connect(self) -> None:
        previous, following = self.payload["previous"], self.payload["next"]
        interface = self.payload.get("interface")
        for side, peer in (("previous", previous), ("next", following)):
            if peer is not None:
                self._pairs[side] = Pair(
                    f"rank {peer['rank']} ({peer['host']})",
                    self._timeout_s,
                    secret=str(self.payload.get("secret") or self.payload["run_id"]),
                    device=self.device,
                )
        accepted: Future[None] | None = None
        if following is not None:
            address = address_towards(following["host"], interface)
            port = self._pairs["next"].listen(address)
            self.channel.send({"event": "listening", "port": port, "address": address})
            accepted = _beside(self._accept)
        if previous is not None:
            told = self._expect("connect")
            pair = self._pairs["previous"]
            own = address_towards(told["host"], interface)
            pair.connect(told["host"], told["port"], own, CONNECT_TIMEOUT_S)
            self._latency_s["previous"] = pair.round_trip_s() / 2
            if self._recorder is not None:
                self._recorder.compared("start", clocks.ask(pair))
        if accepted is not None:
            accepted.result()

    def _accept(self) -> None:
        pair = self._pairs["next"]
        pair.accept(PEERS_TIMEOUT_S)
        self._latency_s["next"] = pair.round_trip_s() / 2
        if self._recorder is not None:
            clocks.answer(pair)

    def _compare_clocks(self) -> None:
        """Once more at the end, so that what the clocks drifted meanwhile is known; all pairs at a time."""
        if self._recorder is None:
            return
        following = self._pairs.get("next")
        answered = None if following is None else _beside(lambda: clocks.answer(following))
        if "previous" in self._pairs:
            self._recorder.compared("end", clocks.ask(self._pairs["previous"]))
        if answered is not None:
            answered.result()

    def _ports(self) -> Ports:
        """The streams to the neighbours."""
        ports = Ports()
        sent_as = self.payload.get("link_dtypes") or {}
        if "previous" in self._pairs:
            pair, boundary = self._pairs["previous"], self._boundary(self.start)
            ports.inputs = self._inbox(
                "previous", boundary, backward=False, dtype=sent_as.get("from_previous")
            )
            gradients = _differentiable(boundary)
            if gradients(0):
                ports.input_gradients = self._outbox(
                    pair, gradients, backward=True, bounded=True, dtype=sent_as.get("to_previous")
                )
        if "next" in self._pairs:
            pair, boundary = self._pairs["next"], self._boundary(self.stop)
            gradients = _differentiable(boundary)
            # a gradient that comes back confirms its activation; where none does, the number is bounded
            ports.outputs = self._outbox(
                pair, boundary, backward=False, bounded=not gradients(0), dtype=sent_as.get("to_next")
            )
            if gradients(0):
                ports.output_gradients = self._inbox(
                    "next", gradients, backward=True, dtype=sent_as.get("from_next")
                )
        return ports

    def _window(self, boundary: Boundary) -> int:
        asked = int(self.payload.get("receive_window") or 0)
        return window(asked, len(self.sizes), message_bytes(boundary(0)))

    def _inbox(self, side: str, boundary: Boundary, *, backward: bool, dtype: str | None) -> Inbox:
        return Inbox(
            self._pairs[side],
            boundary,
            backward=backward,
            microbatches=len(self.sizes),
            window=self._window(boundary),
            device=self.device,
            latency_s=self._latency_s[side],
            dtype=dtype,
        )

    def _outbox(
        self, pair: Pair, boundary: Boundary, *, backward: bool, bounded: bool, dtype: str | None
    ) -> Outbox:
        return Outbox(
            pair,
            boundary,
            backward=backward,
            microbatches=len(self.sizes),
            window=self._window(boundary) if bounded else None,
            dtype=dtype,
        )

    def _steps(self, executor: Executor, step0: int, checkpointer: Checkpointer | None) -> int:
        self.phase = "steps"
        rounds = Steps(
            executor=executor,
            recipe=self.recipe,
            rate=self._rate,
            randomness=self._randomness,
            send=self.channel.send,
            stops=self._told_to_stop if self.payload["previous"] is None else None,
            clip=self._clip,
            validator=self._validator,
            checkpointer=checkpointer,
        )
        return rounds.run(Feed(self.workload.batches(step0)), step0, int(self.payload["steps"]))

    def _resume(
        self, spec: WorkloadSpec, layers: list[nn.Module], optimizer: torch.optim.Optimizer | None
    ) -> tuple[int, Checkpointer | None]:
        """The first step to make, with layers and optimizer as they were then; and who writes checkpoints."""
        options = Options.of(self.payload)
        if options is None and self.payload.get("resume") is None:
            return 0, None
        self.phase = "reading the checkpoint"
        moved = ("lr",) if self.recipe.moves_rate else ()
        state = StageState(layers, optimizer, master_of, skip=moved)
        origin = Origin(
            run_id=str(self.payload["run_id"]),
            rank=int(self.payload["rank"]),
            start=self.start,
            stop=self.stop,
            names=tuple(self.workload.names),
            workload=str(self.payload.get("digest") or self.workload.digest),
            dtype=spec.dtype,
            seed=spec.seed,
        )
        step0 = resume(self.payload, state, origin)
        return step0, Checkpointer(options, state, origin) if options is not None else None

    def _told_to_stop(self) -> bool:
        while not self._stop and (message := self.channel.recv(0.0)) is not None:
            self._stop = message[0].get("op") == "stop"
        return self._stop

    def _expect(self, op: str) -> dict[str, Any]:
        got = self.channel.recv(PEERS_TIMEOUT_S)
        if got is None or got[0].get("op") != op:
            said = "nothing" if got is None else repr(got[0].get("op"))
            raise RunError(
                f"expected the launcher to say {op!r} within {PEERS_TIMEOUT_S:.0f} s, it said {said}"
            )
        return got[0]

    def _save_trace(self) -> str | None:
        if self._recorder is None:
            return None
        return self._recorder.save(self.channel.folder / f"trace-{self.payload['rank']}.json")


def _differentiable(boundary: Boundary) -> Boundary:
    return lambda microbatch: [spec for spec in boundary(microbatch) if spec.requires_grad]


def _beside(action: Callable[[], None]) -> Future[None]:
    """Runs it in a daemon thread: a failure elsewhere must not wait for it."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            action()
            future.set_result(None)
        except BaseException as exc:  # noqa: BLE001 — raised where the result is asked for
            future.set_exception(exc)

    threading.Thread(target=run, daemon=True, name="accepts the next rank").start()
    return future
