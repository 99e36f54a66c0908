"""Deferred initialisation: model() runs on the meta device while every operation that makes values is written
down; later only the operations that the wanted tensors depend on are run again for real.

The record is keyed by storage, so views, ``nn.Parameter``, ``.data`` and in-place initialisation all find
their way. Tensors that are real when they enter (``torch.tensor([…])``, loaded weights, the file's globals)
stay real and are constants of the record. Knows nothing of layers; the same idea as pytorch/torchdistx's
deferred_init.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from skyctl.errors import WorkloadError


@dataclass(frozen=True)
class Ref:
    """A tensor of the record: a window into a storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Op:
    """One operation: its arguments with Refs for tensors, and the new storages its outputs bring."""

    func: Any
    args: Any
    kwargs: dict[str, Any]
    outputs: tuple[tuple[int, Ref], ...]  # (place among the output's leaves, what it is)
    reads: frozenset[int]
    writes: frozenset[int]


def ref_of(tensor: Tensor) -> Ref:
    """What a tensor is, as the record knows it."""
    key = tensor.untyped_storage()._cdata
    return Ref(key, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))


def is_deferred(tensor: Tensor) -> bool:
    """Whether its values are still to be made."""
    return tensor.device.type == "meta"


class Record:
    """What model() did. ``real`` makes the values of some of its tensors."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._ops: list[Op] = []
        self._writers: dict[int, list[int]] = {}
        self._alive: dict[int, Any] = {}  # meta storages hold no memory; keeping them keeps their ids unique

    def add(self, func: Any, args: Any, kwargs: dict[str, Any], refs: dict[int, Ref], out: Any) -> None:
        """Writes one operation down, unless it only gives views of what it was given."""
        known = {ref.storage for ref in refs.values()}
        outputs = []
        writes = {refs[id(t)].storage for t in written(func, args, kwargs) if id(t) in refs}
        for place, tensor in enumerate(tree_leaves(out)):
            if isinstance(tensor, Tensor) and is_deferred(tensor):
                ref = ref_of(tensor)
                self._alive[ref.storage] = tensor.untyped_storage()
                if ref.storage not in known:
                    outputs.append((place, ref))
                    writes.add(ref.storage)
        if not writes:
            return

        def freeze(value: Any) -> Any:
            if isinstance(value, torch.Generator):
                return None
            return refs.get(id(value), value) if isinstance(value, Tensor) else value

        index = len(self._ops)
        frozen = tree_map(freeze, args), tree_map(freeze, kwargs)
        self._ops.append(Op(func, *frozen, tuple(outputs), frozenset(known), frozenset(writes)))
        for key in writes:
            self._writers.setdefault(key, []).append(index)

    def operations(self) -> Sequence[Op]:
        """Everything written down, in order."""
        return self._ops

    def knows(self, tensor: Tensor) -> bool:
        """Whether the tensor's values can be made."""
        return tensor.untyped_storage()._cdata in self._writers or tensor.numel() == 0

    def real(self, tensors: Sequence[Tensor], salt: str) -> list[Tensor]:
        """The tensors with values, on the CPU, tensors of one storage sharing one again.

        Runs the operations they depend on, in the recorded order, with the random numbers that ``(seed,
        salt)`` give; the process's own generator is left as it was.
        """
        state = torch.default_generator.get_state()
        torch.default_generator.manual_seed(derived_seed(self.seed, salt))
        try:
            with _disable_current_modes(), torch.no_grad():
                values: dict[int, Any] = {}
                for index in self._needed([t.untyped_storage()._cdata for t in tensors]):
                    self._run(self._ops[index], values)
                return [self._window(ref_of(t), values) for t in tensors]
        finally:
            torch.default_generator.set_state(state)

    def _needed(self, keys: Sequence[int]) -> list[int]:
        """Indices of the operations those storages depend on, ascending: a backward slice."""
        heap = [-index for key in set(keys) for index in self._writers.get(key, [])]
        heapq.heapify(heap)
        found: list[int] = []
        while heap:
            index = -heapq.heappop(heap)
            if found and found[-1] == index:
                continue
            found.append(index)
            for key in self._ops[index].reads:
                for earlier in self._writers.get(key, []):
                    if earlier >= index:
                        break
                    heapq.heappush(heap, -earlier)
        return found[::-1]

    def _run(self, op: Op, values: dict[int, Any]) -> None:
        def thaw(value: Any) -> Any:
            return self._window(value, values) if isinstance(value, Ref) else value

        out = tree_leaves(op.func(*tree_map(thaw, op.args), **tree_map(thaw, op.kwargs)))
        for place, ref in op.outputs:
            made: Tensor = out[place]
            if tuple(made.stride()) != ref.stride or made.storage_offset() != ref.offset:
                nbytes = self._alive[ref.storage].nbytes()
                laid = torch.empty(nbytes, dtype=torch.uint8).untyped_storage()
                copy = torch.empty(0, dtype=ref.dtype).set_(laid, ref.offset, ref.size, ref.stride)
                made = copy.copy_(made)
            values[ref.storage] = made.untyped_storage()

    @staticmethod
    def _window(ref: Ref, values: Mapping[int, Any]) -> Tensor:
        if ref.storage not in values:
            return torch.empty_strided(ref.size, ref.stride, dtype=ref.dtype)
        return torch.empty(0, dtype=ref.dtype).set_(values[ref.storage], ref.offset, ref.size, ref.stride)


