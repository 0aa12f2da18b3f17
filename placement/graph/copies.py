"""Puts the nodes of a recorded call wherever a trace marks that it recurs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from placement.graph.ir import Call, ModuleInfo, Node, Value, substitute
from placement.graph.repeats import Again, RepeatError, Repeats

Names = Callable[[Callable[..., Any], int], tuple[str, tuple[str, ...]]]
"""Fresh names for a node of an op and for its outputs, of which the number is given."""


@dataclass(slots=True, eq=False)
class _Recorded:
    """What the reader has met of a recorded call: its tensors in and out, and its nodes."""

    entered: tuple[Value, ...] = ()
    left: tuple[Value, ...] = ()
    nodes: list[Node] = field(default_factory=list)


class _Mapping:
    """Which value of a copy stands for which of the recorded call; what is in neither stands for itself."""

    def __init__(self) -> None:
        self.values: dict[Value, Value] = {}

    def add(self, old: Value, new: Value) -> None:
        """Raises RepeatError where the two differ, or ``old`` has come in twice and ``new`` has not."""
        same = (old.shape, old.dtype, old.requires_grad) == (new.shape, new.dtype, new.requires_grad)
        if not same or self.values.setdefault(old, new) is not new:
            raise RepeatError

    def __call__(self, leaf: Any) -> Any:
        return self.values.get(leaf, leaf) if isinstance(leaf, Value) else leaf


class Copier:
    """Collects recorded calls while a program is read, and copies them. Raises RepeatError where it must not."""

    def __init__(self, repeats: Repeats, names: Names) -> None:
        if repeats.failed:
            raise RepeatError
        self._repeats = repeats
        self._names = names
        self._recorded = [_Recorded() for _ in repeats.recordings]
        self._open: list[_Recorded] = []
        self._mappings: list[tuple[Again, _Mapping]] = []
        self._copied: set[str] = set()  # modules of which a call is a copy
        self._strays: set[str] = set()  # modules of which something below was called from outside
        self._counts: dict[tuple[str, str], int] = {}

    def met(self, node: Node) -> None:
        """Take note of a node that was read, in program order."""
        paths = [call.path for call in node.stack]
        if paths:
            self._strays.update(
                above for above in self._repeats.paths if paths[-1].startswith(f"{above}.") and above not in paths
            )
        self._note([node])

    def _note(self, nodes: Sequence[Node]) -> None:
        for recorded in self._open:
            recorded.nodes += nodes

    def mark(
        self, kind: str, number: int, given: tuple[Value, ...], stack: tuple[Call, ...], parameters: Mapping[str, Value]
    ) -> tuple[list[Node], tuple[Value, ...]]:
        """The nodes that a mark stands for, and its results. ``parameters`` are the model's, by dotted name."""
        if kind == "again":
            return self._copy(self._repeats.copies[number], given, stack, parameters)
        recorded = self._recorded[number]
        if kind == "enter":
            recorded.entered = given
            self._open.append(recorded)
        else:
            recorded.left = given
            self._open.remove(recorded)
        return [], given

    def _copy(
        self, again: Again, given: Sequence[Value], stack: tuple[Call, ...], parameters: Mapping[str, Value]
    ) -> tuple[list[Node], tuple[Value, ...]]:
        first, recorded = again.recording.call, self._recorded[again.recording.number]
        mapping = _Mapping()
        self._mappings.append((again, mapping))
        self._copied.add(again.call.path)
        for old, new in zip(recorded.entered, given, strict=True):
            mapping.add(old, new)
        if again.call.path != first.path:
            for name, value in parameters.items():
                if name.startswith(f"{first.path}."):
                    mapping.add(value, parameters[again.call.path + name.removeprefix(first.path)])
        made = [self._again(node, again, mapping, stack) for node in recorded.nodes]
        self._note(made)
        return made, tuple(map(mapping, recorded.left))

    def _again(self, node: Node, again: Again, mapping: _Mapping, stack: tuple[Call, ...]) -> Node:
        name, names = self._names(node.op, len(node.outputs))
        outputs = tuple(
            None if value is None else dataclasses.replace(value, name=new)
            for value, new in zip(node.outputs, names, strict=True)
        )
        args, kwargs = substitute(node.args, mapping), {k: substitute(v, mapping) for k, v in node.kwargs.items()}
        mapping.values.update((o, n) for o, n in zip(node.outputs, outputs, strict=True) if o is not None and n)
        below = tuple(c for c in node.stack if c.path.startswith(f"{again.recording.call.path}."))
        renamed = tuple(dataclasses.replace(c, path=_moved(c.path, again)) for c in below)
        return Node(name, node.op, args, kwargs, outputs, (*stack, *renamed), node.source)

    def modules(self, modules: Mapping[str, ModuleInfo]) -> dict[str, ModuleInfo]:
        """What the modules took and returned, with the calls in copies."""
        if self._copied & self._strays:
            raise RepeatError  # the calls would have other numbers
        result = dict(modules)
        for again, mapping in self._mappings:
            for path in modules:
                if path.startswith(f"{again.recording.call.path}."):
                    self._add_calls(result, path, again, mapping)
        return result

    def _add_calls(self, result: dict[str, ModuleInfo], path: str, again: Again, mapping: _Mapping) -> None:
        first, known = again.recording.call, result[path]
        if (first.path, path) not in self._counts:  # how often one call of the recorded module calls this one
            self._counts[first.path, path], rest = divmod(len(known.returned), self._repeats.traced[first.path])
            if rest:
                raise RepeatError
        count = self._counts[first.path, path]
        to = _moved(path, again)
        for index in range(first.index * count, (first.index + 1) * count):
            info, copy = result[to], index + (again.call.index - first.index) * count
            returned = {**info.returned, copy: tuple(map(mapping, known.returned[index]))}
            arguments = {k: mapping(v) for k, v in known.arguments.get(index, {}).items()}
            result[to] = dataclasses.replace(info, returned=returned, arguments={**info.arguments, copy: arguments})


def _moved(path: str, again: Again) -> str:
    """The path in the copy that answers to ``path`` in the recording."""
    return again.call.path + path.removeprefix(again.recording.call.path)
