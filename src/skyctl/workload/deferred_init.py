"""Deferred initialisation: model() runs on the meta device while every operation that makes values is taped;
later only the operations that the wanted tensors depend on are run for real.

The tape is keyed by storage, so views, ``nn.Parameter``, ``.data`` and in-place initialisation all find
their way. Tensors that are real when they enter (``torch.tensor([…])``, loaded weights, the file's globals)
stay real and are constants of the tape. Each operation that draws random numbers has its own seed, from the
run's seed and how many drew before it. So what it gives is the same for everybody who asks: a layer, a copy
of the layer, a line of ``model()`` that reads a value. Knows nothing of layers; the same idea as
deferred_init of pytorch/torchdistx.
"""

from __future__ import annotations

import heapq
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from skyctl.errors import WorkloadError
from skyctl.workload.hooks import held_values, tensor_hooks


@dataclass(frozen=True)
class TensorRef:
    """A tensor of the tape: a window into a storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class TapedOperation:
    """One operation: its arguments, with references for tensors, and the new storages that its outputs bring.

    Attributes:
        outputs: (place among the output's leaves, reference) of each output in a new storage.
        reads, writes: the storages that the operation reads and changes.
        draw: of an operation that draws random numbers, its seed, or the state in which it found its
            generator where the user has seeded that; else None.
    """

    func: Any
    args: Any
    kwargs: dict[str, Any]
    outputs: tuple[tuple[int, TensorRef], ...]
    reads: frozenset[int]
    writes: frozenset[int]
    draw: int | Tensor | None = None


def ref_of(tensor: Tensor) -> TensorRef:
    """The reference by which the tape knows a tensor."""
    key = tensor.untyped_storage()._cdata
    return TensorRef(
        key, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
    )


def is_deferred(tensor: Tensor) -> bool:
    """Whether a tensor has no values yet: it is on the meta device."""
    return tensor.device.type == "meta"


class OperationTape:
    """The operations that model() ran; ``materialize`` makes the values of some of its tensors."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._ops: list[TapedOperation] = []
        self._writers: dict[int, list[int]] = {}
        self._draws = 0
        self._alive: dict[int, Any] = {}  # meta storages hold no memory; keeping them keeps their ids unique

    def next_draw(self) -> int:
        """The seed of the next operation that draws random numbers."""
        self._draws += 1
        return derived_seed(self.seed, f"draw {self._draws}")

    def add(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        refs: dict[int, TensorRef],
        out: Any,
        draw: int | Tensor | None = None,
    ) -> None:
        """Adds one operation, unless it only returns views of its arguments."""
        storages = {ref.storage for ref in refs.values()}
        outputs = []
        writes = {refs[id(t)].storage for t in mutated_arguments(func, args, kwargs) if id(t) in refs}
        for place, tensor in enumerate(tree_leaves(out)):
            if isinstance(tensor, Tensor) and is_deferred(tensor):
                ref = ref_of(tensor)
                self._alive[ref.storage] = tensor.untyped_storage()
                if ref.storage not in storages:
                    outputs.append((place, ref))
                    writes.add(ref.storage)
        if not writes:
            return

        def freeze(value: Any) -> Any:
            return refs.get(id(value), value) if isinstance(value, Tensor) else value

        index = len(self._ops)
        frozen = tree_map(freeze, args), tree_map(freeze, kwargs)
        operation = TapedOperation(
            func, *frozen, tuple(outputs), frozenset(storages), frozenset(writes), draw
        )
        self._ops.append(operation)
        for key in writes:
            self._writers.setdefault(key, []).append(index)

    def operations(self) -> Sequence[TapedOperation]:
        """All operations, in the order they ran."""
        return self._ops

    def can_materialize(self, tensor: Tensor) -> bool:
        """Whether the tape can make this tensor's values."""
        return tensor.untyped_storage()._cdata in self._writers or tensor.numel() == 0

    def materialize(
        self, tensors: Sequence[Tensor], known: Sequence[tuple[Tensor, Callable[[], Tensor]]] = ()
    ) -> list[Tensor]:
        """Makes the tensors' values, on the CPU; tensors that shared a storage share one again.

        Runs the operations they depend on, in the recorded order, each with its own random numbers; the
        process's own generator is left as it was.

        Args:
            known: tensors of the tape with what reads the values that they have in place of the tape's: what
                is made from them is made from these. Only those are read.
        """
        state = torch.default_generator.get_state()
        try:
            with _disable_current_modes(), torch.no_grad():
                given = {ref_of(tensor).storage: (tensor, read) for tensor, read in known}
                needed = self._needed([t.untyped_storage()._cdata for t in tensors], given)
                used = {key for index in needed for key in self._ops[index].reads & given.keys()}
                values: dict[int, Any] = {key: _laid_as(given[key][0], given[key][1]()) for key in used}
                for index in needed:
                    self._run(self._ops[index], values)
                return [self._window(ref_of(t), values) for t in tensors]
        finally:
            torch.default_generator.set_state(state)

    def _needed(self, keys: Sequence[int], known: Mapping[int, Any]) -> list[int]:
        """Indices of the operations those storages depend on, ascending: a backward slice.

        Args:
            known: by storage, the values of those that need not be made.
        """
        heap = [-index for key in set(keys) for index in self._writers.get(key, [])]
        heapq.heapify(heap)
        needed: list[int] = []
        while heap:
            index = -heapq.heappop(heap)
            if needed and needed[-1] == index:
                continue
            needed.append(index)
            for key in self._ops[index].reads - known.keys():
                for earlier in self._writers.get(key, []):
                    if earlier >= index:
                        break
                    heapq.heappush(heap, -earlier)
        return needed[::-1]

    def _run(self, op: TapedOperation, values: dict[int, Any]) -> None:
        def thaw(value: Any) -> Any:
            if isinstance(value, torch.Generator):
                assert isinstance(op.draw, Tensor)
                return torch.Generator().set_state(op.draw)
            return self._window(value, values) if isinstance(value, TensorRef) else value

        if isinstance(op.draw, int):
            torch.default_generator.manual_seed(op.draw)
        elif op.draw is not None:  # a generator among the arguments has a copy of its own
            torch.default_generator.set_state(op.draw)
        out = tree_leaves(op.func(*tree_map(thaw, op.args), **tree_map(thaw, op.kwargs)))
        for place, ref in op.outputs:
            tensor: Tensor = out[place]
            if tuple(tensor.stride()) != ref.stride or tensor.storage_offset() != ref.offset:
                nbytes = self._alive[ref.storage].nbytes()
                laid = torch.empty(nbytes, dtype=torch.uint8).untyped_storage()
                copy = torch.empty(0, dtype=ref.dtype).set_(laid, ref.offset, ref.size, ref.stride)
                tensor = copy.copy_(tensor)
            values[ref.storage] = tensor.untyped_storage()

    @staticmethod
    def _window(ref: TensorRef, values: Mapping[int, Any]) -> Tensor:
        if ref.storage not in values:
            return torch.empty_strided(ref.size, ref.stride, dtype=ref.dtype)
        return torch.empty(0, dtype=ref.dtype).set_(values[ref.storage], ref.offset, ref.size, ref.stride)


def _laid_as(tensor: Tensor, values: Tensor) -> Any:
    """A storage that holds the values as the tensor lies in its own."""
    ref = ref_of(tensor)
    storage = torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8).untyped_storage()
    torch.empty(0, dtype=ref.dtype).set_(storage, ref.offset, ref.size, ref.stride).copy_(values)
    return storage


