"""A rule to start from, for an op that has none: its dims as letters, by the sizes that they share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from placement.graph._torch import overload_name, schema_name
from placement.graph.factors import Dims
from placement.graph.ir import Graph, Node, Size, Value, op_name
from placement.lang.diagnostics import Diagnostic

_LETTERS = "hkmnpquvwxyzacdefgijlort"


def without_rules(graph: Graph, dims: Dims) -> tuple[Diagnostic, ...]:
    """A note for every op that has no rule and so runs replicated: its line in the model, and a rule to start from."""
    found: dict[object, list[Node]] = {}
    for node in graph.nodes:
        if node.operands and dims.signature(node) is None:
            found.setdefault(node.op, []).append(node)
    return tuple(_note(nodes) for nodes in found.values())


def _note(nodes: list[Node]) -> Diagnostic:
    first = nodes[0]
    times = f", {len(nodes)} times" if len(nodes) > 1 else ""
    where = f"in '{first.module}'" if first.module else "in the model"
    text = f"'{op_name(first.op)}' {where} has no rule{times}: it runs replicated"
    return Diagnostic("PLC402", text, None, start(first), notes(first), first.source or None, "note")


def notes(node: Node) -> tuple[str, ...]:
    """The op as it was captured: what its arguments really are."""
    return (f"captured as {node!r}",)


def start(node: Node) -> str:
    """How to give the op a rule: one that nothing contradicts yet, and what to change where more is true of it."""
    letters = _Letters()
    operands = [letters.of(value) for value in node.operands]
    results = [letters.of(value) for value in node.results]
    signature = f"{', '.join(map(' '.join, operands))} -> {', '.join(map(' '.join, results))}"
    inside = {letter for dims in operands for letter in dims}
    outside = {letter for dims in results for letter in dims}
    free = inside & outside & letters.dynamic  # batch and sequence: the likeliest to run element by element
    whole = [letter for letter in letters.order if letter not in free]
    blocked = f', blocked="{" ".join(whole)}"' if whole else ""
    namespace, name = schema_name(node.op)
    overload = overload_name(node.op)
    op = f"torch.ops.{namespace}.{name}" + (f".{overload}" if overload != "default" else "")
    call = f'placement.rule({op},\n    "{signature}"{blocked})'
    more = "take a letter out of blocked where its elements do not meet; placement.rules.proof.prove tests it"
    return f"start from\n{call}\n{more}" if whole else f"start from\n{call}"


class _Letters:
    """One letter for dims of one size, as far as one tensor does not have the size twice."""

    def __init__(self) -> None:
        self.known: dict[tuple[Size, int], str] = {}
        self.order: list[str] = []
        self.dynamic: set[str] = set()

    def of(self, value: Value) -> list[str]:
        seen: Counter[Size] = Counter()
        result: list[str] = []
        for size in value.shape:
            if size == 1:
                result.append("1")
                continue
            key = size, seen[size]
            seen[size] += 1
            if key not in self.known:
                self.known[key] = next(self._free(size))
                self.order.append(self.known[key])
                if not isinstance(size, int):
                    self.dynamic.add(self.known[key])
            result.append(self.known[key])
        return result

    def _free(self, size: Size) -> Iterator[str]:
        own = str(size)[:1].lower() if not isinstance(size, int) else ""
        candidates: Iterable[str] = [*([own] if own.isalpha() else []), *_LETTERS, *(f"d{i}" for i in range(64))]
        return (letter for letter in candidates if letter not in self.order)
