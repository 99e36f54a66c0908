"""A model file trained by plain torch in this process, from a run's initial weights; weights loaded back."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from skyctl.workload.loss_functions import cross_entropy
from skyctl.workload.recipe import microbatch_sizes
from skyctl.workload.user_code import import_file
from skyctl.workload.workload import DEFAULT_LEARNING_RATE, Workload, load_workload
from skyctl.workload.workload_spec import make_spec


@dataclass(frozen=True)
class ModelFile:
    """A file with ``model()``, ``data(batch_size, seed)`` and what else a user's file may define, imported.

    Attributes:
        about: the first line of its docstring.
        make: what ``model()`` gives; a list of layers as the ``nn.Sequential`` that it stands for.
        loss: the file's own, or the cross-entropy that skyctl takes.
        make_optimizer: the file's own, or skyctl's AdamW, over the model's trained parameters.
        make_lr_scheduler: (of which optimizer, of how many steps); None: the file defines none.
    """

    path: Path
    about: str
    make: Callable[[], nn.Module]
    data: Callable[[int, int], Iterator[tuple[Any, Any]]]
    loss: Callable[[Any, Any], Tensor]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    make_lr_scheduler: Callable[[torch.optim.Optimizer, int], Any] | None

    @classmethod
    def load(cls, path: Path) -> ModelFile:
        module, scope = import_file(path)

        def make() -> nn.Module:
            with scope.running():
                made = module.model()
            return nn.Sequential(*made) if isinstance(made, list | tuple) else made

        def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
            named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
            parameters = [p for _, p in named]
            if "optimizer" in vars(module):
                made: torch.optim.Optimizer = _call_with(module.optimizer, parameters, named)
                return made
            return torch.optim.AdamW(parameters, lr=DEFAULT_LEARNING_RATE, fused=True)

        scheduler = getattr(module, "lr_scheduler", None)
        return cls(
            path,
            (module.__doc__ or "").splitlines()[0],
            make,
            module.data,
            getattr(module, "loss", cross_entropy),
            make_optimizer,
            scheduler and (lambda optimizer, steps: _call_with(scheduler, optimizer, steps)),
        )


def _call_with(function: Callable[..., Any], needed: Any, more: Any) -> Any:
    """Calls it with the first, and with the second, too, where it takes as many."""
    return function(needed, more) if len(inspect.signature(function).parameters) > 1 else function(needed)


@contextmanager
def single_thread() -> Iterator[None]:
    """Inside, torch computes with one thread, as the nodes do; sums are then added up in the same order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def arguments_of(module: nn.Module, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a batch's inputs are given to ``forward``: (positional arguments, keyword arguments).

    A tuple or a list is spread where ``forward`` takes as many, a dict goes by name where it has these
    parameters; anything else is one argument.
    """
    taken = inspect.signature(module.forward)
    args: tuple[Any, ...] = (inputs,)
    kwargs: dict[str, Any] = {}
    if isinstance(inputs, tuple | list):
        args, kwargs = tuple(inputs), {}
    elif isinstance(inputs, Mapping):
        args, kwargs = (), dict(inputs)
    try:
        taken.bind(*args, **kwargs)
    except TypeError:
        return (inputs,), {}
    return args, kwargs


def call(module: nn.Module, inputs: Any) -> Any:
    """The outputs that the model gives for a batch's inputs."""
    args, kwargs = arguments_of(module, inputs)
    return module(*args, **kwargs)


def slice_samples(value: Any, start: int, stop: int) -> Any:
    """Samples [start, stop) of every tensor in a value, however nested."""
    return tree_map(lambda tensor: tensor[start:stop], value)


def load(path: Path, batch_size: int) -> Workload:
    """The file as skyctl loads it."""
    return load_workload(make_spec(str(path), batch_size=batch_size))


def initial_weights(workload: Workload) -> dict[str, Tensor]:
    """The weights that a run starts from, under the names that those of the whole model have."""
    found: dict[str, Tensor] = {}
    for index, layer in enumerate(workload.build(0, workload.layers)):
        own = layer.state_dict()
        found |= {name: own[mine] for mine, name in workload.weight_names(index).items()}
    return found


def train(
    file: ModelFile, weights: Mapping[str, Tensor], batch_size: int, parts: int, steps: int
) -> list[float]:
    """The losses of ``train_model``."""
    return train_model(file, weights, batch_size, parts, steps)[0]


def train_model(
    file: ModelFile, weights: Mapping[str, Tensor], batch_size: int, parts: int, steps: int
) -> tuple[list[float], nn.Module]:
    """The losses of ``steps`` steps with gradients accumulated over ``parts`` microbatches, and the model.

    With the optimizer of a file that defines none, fused as there: torch's other AdamW rounds otherwise.

    Raises:
        RuntimeError: the weights are not those of the file's own class, by name or shape.
    """
    if dist.is_initialized():  # loading a workload has made this process a rank; here it is none
        dist.destroy_process_group()
    model = file.make()
    model.load_state_dict(weights, strict=True)
    model.train()
    optimizer = file.make_optimizer(model)
    scheduler = file.make_lr_scheduler and file.make_lr_scheduler(optimizer, steps)
    losses = []
    for _, (inputs, targets) in zip(range(steps), file.data(batch_size, 0), strict=False):
        optimizer.zero_grad()
        total, start = 0.0, 0
        for size in microbatch_sizes(batch_size, parts):
            stop = start + size
            outputs = call(model, slice_samples(inputs, start, stop))
            mean = file.loss(outputs, slice_samples(targets, start, stop))
            (mean * (size / batch_size)).backward()  # type: ignore[no-untyped-call]
            total += mean.item() * size / batch_size
            start = stop
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(total)
    return losses, model


def draws(file: ModelFile, batch_size: int) -> bool:
    """Whether the model draws random numbers while it trains: its outputs depend on the generator."""
    model = file.make().train()
    inputs, _ = next(iter(file.data(batch_size, 0)))
    given = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        given.append(tree_leaves(call(copy.deepcopy(model), inputs)))
    return any(not torch.equal(a, b) for a, b in zip(*given, strict=True))


def largest_difference(values: list[float], others: list[float]) -> float:
    """The largest relative difference of two runs' losses, step by step."""
    return max(abs(a - b) / abs(b) for a, b in zip(values, others, strict=True))


def reload_difference(file: ModelFile, workload: Workload, weights: Path, batch_size: int) -> float:
    """How far the file's own class and skyctl's layers are apart, with a run's weights and in ``eval()``.

    Returns:
        The largest relative difference of the loss, or of a parameter's gradient (of the largest gradient).

    Raises:
        RuntimeError: the weights are not those of the file's own class, by name or shape.
    """
    values = load_file(weights)
    model = file.make()
    model.load_state_dict(values, strict=True)
    inputs, targets = next(iter(file.data(batch_size, 0)))
    torch.manual_seed(0)
    loss = file.loss(call(model.eval(), inputs), targets)
    loss.backward()  # type: ignore[no-untyped-call]
    every = model.named_parameters(remove_duplicate=False)  # a shared one by each of its names
    wanted = {name: p.grad for name, p in every if p.grad is not None}
    layers = workload.build(0, workload.layers)
    value = inputs
    for index, layer in enumerate(layers):
        names = workload.weight_names(index)
        layer.load_state_dict({mine: values[name] for mine, name in names.items()})
        torch.manual_seed(0)
        value = layer.eval()(value)
    cut = workload.loss(value, targets)
    cut.backward()  # type: ignore[no-untyped-call]
    have = {
        workload.weight_names(index)[mine]: p.grad
        for index, layer in enumerate(layers)
        for mine, p in layer.named_parameters()
        if p.grad is not None
    }
    if have.keys() != wanted.keys():
        raise RuntimeError(f"gradients of {sorted(have.keys() ^ wanted.keys())} are on one side only")
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    apart = [float((have[name] - grad).abs().max()) / largest for name, grad in wanted.items()]
    return max(abs(float(cut) - float(loss)) / abs(float(loss)), *apart)
