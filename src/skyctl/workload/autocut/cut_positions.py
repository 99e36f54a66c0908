"""The positions at which a graph of calls is cut into layers.

A cut before a call carries every flowing value that was made before it and is needed from there on. No cut
separates two uses of a parameter by one name (by two, as where an embedding is tied to its head, the layers
share it), nor a value from a view of it that is changed in place later. Values that
depend on shapes alone (masks, positions) are not carried: each layer that needs them makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median

from torch import Tensor, nn

from skyctl.workload.autocut.call_graph import Call, HeldRef, ValueRef, leaves_of
from skyctl.workload.autocut.trace_merge import CallGraph

MOST_CLOSED_SHARE = 0.3
"""An opened module with at most this share of the flops is closed again where cuts within carry more than
those around it: a residual block."""

LEAST_OF_BLOCK = 0.25
"""A call between blocks begins a layer from this part of a middling block's flops or parameters on."""

LEAST_OF_MODEL = 0.01
"""The same where there are no blocks, as part of the whole model's."""


@dataclass(frozen=True)
class Unit:
    """Calls [start, stop), between which no cut is looked for.

    Attributes:
        name: the dotted name of the module, or what function it is.
        is_block: whether it is a module that is made of others.
    """

    start: int
    stop: int
    name: str
    is_block: bool
    flops: int
    parameter_bytes: int