def derived_seed(seed: int, salt: str) -> int:
    """A 63-bit seed from (seed, salt), the same on every machine."""
    return random.Random(f"skyctl {seed} {salt}").getrandbits(63)  # noqa: S311 - reproducible, not secret


def mutated_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensor arguments that an operation changes in place."""
    mutated = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            mutated += [t for t in tree_leaves(value) if isinstance(t, Tensor)]
    return mutated


def _returns_tensors(func: Any) -> bool:
    return all("Tensor" in str(result.type) for result in func._schema.returns)


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Base of this package's dispatch modes: they compile nothing, so need no ``torch._dynamo`` (100 MB)."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _TapingMode(DispatchMode):  # type: ignore[no-untyped-call]
    """Runs operations on the meta device and tapes them; where a value is asked for, makes that one."""

    def __init__(self, tape: OperationTape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape
        self._last_seed = torch.default_generator.initial_seed()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():  # here a tensor's device is what it is: see _Values
            return self._dispatch(func, args, dict(kwargs or {}))

    def _dispatch(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        deferred = [t for t in tensors if is_deferred(t)]
        takes_device = any(a.name == "device" for a in func._schema.arguments)
        draw = self._draw(func, (args, kwargs))
        if (tensors and not deferred) or (not tensors and not takes_device):
            return self._run(func, args, kwargs, draw)
        replay = {**kwargs, "device": torch.device("cpu")} if takes_device else kwargs
        changed = mutated_arguments(func, args, kwargs)
        if not _returns_tensors(func) or any(not is_deferred(t) for t in changed):
            return self._run_for_real(func, args, replay, draw)
        refs = {id(t): ref_of(t) for t in deferred}  # as they are before the operation: some change the shape
        on_meta = {**kwargs, "device": torch.device("meta")} if takes_device else kwargs
        if on_meta.get("pin_memory"):
            on_meta["pin_memory"] = replay["pin_memory"] = False
        try:
            out = _run_on_meta(func, args, on_meta, tensors)
        except (NotImplementedError, RuntimeError):
            if changed:
                raise
            # no meta kernel, or the operation itself is wrong
            return self._run_for_real(func, args, replay, draw)
        if not tensors and isinstance(out, Tensor) and out.numel() == 0:
            if kwargs.get("device") == torch.device("meta"):  # asked where tensors are made
                return out
            return func(*args, **replay)  # holds nothing; torch.load sets a storage into such a tensor
        self.tape.add(func, tuple(args), replay, refs, out, draw)
        if isinstance(draw, Tensor):  # the user's generator goes on as if the numbers had been drawn
            self._run_for_real(func, args, replay, draw)
        return out

    def _draw(self, func: Any, given: Any) -> int | Tensor | None:
        """The seed or state that fixes the random numbers of an operation (``TapedOperation.draw``)."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return None
        own = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Generator)]
        if not own and torch.default_generator.initial_seed() != self._last_seed:
            own = [torch.default_generator]  # model() has called manual_seed: from then on it has the say
        # tensors of values are on the CPU, and so is a generator that they are drawn from
        return own[0].get_state() if own else self.tape.next_draw()

    def _run(self, func: Any, args: Any, kwargs: Any, draw: int | Tensor | None) -> Any:
        if isinstance(draw, int):
            torch.default_generator.manual_seed(draw)
            self._last_seed = torch.default_generator.initial_seed()
        return func(*args, **kwargs)

    def _run_for_real(self, func: Any, args: Any, kwargs: Any, draw: int | Tensor | None) -> Any:
        def real(value: Any) -> Any:
            return _materialized(self.tape, value)

        args, kwargs = tree_map(real, (tuple(args), kwargs))
        return self._run(func, args, kwargs, draw)