def derived_seed(seed: int, salt: str) -> int:
    """A 63-bit seed from (seed, salt), alike on every machine."""
    return random.Random(f"skyctl {seed} {salt}").getrandbits(63)  # noqa: S311 - reproducible, not secret


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensor arguments the operation changes in place."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [t for t in tree_leaves(value) if isinstance(t, Tensor)]
    return found


def _gives_tensors(func: Any) -> bool:
    return all("Tensor" in str(result.type) for result in func._schema.returns)


class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Base of the dispatch modes here. Not compiling anything, they need no ``torch._dynamo`` (a second, 100
    MB)."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _Deferring(Mode):  # type: ignore[no-untyped-call]
    """Runs operations on the meta device and writes them down; where a value is asked for, makes that one."""

    def __init__(self, record: Record) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = record

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():  # here a tensor's device is what it is: see _Values
            return self._dispatch(func, args, dict(kwargs or {}))

    def _dispatch(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        deferred = [t for t in tensors if is_deferred(t)]
        takes_device = any(a.name == "device" for a in func._schema.arguments)
        if (tensors and not deferred) or (not tensors and not takes_device):
            return func(*args, **kwargs)
        replay = {**kwargs, "device": torch.device("cpu")} if takes_device else kwargs
        changed = written(func, args, kwargs)
        if not _gives_tensors(func) or any(not is_deferred(t) for t in changed):
            return self._for_real(func, args, replay)
        refs = {id(t): ref_of(t) for t in deferred}  # as they are before the operation: some change the shape
        on_meta = {**kwargs, "device": torch.device("meta")} if takes_device else kwargs
        if on_meta.get("pin_memory"):
            on_meta["pin_memory"] = replay["pin_memory"] = False
        try:
            out = _shape_only(func, args, on_meta, tensors)
        except (NotImplementedError, RuntimeError):
            if changed:
                raise
            return self._for_real(func, args, replay)  # no meta kernel, or the operation itself is wrong
        if not tensors and isinstance(out, Tensor) and out.numel() == 0:
            return func(*args, **replay)  # holds nothing; torch.load sets a storage into such a tensor
        self.record.add(func, tuple(args), replay, refs, out)
        return out

    def _for_real(self, func: Any, args: Any, kwargs: Any) -> Any:
        def real(value: Any) -> Any:
            if isinstance(value, Tensor) and is_deferred(value):
                return self.record.real([value], "value")[0]
            return value

        args, kwargs = tree_map(real, (tuple(args), kwargs))
        return func(*args, **kwargs)


def _shape_only(func: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> Any:
    """The operation on the meta device. Where only random numbers differ from ``empty``, that is run instead:
    torch's meta kernels for them are slow to load.
    """
    name = func._schema.name.removeprefix("aten::")
    if name in _FILLS and len(tensors) == 1:
        return tensors[0]
    if name in ("randn", "rand"):
        return torch.empty(args[0], dtype=kwargs.get("dtype"), device="meta")
    if name in ("randn_like", "rand_like"):
        return torch.empty_like(tensors[0], **kwargs)
    meta_args, kwargs = tree_map(_to_meta, (tuple(args), kwargs))
    return func(*meta_args, **kwargs)


_FILLS = frozenset(
    ("normal_", "uniform_", "fill_", "zero_", "bernoulli_", "exponential_", "log_normal_", "random_")
)


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) and not is_deferred(value) else value


class _Values(TorchFunctionMode):
    """``tolist`` and ``numpy`` read memory without an operation to intercept: makes the values first.

    And deferred tensors say that they are on the CPU: some initialisers of torch's leave meta tensors alone.
    """

    READERS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
    SAID = {  # noqa: RUF012 - a constant
        torch.Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
        torch.Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
        torch.Tensor.device.__get__: torch.device("cpu"),
    }

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in self.SAID and is_deferred(args[0]):
            return self.SAID[func]
        if func in self.READERS and isinstance(args[0], Tensor) and is_deferred(args[0]):
            args = (self.record.real([args[0].detach()], "value")[0], *args[1:])
        return func(*args, **(kwargs or {}))


@contextmanager
def deferring(seed: int) -> Iterator[Record]:
    """Inside, tensors are made without values; the record yielded makes them later.

    Python's and torch's generators start from ``seed`` inside, so that every process sees the same model, and
    are as before afterwards.
    """
    record = Record(seed)
    state, python_state = torch.default_generator.get_state(), random.getstate()
    torch.default_generator.manual_seed(derived_seed(seed, "model"))
    random.seed(f"skyctl {seed} model")
    try:
        with _Values(record), _Deferring(record):
            yield record
    finally:
        torch.default_generator.set_state(state)
        random.setstate(python_state)


def tensors_of(root: object) -> list[Tensor]:
    """Every tensor a module holds, each once: parameters, buffers, and plain attributes, however nested."""
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    stack: list[tuple[object, int]] = [(root, 0)]
    while stack:
        value, depth = stack.pop()
        if isinstance(value, Tensor):
            found.setdefault(id(value), value)
            continue
        if id(value) in seen or depth > 64 or isinstance(value, str | bytes | int | float | type | None):
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            stack += [(v, depth + 1) for v in value.values()]
        elif isinstance(value, list | tuple | set | frozenset):
            stack += [(v, depth + 1) for v in value]
        elif isinstance(getattr(value, "__dict__", None), dict) and not callable_only(value):
            stack.append((vars(value), depth + 1))
    return list(found.values())[::-1]


def callable_only(value: object) -> bool:
    """Functions and modules of Python: their attributes are code, not a layer's state."""
    return type(value).__name__ in {"function", "module", "builtin_function_or_method", "method"}


def check_made(record: Record, tensors: Sequence[Tensor], layer: str) -> None:
    """Raises WorkloadError where a layer holds a tensor whose values nothing can make."""
    for tensor in tensors:
        if torch.nn.parameter.is_lazy(tensor):
            raise WorkloadError(
                f"{layer} holds a lazy parameter without a shape",
                hint="give the layer its input size in model()",
            )
        if is_deferred(tensor) and not record.knows(tensor):
            raise WorkloadError(
                f"{layer} holds a tensor of shape {list(tensor.shape)} on the meta device, without values",
                hint="make it without device='meta': skyctl puts off making the values by itself",
            )
