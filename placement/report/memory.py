"""What a step holds in memory, as JSON and as text: by kind, by module, and the largest storages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from placement.report.facts import Facts, facts
from placement.report.fold import patterns
from placement.report.names import Names, operation
from placement.report.page import Page
from placement.report.units import plural, show_bytes

if TYPE_CHECKING:
    from placement.solver.memory import Memory, Saved, Usage
    from placement.solver.plan import Plan

_KINDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "AdamW's two moments",
    "saved_bytes": "kept for backward",
    "peak": "all of it, the peak",
}
_MODULES, _STORAGES = 16, 12  # rows of the text
_COLUMN = 10


@dataclass(frozen=True, slots=True)
class InModule:
    """What the ops of one module keep for the backward, in bytes; '' is the model itself."""

    module: str
    rank: int
    one_device: int


def by_module(memory: Memory) -> tuple[InModule, ...]:
    """The modules whose ops keep anything, in program order. A storage belongs to the op that keeps it first."""
    rank, one = _sums(memory.rank.saved), _sums(memory.one_device.saved)
    return tuple(InModule(module, rank.get(module, 0), one.get(module, 0)) for module in dict.fromkeys([*rank, *one]))


def _sums(saved: Iterable[Saved]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for item in saved:
        sums[item.node.module] = sums.get(item.node.module, 0) + item.nbytes
    return sums


def memory_data(memory: Memory) -> dict[str, Any]:
    """The key ``memory`` of an explanation. Plain numbers are bytes on one rank."""
    modules = [
        {"module": m.module, "saved_for_backward": m.rank, "one_device": m.one_device} for m in by_module(memory)
    ]
    return {**_usage(memory.rank), "one_device": _usage(memory.one_device), "modules": modules}


def _usage(found: Usage) -> dict[str, int]:
    return {
        "params": found.parameters,
        "gradients": found.gradients,
        "optimizer": found.optimizer,
        "saved_for_backward": found.saved_bytes,
        "peak": found.peak,
    }


def memory_text(plan: Plan, width: int = 80, *, color: bool = False) -> str:
    """The memory for people, every line at most ``width`` characters (60 at least)."""
    return _MemoryPage(plan, facts(plan), width, color=color).text()


class _MemoryPage(Page):
    def __init__(self, plan: Plan, found: Facts, width: int, *, color: bool) -> None:
        super().__init__(width, color=color)
        self.facts, self.names = found, Names(plan)

    def text(self) -> str:
        sections = [self.heading(self.facts), self.kinds(), self.modules(), self.storages()]
        return "\n\n".join("\n".join(lines) for lines in sections) + "\n"

    def kinds(self) -> Iterator[str]:
        memory = self.facts.memory
        yield from self.row("Bytes held", "one rank", "one device", style="bold")
        for name, label in _KINDS.items():
            yield from self.sizes(f"  {label}", getattr(memory.rank, name), getattr(memory.one_device, name))

    def modules(self) -> Iterator[str]:
        """Modules that keep alike amounts are one row, for one of them; the largest in all come first."""
        groups: dict[tuple[int, int], list[str]] = {}
        for found in by_module(self.facts.memory):
            groups.setdefault((found.rank, found.one_device), []).append(found.module)
        rows = [
            (pattern, len(names), sizes)
            for sizes, names in groups.items()
            for pattern, names in self.folded(names).items()
        ]
        rows.sort(key=lambda row: (-row[2][0] * row[1], -row[2][1] * row[1], row[0]))
        yield from self.row("Kept for backward, by module", "one rank", "one device", style="bold")
        for pattern, count, sizes in rows[:_MODULES]:
            times = f" ({count} alike, each)" if count > 1 else ""
            yield from self.sizes(f"  {pattern or '(the model itself)'}{times}", *sizes)
        yield from self.rest(len(rows) - _MODULES, sum(sizes[0] * n for _, n, sizes in rows[_MODULES:]), "row")

    def folded(self, names: list[str]) -> dict[str, list[str]]:
        """Patterns, each with the names that it stands for."""
        groups: dict[str, list[str]] = {}
        for name in names:
            shape = ".".join("*" if part.isdigit() else part for part in name.split("."))
            groups.setdefault(shape, []).append(name)
        return {patterns(members)[0]: members for members in groups.values()}

    def storages(self) -> Iterator[str]:
        groups: dict[tuple[str, int], int] = {}
        for item in self.facts.memory.rank.saved:
            key = self.storage(item), item.nbytes
            groups[key] = groups.get(key, 0) + 1
        rows = sorted(groups.items(), key=lambda row: (-row[0][1] * row[1], row[0]))
        yield from self.row("Largest on one rank", "count", "bytes each", style="bold")
        for (name, size), count in rows[:_STORAGES]:
            yield from self.row(f"  {name}", str(count), show_bytes(size))
        yield from self.rest(len(rows) - _STORAGES, sum(n * size for (_, size), n in rows[_STORAGES:]), "row")

    def storage(self, item: Saved) -> str:
        """The value, or what the op made for itself; numbers of layers are left out."""
        name = self.names.value(item.value)
        text = f"{name} for {operation(item.node)}" if not item.own else f"made by {operation(item.node)} of {name}"
        return ".".join("*" if part.isdigit() else part for part in text.split("."))

    # -- lines ----------------------------------------------------------------------------------

    def sizes(self, left: str, rank: int, one: int) -> Iterator[str]:
        yield from self.row(left, show_bytes(rank), show_bytes(one))

    def row(self, left: str, first: str, second: str, style: str = "") -> Iterator[str]:
        """A name and two numbers in columns; of a long name the end."""
        room = self.width - 2 * (_COLUMN + 2)
        if len(left) > room:
            body = left.lstrip()
            left = f"  ...{body[len(body) - room + 5 :]}"
        yield self.paint(f"{left:<{room}}  {first:>{_COLUMN}}  {second:>{_COLUMN}}", style)

    def rest(self, count: int, nbytes: int, noun: str) -> Iterator[str]:
        if count > 0:
            yield self.paint(f"  {plural(count, noun)} more, {show_bytes(nbytes)} in all", "dim")
