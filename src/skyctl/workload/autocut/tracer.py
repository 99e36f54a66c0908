"""Runs a module's forward on fake tensors and writes down what it calls.

Modules that are *opened* run as they are, so that what they call is seen. Every other module, every function
of torch and every ``autograd.Function`` is one call, whatever happens within. Loops and conditions in opened
modules are followed as they go with these shapes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import flop_registry

from skyctl.workload.autocut.call_context import ContextWatch
from skyctl.workload.autocut.call_graph import (
    Call,
    ConstantRef,
    FlowingValue,
    HeldRef,
    RunDevice,
    Trace,
    ValueRef,
    map_leaves,
    tensors_in,
)
from skyctl.workload.autocut.tracing_errors import CannotFollowError, explain_failed_call
from skyctl.workload.deferred_init import DispatchMode, is_deferred
from skyctl.workload.user_code import SKYCTL_FOLDER, locate_error

TORCH_FOLDER = Path(torch.__file__).parent
MOST_CALLS = 20_000
READS = frozenset(
    (Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item, Tensor.tolist)
)
"""Functions that give a tensor's values to Python."""


HOOKS = frozenset((Tensor.register_hook, Tensor.register_post_accumulate_grad_hook))
DERIVATIVES = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


class HeldTensors:
    """The tensors that a model holds, and their dotted names; the first name of those that have several."""

    def __init__(self, model: nn.Module) -> None:
        self.path_of: dict[int, str] = {}
        self.tensor_at: dict[str, Tensor] = {}
        for prefix, module in model.named_modules():
            own = {**module._parameters, **module._buffers, **vars(module)}
            for name, value in own.items():
                self._add(f"{prefix}.{name}" if prefix else name, value)

    def _add(self, path: str, value: Any) -> None:
        if isinstance(value, Tensor):
            self.path_of.setdefault(id(value), path)
            self.tensor_at.setdefault(path, value)


