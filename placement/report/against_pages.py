"""What changes from one plan to another, as a diff that a person reads: per module, alike layers once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from placement.report.against import ADDED, MOVED, REMOVED, RESIZED, Against, Change, Pair, Sent
from placement.report.fold import INPUT, OUTPUT, layer_of, order, patterns, seen_from
from placement.report.names import relative, shared, within
from placement.report.page import Page
from placement.report.units import show_bytes, show_time, signed

_SIGNS = {ADDED: "+", REMOVED: "-", MOVED: ">", RESIZED: "~"}
_LEGEND = {
    ADDED: "+ only now",
    REMOVED: "- no longer",
    MOVED: "> in another module",
    RESIZED: "~ of another size",
}
_NUMBERS = {
    "communication": "communication",
    "compute": "compute",
    "params": "parameters",
    "saved_for_backward": "kept for backward",
}
_ABSENT = "absent"
_MANY = 6  # lines of one change of placement, above which names are joined though the change has a line of its own then

_Line = tuple[str, str, str]  # sign, what, and what it does


def against_text(found: Against, width: int = 80, *, color: bool = False) -> str:
    """The changes for people, every line at most ``width`` characters (60 at least)."""
    return _Page(found, width, color=color).text()


class _Page(Page):
    _COLUMN, _LABEL = 15, 12

    def __init__(self, found: Against, width: int, *, color: bool) -> None:
        super().__init__(width, color=color)
        self.found = found

    def text(self) -> str:
        sections: list[Iterable[str]] = [self.header()]
        if not self.found.nothing:
            sections += [*self.blocks(), self.hooks(), self.placements("Parameters", self.found.params)]
            sections += [self.placements("Values", self.found.values), self.totals(), self.numbers()]
        sections.append(self.verdict())
        shown = ["\n".join(lines) for lines in map(list, sections) if lines]
        return "\n\n".join(shown) + "\n"

    # -- sections -------------------------------------------------------------------------------

    def header(self) -> Iterator[str]:
        meshes = [", ".join(f"{axis} = {n}" for axis, n in mesh.items()) for mesh in self.found.mesh]
        mesh = meshes[0] if meshes[0] == meshes[1] else " -> ".join(meshes)
        yield from self.sides(f"from {self.found.before} to {self.found.after}", f"mesh {mesh}", "bold")
        kinds = [kind for kind in _LEGEND if any(change.kind == kind for change in self.found.changes)]
        if kinds:
            yield self.paint("  ".join(_LEGEND[kind] for kind in kinds), "dim")

    def blocks(self) -> Iterator[Iterable[str]]:
        """A section per module or per set of layers in which the same changes."""
        homes: dict[str, list[Change]] = {}
        for change in _by_value(self.found.changes):
            homes.setdefault(_home(change.sent), []).append(change)
        alike: dict[object, list[str]] = {}
        for home, changes in homes.items():
            lines = tuple(_line(change, home) for change in changes)
            alike.setdefault((home.rpartition(".")[0], lines) if layer_of(home) else home, []).append(home)
        for members in alike.values():
            yield self.block(members, [_line(change, members[0]) for change in homes[members[0]]])

    def block(self, members: list[str], lines: list[_Line]) -> Iterator[str]:
        (title,) = patterns(members)
        count = f"{len(members)} alike, each:" if len(members) > 1 else ""
        yield from self.sides(title or "(the model itself)", count, "bold", "dim")
        for sign, what, does in lines:
            yield from self.sides(f"  {sign} {what}", does, right_style="action")

    def hooks(self) -> Iterator[str]:
        found = self.found
        if not found.hooks_added and not found.hooks_removed:
            return
        yield self.paint("Gradients summed after backward", "bold")
        for sign, names in (("-", found.hooks_removed), ("+", found.hooks_added)):
            for axis in dict.fromkeys(axis for _, axis in names):
                over = f"over {axis}" if len(self.found.mesh[1]) > 1 else ""
                here = [name for name, own in names if own == axis]
                for pattern in patterns(here, self.width - len(over) - 6):
                    yield from self.sides(f"  {sign} {pattern}", over, right_style="dim")

    def placements(self, title: str, changed: Mapping[str, Mapping[str, Pair]]) -> Iterator[str]:
        if not changed:
            return
        yield self.paint(f"{title} placed otherwise", "bold")
        groups: dict[str, list[str]] = {}
        for name, axes in changed.items():
            for axis, (was, now) in axes.items():
                groups.setdefault(f"{was or _ABSENT} -> {now or _ABSENT} @ {axis}", []).append(name)
        for arrow, names in groups.items():
            beside = patterns(names, self.width - len(arrow) - 4)
            for pattern in beside if len(beside) <= _MANY else patterns(names, self.width - 2):
                yield from self.sides(f"  {pattern}", arrow)

    def totals(self) -> Iterator[str]:
        yield from self.columns("One step", "before", "after", "difference", style="bold")
        for axis, phases in self.found.totals.items():
            for phase, actions in phases.items():
                label = f"{axis} {phase}"
                for action in sorted(actions, key=order):
                    (count, nbytes), (count_now, nbytes_now) = actions[action]
                    more = _launched(count_now - count, nbytes_now - nbytes, difference=True)
                    sides = _launched(count, nbytes), _launched(count_now, nbytes_now)
                    if len(label) > self._LABEL:
                        yield f"  {label}"
                        label = ""
                    yield from self.columns(f"  {label:<{self._LABEL + 1}}{action}", *sides, more)
                    label = ""

    def numbers(self) -> Iterator[str]:
        yield from self.columns("Predicted", "before", "after", "difference", style="bold")
        for pairs, show in ((self.found.time, show_time), (self.found.memory, show_bytes)):
            for key, pair in pairs.items():
                yield from self.number(_NUMBERS.get(key, key.replace("_", " ")), pair, show)
        yield from self.number("one step", self.found.cost, show_time)

    def number(self, label: str, pair: tuple[int, int], show: Callable[[int], str]) -> Iterator[str]:
        yield from self.columns(f"  {label}", show(pair[0]), show(pair[1]), signed(pair[1] - pair[0], show))

    def verdict(self) -> Iterator[str]:
        found = self.found
        was, now = found.cost
        if found.nothing:
            yield f"nothing changes: {show_time(now)} a step"
        elif was == now:
            yield f"a step takes as long as before, {show_time(now)}"
        else:
            share = f" ({100 * abs(now - was) / was:.1f} %)" if was else ""
            word = "less" if now < was else "more"
            line = f"a step of {found.after} takes {show_time(abs(now - was))}{share} {word} than one of {found.before}"
            yield from self.fill("", line, 0)

    def columns(self, label: str, *numbers: str, style: str = "") -> Iterator[str]:
        """A label and what belongs to it at the right margin; a label that is too long has a line of its own."""
        sides = "".join(f" {number:>{self._COLUMN}}" for number in numbers)
        if len(label) + len(sides) > self.width:
            yield self.paint(label, style)
            label = ""
        yield self.paint(f"{label:<{self.width - len(sides)}}{sides}", style)


def _by_value(changes: Sequence[Change]) -> list[Change]:
    """What is no longer done with a value right before what is done with it now."""
    first: dict[str, int] = {}
    for index, change in enumerate(changes):
        first.setdefault(change.sent.value, index)
    return sorted(changes, key=lambda change: first[change.sent.value])


def _home(sent: Sent) -> str:
    """The layer that a change is told under, else its module; leaving a partial sum belongs to both of its ends."""
    module = sent.module
    if sent.what.startswith("Partial ->"):
        module = ".".join(shared([sent.value.split("."), module.split(".")]))
    layer = layer_of(sent.value)
    return layer_of(module) or (layer if layer is not None and within(layer, module) else module)


def _line(change: Change, home: str) -> _Line:
    sent, before = change.sent, change.before
    name = _named(sent.value, home)
    size = show_bytes(sent.nbytes)
    if change.kind == RESIZED and before is not None:
        size = f"{show_bytes(before.nbytes)} -> {size}"
    if change.kind == MOVED and before is not None:
        name += f": {_named(before.module, home)} -> {_named(sent.module, home)}"
    both = " | ".join("-" if action == "none" else action for action in (sent.forward, sent.backward))
    does = f"{both}  {size}" if sent.communicates else both
    return _SIGNS[change.kind], f"{name}  {sent.what} @ {sent.axis}", does


def _named(path: str, home: str) -> str:
    """A path as its layer has it; what the layer before hands on is the input, as in an explanation."""
    layer = layer_of(home)
    if within(path, home):
        return relative(path, home) or (OUTPUT if layer else path or "(the model itself)")
    return INPUT if seen_from(layer, path).startswith("-1.") else path


def _launched(count: int, nbytes: int, *, difference: bool = False) -> str:
    """``9   1.1 MiB``, with signs for a difference; '' for none."""
    if difference:
        shown: tuple[Any, str] = signed(count, str), signed(nbytes, show_bytes)
        return f"{shown[0]} {shown[1]:>9}" if count or nbytes else "0"
    return f"{count} {show_bytes(nbytes):>9}" if count else "-"