class CutFinder:
    """Finds the positions at which a graph may be cut, and chooses among them.

    Args:
        model: the module that was traced, for what its submodules hold.
    """

    def __init__(self, graph: CallGraph, model: nn.Module) -> None:
        self.graph = graph
        self.calls, self.values = graph.trace.calls, graph.trace.values
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._held = {
            f"{prefix}.{name}" if prefix else name: tensor
            for prefix, module in self._modules.items()
            for name, tensor in {**module._parameters, **module._buffers}.items()
            if tensor is not None
        }

    @cached_property
    def last_use(self) -> list[int]:
        """By value, the last call that takes it (how many there are, where it is returned; -1: none)."""
        last_uses = [-1] * len(self.values)
        for index, call in enumerate(self.calls):
            for number in _numbers(call):
                last_uses[number] = index
        for leaf in leaves_of(self.graph.trace.output):
            if isinstance(leaf, ValueRef):
                last_uses[leaf.number] = len(self.calls)
        return last_uses

    @cached_property
    def shape_only(self) -> list[bool]:
        """By call, whether what it gives depends on nothing but shapes and read-only buffers."""
        only_shapes = [False] * len(self.calls)
        tainted: set[int] = set()
        changing = True
        while changing:
            changing = False
            for index, call in enumerate(self.calls):
                only_shapes[index] = self._depends_on_shapes(call, only_shapes, tainted)
                if not only_shapes[index]:
                    new = call.writes - tainted
                    tainted |= new
                    changing = changing or bool(new)
        return only_shapes

    def _depends_on_shapes(self, call: Call, only_shapes: Sequence[bool], tainted: set[int]) -> bool:
        if call.random or call.held_writes or call.writes & tainted:
            return False
        if call.module is not None and any(True for _ in self._modules[call.module].parameters()):
            return False
        for leaf in call.refs():
            if isinstance(leaf, ValueRef):
                value = self.values[leaf.number]
                if value.producer < 0 or not only_shapes[value.producer] or value.storage in tainted:
                    return False
            elif isinstance(leaf, HeldRef) and isinstance(self._held.get(leaf.path), nn.Parameter):
                return False
        return not any(
            self.values[n].storage in tainted or self.values[n].requires_grad for n in call.outputs
        )

    def carried(self, position: int) -> list[int]:
        """The values that a cut before call ``position`` carries, in the order they were made."""
        if position == 0:
            return list(range(self.graph.trace.inputs))
        return [
            number
            for number, value in enumerate(self.values)
            if value.producer < position <= self.last_use[number]
            and not (value.producer >= 0 and self.shape_only[value.producer])
        ]

    def carried_bytes(self, position: int) -> int:
        """The size of the values that such a cut carries, in bytes at the samples of the trace."""
        return sum(self.values[number].nbytes for number in self.carried(position))

    @cached_property
    def forbidden(self) -> dict[int, str]:
        """Positions at which there can be no cut, with the reason."""
        reasons: dict[int, str] = {}
        for path, users in self._users().items():
            first, last = users[0], users[-1]
            for position in range(first + 1, last + 1):
                reasons.setdefault(
                    position,
                    f"{path} is used by {self.calls[first].what} ({self.calls[first].line}) and by "
                    f"{self.calls[last].what} ({self.calls[last].line})",
                )
        for position in range(1, len(self.calls)):
            if position not in reasons and (why := self._why_not(position)):
                reasons[position] = why
        return reasons

    def _why_not(self, position: int) -> str | None:
        carried = self.carried(position)
        grows = any(n.each for number in carried for n in self.graph.shapes[number].sizes)
        if not grows:
            return "nothing that grows with the samples is carried there"
        storages = [self.values[number].storage for number in carried]
        shared = {s for s in storages if storages.count(s) > 1}
        if any(shared & call.writes for call in self.calls[position:]):
            return "a tensor and a view of it are carried, one of which is changed in place later"
        return None

    def _users(self) -> dict[str, list[int]]:
        """By the name of a tensor that must stay in one layer, the calls that use it by that name."""
        written = {path for call in self.calls for path in call.held_writes}
        parameters: dict[int, set[int]] = {}
        for tensor in self._held.values():
            if isinstance(tensor, nn.Parameter):
                parameters.setdefault(tensor.untyped_storage()._cdata, set()).add(id(tensor))
        users_of: dict[str | int, tuple[str, set[int]]] = {}
        for index, call in enumerate(self.calls):
            paths = [leaf.path for leaf in call.refs() if isinstance(leaf, HeldRef)]
            if call.module is not None:
                prefix = call.module + "."
                paths += [path for path in self._held if path.startswith(prefix)]
            for path in paths:
                tensor = self._held.get(path)
                if tensor is None or not (isinstance(tensor, nn.Parameter) or path in written):
                    continue
                storage = tensor.untyped_storage()._cdata
                whole = isinstance(tensor, nn.Parameter) and len(parameters[storage]) == 1
                users_of.setdefault(path if whole else storage, (path, set()))[1].add(index)
        return {path: sorted(users) for path, users in users_of.values()}

    @cached_property
    def units(self) -> list[Unit]:
        """The calls, with those of residual blocks taken together."""
        ranges: dict[tuple[str, int], list[int]] = {}
        for index, call in enumerate(self.calls):
            for scope in call.scopes:
                ranges.setdefault(scope, []).append(index)
        total = sum(call.flops for call in self.calls) or 1
        closed: list[tuple[int, int, str]] = []
        for (path, _), inside in ranges.items():
            start, stop = inside[0], inside[-1] + 1
            if not path or type(self._modules[path]) is nn.Sequential or len(inside) < 2:
                continue
            if any(a <= start and stop <= b for a, b, _ in closed):
                continue
            share = sum(call.flops for call in self.calls[start:stop]) / total
            ends = [self.carried_bytes(p) for p in (start, stop) if 0 < p < len(self.calls)]
            within = [self.carried_bytes(p) for p in range(start + 1, stop) if p not in self.forbidden]
            if share <= MOST_CLOSED_SHARE and (not within or min(within) > max(ends, default=0)):
                closed.append((start, stop, path))
        units = []
        at = 0
        starts = {start: (stop, path) for start, stop, path in closed}
        while at < len(self.calls):
            stop, path = starts.get(at, (at + 1, self._name(at)))
            units.append(self._unit(at, stop, path, closed=at in starts))
            at = stop
        return units

    def _name(self, index: int) -> str:
        call = self.calls[index]
        if call.module is not None:
            return call.module
        scope = call.scopes[-1][0] if call.scopes else ""
        name = getattr(call.function, "__name__", "call")
        return f"{scope}.{name}" if scope else name

    def _unit(self, start: int, stop: int, name: str, *, closed: bool) -> Unit:
        calls = self.calls[start:stop]
        flops = sum(call.flops for call in calls)
        parameters: dict[int, Tensor] = {}
        for call in calls:
            held = [] if call.module is None else list(self._modules[call.module].parameters())
            held += [
                self._held[r.path] for r in call.refs() if isinstance(r, HeldRef) and r.path in self._held
            ]
            parameters |= {id(p): p for p in held if isinstance(p, nn.Parameter)}
        nbytes = sum(p.numel() * p.element_size() for p in parameters.values())
        module = self._modules.get(name)
        composite = module is not None and any(True for _ in module.children())
        return Unit(start, stop, name, bool(nbytes) and (closed or composite), flops, nbytes)

    @cached_property
    def anchors(self) -> list[Unit]:
        """The units that are to be in layers of their own: blocks, and what weighs as much."""
        blocks = [unit for unit in self.units if unit.is_block]
        if blocks:
            least_flops = LEAST_OF_BLOCK * median(unit.flops for unit in blocks)
            least_bytes = LEAST_OF_BLOCK * median(unit.parameter_bytes for unit in blocks)
        else:
            least_flops = LEAST_OF_MODEL * sum(unit.flops for unit in self.units)
            least_bytes = LEAST_OF_MODEL * sum(unit.parameter_bytes for unit in self.units)
        chosen = {
            unit
            for unit in self.units
            if unit.is_block
            or (unit.flops and unit.flops >= least_flops)
            or (unit.parameter_bytes and unit.parameter_bytes >= least_bytes)
        }
        with_parameters = [unit for unit in self.units if unit.parameter_bytes]
        if chosen:
            first, last = min(u.start for u in chosen), max(u.start for u in chosen)
            before = [unit for unit in with_parameters if unit.start < first]
            after = [unit for unit in with_parameters if unit.start > last]
            chosen |= set(before[:1]) | set(after[:1])
        return sorted(chosen, key=lambda unit: unit.start)

    def positions(self) -> list[int]:
        """The positions at which the graph is cut: before these calls, ascending."""
        positions = []
        last = 0
        for anchor, other in pairwise(self.anchors):
            free = [
                p
                for p in range(max(anchor.stop, last + 1), other.start + 1)
                if p not in self.forbidden and self._at_end_of_unit(p)
            ]
            if free:
                fewest = min(map(self.carried_bytes, free))
                fitting = [p for p in free if self.carried_bytes(p) == fewest]
                last = fitting[0] if anchor.is_block else fitting[-1]
                positions.append(last)
        return positions

    def _at_end_of_unit(self, position: int) -> bool:
        return position in self._unit_starts

    @cached_property
    def _unit_starts(self) -> set[int]:
        return {unit.start for unit in self.units}

    def names(self, positions: Sequence[int]) -> list[str]:
        """A name for each layer: that of its heaviest unit, numbered where two would have the same."""
        bounds = [0, *positions, len(self.calls)]
        names: list[str] = []
        for start, stop in pairwise(bounds):
            inside = [unit for unit in self.units if start <= unit.start < stop]
            heaviest = max(inside, key=lambda unit: (unit.is_block, unit.flops, unit.parameter_bytes))
            name, count = heaviest.name, 1
            while name in names:
                count += 1
                name = f"{heaviest.name}#{count}"
            names.append(name)
        return names


def _numbers(call: Call) -> list[int]:
    """The flowing values that a call takes."""
    return [leaf.number for leaf in call.refs() if isinstance(leaf, ValueRef)]