class _OperationWatch(DispatchMode):  # type: ignore[no-untyped-call]
    """Counts the flops of the operations inside, and notices random ones."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops, self.random = 0, False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(getattr(func, "_overloadpacket", None))
        if count is not None:
            self.flops += int(count(*args, **(kwargs or {}), out_val=out))
        self.random = self.random or torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        return out


class Tracer(TorchFunctionMode):
    """Writes down the calls of one forward.

    Args:
        model: holds fake tensors.
        opened: the dotted names of the modules to look into.
        file: the user's, whose lines errors name, and those of others in its folder.
    """

    def __init__(self, model: nn.Module, opened: Collection[str], file: Path) -> None:
        super().__init__()
        self._opened, self._file, self._folder = opened, file, file.parent
        self._held = HeldTensors(model)
        self._modules: dict[int, str] = {}
        for path, module in model.named_modules():
            self._modules.setdefault(id(module), path)
        self._watch = _OperationWatch()
        self._numbers: dict[int, int] = {}
        self._alive: list[Tensor] = []  # so that ids stay unique
        self._values: list[FlowingValue] = []
        self._calls: list[Call] = []
        self._constants: list[Tensor] = []
        self._real: dict[int, Tensor | None] = {}
        self._scopes: list[tuple[str, int]] = []
        self._scope_calls: dict[str, int] = {}
        self._inside = False
        self._contexts = ContextWatch()

    def run(self, model: nn.Module, inputs: Sequence[Tensor], args: Any, kwargs: Any, samples: int) -> Trace:
        """One forward of the model, with ``args`` and ``kwargs`` made of the ``inputs``.

        Raises:
            CannotFollowError: it does something that can't be written down.
            Exception: what the model raises itself.
        """
        for tensor in inputs:
            self._new_value(tensor, -1)
        with self._contexts.watched(), self._watch, _patched(self), self:
            output = model(*args, **kwargs)
        frozen = self._freeze(output)
        return Trace(
            samples=samples,
            training=model.training,
            inputs=len(inputs),
            calls=tuple(self._calls),
            values=tuple(self._values),
            output=frozen,
            constants=tuple(self._constants),
        )

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if self._inside:
            return func(*args, **given)
        if func in HOOKS:
            raise self._cannot(
                f"it calls {func.__name__}, whose hook a layer on another machine would not have"
            )
        if func in DERIVATIVES:
            raise self._cannot(
                f"it calls {func.__name__}, for which what it differentiates must be on one machine"
            )
        if func in READS and isinstance(args[0], Tensor):
            return self._read(func, args[0])
        return self.call(func, None, tuple(args), given)

    def call_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module's ``__call__`` while the forward runs."""
        path = self._modules.get(id(module))
        if self._inside or path is None:
            return _CALL_MODULE(module, *args, **kwargs)
        if path and path not in self._opened:
            if any(id(p) not in self._held.path_of for p in module.parameters()):
                raise self._cannot(f"it calls {path} with other parameters than the module's own")
            return self.call(lambda *a, **k: _CALL_MODULE(module, *a, **k), path, args, kwargs)
        number = self._scope_calls[path] = self._scope_calls.get(path, -1) + 1
        self._scopes.append((path, number))
        before = _attributes(module)
        try:
            out = _CALL_MODULE(module, *args, **kwargs)
            for name, value in _attributes(module).items():
                new = tensors_in(value) if before.get(name) is not value else []
                if new:
                    raise self._cannot(
                        f"it sets self.{name} to a tensor, which other machines can't see",
                        self._origin(new[0]),
                    )
            return out
        finally:
            self._scopes.pop()

    def call(
        self, function: Callable[..., Any], module: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs one call, and writes it down if tensors come out of it or change."""
        with torch._C.DisableTorchFunction():  # else looking at a tensor's shape would come here again
            return self._call(function, module, args, kwargs)

    def _call(
        self, function: Callable[..., Any], module: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        lost = self._contexts.what_is_lost()
        if lost is not None:
            raise self._cannot(lost)
        tensors = tensors_in((args, kwargs))
        versions = [t._version for t in tensors]
        held = self._buffers_of(module)
        held_versions = [t._version for t in held.values()]
        self._watch.flops, self._watch.random, self._inside = 0, False, True
        try:
            result = function(*args, **kwargs)
        except Exception as exc:
            raise self._cannot(explain_failed_call(exc), locate_error(exc, self._file)) from exc
        finally:
            self._inside = False
            self._contexts.note_generators()
        results = tensors_in(result)
        written = [t for t, before in zip(tensors, versions, strict=True) if t._version != before]
        if not results and not written and module is None:
            return result
        if len(self._calls) >= MOST_CALLS:
            raise self._cannot(f"it makes more than {MOST_CALLS} calls")
        frozen_args, frozen_kwargs = self._freeze(args), self._freeze(kwargs)
        held_writes = {p for (p, t), v in zip(held.items(), held_versions, strict=True) if t._version != v}
        held_writes |= {self._held.path_of[id(t)] for t in written if id(t) in self._held.path_of}
        changed = {id(t) for t in written}
        existing = {id(t) for t in results if id(t) in self._numbers or id(t) in self._held.path_of} - changed
        if existing:
            # returned as it came: a tensor of its own, for it may be another one in the other mode
            aliases = {id(t): t.view_as(t) for t in results if id(t) in existing}
            self._alive += results
            result = _thawed(map_leaves(result, lambda leaf: aliases.get(id(leaf), leaf)))
            results = tensors_in(result)
        index = len(self._calls)
        self._calls.append(
            Call(
                function=None if module is not None else function,
                module=module,
                args=frozen_args,
                kwargs=frozen_kwargs,
                outputs=tuple(self._new_value(t, index) for t in results),
                writes=frozenset(_storage(t) for t in written),
                held_writes=frozenset(held_writes),
                context=self._contexts.context(),
                random=self._watch.random,
                flops=self._watch.flops,
                scopes=tuple(self._scopes),
                line=self._line(),
            )
        )
        return result

    def _buffers_of(self, module: str | None) -> dict[str, Tensor]:
        if module is None:
            return {}
        prefix = module + "."
        return {p: t for p, t in self._held.tensor_at.items() if p.startswith(prefix)}

    def _new_value(self, tensor: Tensor, producer: int) -> int:
        number = len(self._values)
        self._numbers[id(tensor)] = number
        self._alive.append(tensor)
        nbytes = tensor.numel() * tensor.element_size()
        self._values.append(
            FlowingValue(tuple(tensor.shape), nbytes, _storage(tensor), tensor.requires_grad, producer)
        )
        return number

    def _freeze(self, value: Any) -> Any:
        return map_leaves(value, self._frozen_leaf)

    def _frozen_leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if id(leaf) in self._numbers:
                return ValueRef(self._numbers[id(leaf)])
            if id(leaf) in self._held.path_of:
                return HeldRef(self._held.path_of[id(leaf)])
            if not _is_fake(leaf):
                self._constants.append(leaf)
                return ConstantRef(len(self._constants) - 1)
            raise self._cannot("it uses a tensor that comes from no call that can be followed")
        if isinstance(leaf, torch.device):
            return RunDevice
        if isinstance(leaf, torch.Generator):
            raise self._cannot("it draws from a torch.Generator of its own, which other machines don't have")
        if isinstance(leaf, nn.Module) or getattr(leaf, "__closure__", None):
            raise self._cannot(f"it passes on a {type(leaf).__name__} that may hold parameters")
        if hasattr(leaf, "__dict__") and not isinstance(leaf, type) and not callable(leaf):
            held = [v for v in vars(leaf).values() if isinstance(v, Tensor | list | dict)]
            if held:
                raise self._cannot(f"it passes on a {type(leaf).__name__}, which no message can carry")
        return leaf

    def _read(self, func: Callable[..., Any], tensor: Tensor) -> Any:
        """Gives values of a tensor to Python: only of one that depends on nothing but shapes."""
        number = self._numbers.get(id(tensor))
        real = self._real_value(number) if number is not None else None
        if real is None:
            try:
                return func(tensor)
            except Exception as exc:
                name = getattr(func, "__name__", "item")
                raise self._cannot(f"what it does next depends on the values of a tensor ({name})") from exc
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return func(real)

    def _real_value(self, number: int) -> Tensor | None:
        """The values of a flowing tensor that depends on shapes alone; None: it depends on more."""
        if number in self._real:
            return self._real[number]
        self._real[number] = None
        producer = self._values[number].producer
        call = self._calls[producer] if producer >= 0 else None
        if call is None or call.function is None or call.random or call.writes or call.held_writes:
            return None
        is_known = True

        def real(leaf: Any) -> Any:
            nonlocal is_known
            if leaf is RunDevice:
                return torch.device("cpu")
            if isinstance(leaf, ValueRef):
                value = self._real_value(leaf.number)
                is_known = is_known and value is not None
                return value
            is_known = is_known and not isinstance(leaf, HeldRef)
            return self._constants[leaf.number] if isinstance(leaf, ConstantRef) else leaf

        args, kwargs = map_leaves(call.args, real), map_leaves(call.kwargs, real)
        storage = self._values[number].storage
        if not is_known or any(storage in other.writes for other in self._calls):
            return None
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            outputs = tensors_in(call.function(*args, **kwargs))
        for place, tensor in zip(call.outputs, outputs, strict=True):
            self._real[place] = tensor
        return self._real[number]

    def _line(self) -> str:
        """The innermost line of the user's own files, or of a library's that is not torch."""
        frame = sys._getframe(1)
        other = ""
        while frame is not None and frame.f_code is not Tracer.run.__code__:
            file = Path(frame.f_code.co_filename)
            if not file.is_relative_to(SKYCTL_FOLDER):
                if file.is_relative_to(self._folder) and "site-packages" not in file.parts:
                    return f"{file.relative_to(self._folder)}, line {frame.f_lineno}"
                if not other and not file.is_relative_to(TORCH_FOLDER):
                    other = f"{file.name}, line {frame.f_lineno}"
            frame = frame.f_back  # type: ignore[assignment]
        return other

    def _origin(self, tensor: Tensor) -> str | None:
        """The line of the call that gave a tensor."""
        number = self._numbers.get(id(tensor))
        producer = -1 if number is None else self._values[number].producer
        return self._calls[producer].line if producer >= 0 else None

    def _cannot(self, reason: str, line: str | None = None) -> CannotFollowError:
        scope = self._scopes[-1][0] if self._scopes else ""
        return CannotFollowError(reason, line or self._line(), scope)


_CALL_MODULE = nn.Module.__call__


@contextmanager
def _patched(tracer: Tracer) -> Iterator[None]:
    """Inside, calls of modules and of ``autograd.Function`` go through the tracer."""
    function = torch.autograd.Function
    apply = function.__dict__["apply"]

    def call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return tracer.call_module(module, args, kwargs)

    def call_function(cls: Any, *args: Any, **kwargs: Any) -> Any:
        bound = apply.__get__(None, cls)
        if tracer._inside:
            return bound(*args, **kwargs)
        checkpoint = sys.modules.get("torch.utils.checkpoint")
        if checkpoint is not None and cls is checkpoint.CheckpointFunction:  # (function, a flag, *arguments)
            return args[0](*args[2:])
        return tracer.call(bound, None, args, kwargs)

    fast = torch.backends.mha.get_fastpath_enabled()
    nn.Module.__call__ = call_module  # type: ignore[method-assign]
    function.apply = classmethod(call_function)  # type: ignore[assignment]
    torch.backends.mha.set_fastpath_enabled(False)  # in eval() it would do other things than in train()
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        function.apply = apply  # type: ignore[method-assign]
        nn.Module.__call__ = _CALL_MODULE  # type: ignore[method-assign]


def _thawed(value: Any) -> Any:
    """Dataclass objects in the place of ``Rebuilt``."""
    return map_leaves(value, lambda leaf: leaf)


def _attributes(module: nn.Module) -> dict[str, Any]:
    own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return {**own, **module._parameters, **module._buffers, **module._modules}


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_fake(tensor: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor) or is_deferred(tensor)