def _materialized(tape: OperationTape, value: Any) -> Any:
    """A deferred tensor's values; anything else as it is."""
    return tape.materialize([value])[0] if isinstance(value, Tensor) and is_deferred(value) else value


def _run_on_meta(func: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> Any:
    """Runs the operation on the meta device: random ones as ``empty``, for their kernels load slowly."""
    name = func._schema.name.removeprefix("aten::")
    if name in _FILL_OPERATIONS and len(tensors) == 1:
        return tensors[0]
    if name in ("randn", "rand"):
        return torch.empty(args[0], dtype=kwargs.get("dtype"), device="meta")
    if name in ("randn_like", "rand_like"):
        return torch.empty_like(tensors[0], **kwargs)
    meta_args, kwargs = tree_map(_to_meta, (tuple(args), kwargs))
    return func(*meta_args, **kwargs)


_FILL_OPERATIONS = frozenset(
    ("normal_", "uniform_", "fill_", "zero_", "bernoulli_", "exponential_", "log_normal_", "random_")
)


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) and not is_deferred(value) else value


class _ValueReadMode(TorchFunctionMode):
    """Makes values where ``tolist`` or ``numpy`` reads them, which is no operation that could be intercepted.

    Nor is ``weight.data = values``: if one of the two is deferred, the values become so as well, or are made.
    Deferred tensors also claim to be on the CPU: some of torch's initialisers leave meta tensors alone. Empty
    ones do not: they are on the meta device because model() asked for it.
    """

    SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
    READERS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
    CLAIMED = {  # noqa: RUF012 - a constant
        torch.Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
        torch.Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
        torch.Tensor.device.__get__: torch.device("cpu"),
    }

    def __init__(self, tape: OperationTape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in self.CLAIMED and is_deferred(args[0]) and args[0].numel():
            return self.CLAIMED[func]
        if func in self.READERS and isinstance(args[0], Tensor) and is_deferred(args[0]):
            args = (self.tape.materialize([args[0].detach()])[0], *args[1:])
        if func == self.SET_DATA and is_deferred(args[0]) != is_deferred(args[1]):
            args = (args[0], self._like(args[1].detach(), args[0]))
        return func(*args, **(kwargs or {}))

    def _like(self, values: Tensor, target: Tensor) -> Tensor:
        """The values, deferred if ``target`` is."""
        if not is_deferred(target):
            return self.tape.materialize([values])[0]
        late = torch.empty_like(values, device="meta")
        self.tape.add(torch.ops.aten.clone.default, (values,), {}, {}, late)
        return late


@contextmanager
def deferred_initialization(seed: int) -> Iterator[OperationTape]:
    """Inside, tensors are made without values; the tape yielded makes them later.

    Inside, the generators of torch, Python and NumPy start from ``seed``, so that every process makes the
    same model; afterwards they are as before.
    """
    tape = OperationTape(seed)
    with seeded_generators(seed, "model"), _ValueReadMode(tape), _TapingMode(tape):
        yield tape


@contextmanager
def seeded_generators(seed: int, salt: str) -> Iterator[None]:
    """Inside, the global generators of torch (CPU), Python and NumPy start from (seed, salt).

    Afterwards they are as before. NumPy's is left alone where nothing has imported NumPy.
    """
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    state, python_state = torch.default_generator.get_state(), random.getstate()
    numpy_state = None if numpy_random is None else numpy_random.get_state()
    torch.default_generator.manual_seed(derived_seed(seed, salt))
    random.seed(f"skyctl {seed} {salt}")
    if numpy_random is not None:
        numpy_random.seed(derived_seed(seed, salt) % 2**32)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
        random.setstate(python_state)
        if numpy_random is not None:
            numpy_random.set_state(numpy_state)


def tensors_of(root: object) -> list[Tensor]:
    """Every tensor that a module holds, once: parameters, buffers, plain attributes, however nested.

    So are those that its hooks, and the hooks of its parameters, hold.
    """
    tensors: dict[int, Tensor] = {}
    seen: set[int] = set()
    stack: list[tuple[object, int]] = [(root, 0)]
    while stack:
        value, depth = stack.pop()
        if isinstance(value, Tensor):
            if id(value) not in tensors:
                tensors[id(value)] = value
                stack += [(hook, depth + 1) for hook in tensor_hooks(value)]
            continue
        if id(value) in seen or depth > 64 or isinstance(value, str | bytes | int | float | type | None):
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            stack += [(v, depth + 1) for v in value.values()]
        elif isinstance(value, list | tuple | set | frozenset):
            stack += [(v, depth + 1) for v in value]
        elif is_python_code(value):  # a module that a function holds is the layer's already, or another's
            stack += [(v, depth + 1) for v in held_values(value) if not isinstance(v, nn.Module)]
        elif isinstance(getattr(value, "__dict__", None), dict):
            stack.append((vars(value), depth + 1))
    return list(tensors.values())[::-1]


def is_python_code(value: object) -> bool:
    """Whether a value is a function or module of Python: its attributes are code, not a layer's state."""
    return type(value).__name__ in {"function", "module", "builtin_function_or_method", "method"}


def check_materializable(tape: OperationTape, tensors: Sequence[Tensor], layer: str) -> None:
    """Checks that the values of a layer's tensors can be made; WorkloadError where they can't.

    Args:
        layer: what to call it in the error.
    """
    for tensor in tensors:
        if torch.nn.parameter.is_lazy(tensor):
            raise WorkloadError(
                f"{layer} holds a lazy parameter without a shape",
                hint="give the layer its input size in model()",
            )
        if is_deferred(tensor) and not tape.can_materialize(tensor):
            raise WorkloadError(
                f"{layer} holds a tensor of shape {list(tensor.shape)} on the meta device, without values",
                hint="make it without device='meta': skyctl puts off making the values by itself",
            )
