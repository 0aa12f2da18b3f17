"""The answer to "why" as JSON and as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from placement.report.data import FORMAT_VERSION, summed
from placement.report.facts import Converted, Hooked
from placement.report.fold import AGAIN, arrow, causes, patterns
from placement.report.page import Page
from placement.report.units import show_bytes, show_time, signed
from placement.report.why import Alternative, Found, Neighbour, Why


def why_data(answer: Why) -> dict[str, Any]:
    """The answer as plain dicts, lists, strings and ints."""
    found = [_found(each) for each in answer.found]
    return {
        "format_version": FORMAT_VERSION,
        "mesh": dict(answer.facts.mesh),
        "why": {"asked": answer.asked, "time": answer.facts.cost, "found": found},
    }


def _found(found: Found) -> dict[str, Any]:
    statement = found.statement and {"cause": found.statement[0], "text": found.statement[1]}
    alternatives = found.alternatives
    return {
        "kind": found.kind,
        "names": list(found.names),
        "placement": dict(found.placement),
        "type": found.type,
        "made": found.made or None,
        "statement": statement,
        "rule": None if statement else found.rule,
        "follows": list(found.follows),
        "producer": found.producer and _neighbour(found.producer),
        "consumers": [_neighbour(user) for user in found.consumers],
        "conversions": [_conversion(made) for made in found.conversions],
        "hook": found.hook and _hook(found.hook),
        "alternatives": None if alternatives is None else [_alternative(other) for other in alternatives],
    }


def _hook(hook: Hooked) -> dict[str, Any]:
    return {"axes": list(hook.axes), "bytes": hook.nbytes, "meets": list(hook.meets)}


def _neighbour(near_by: Neighbour) -> dict[str, Any]:
    return {"name": near_by.name, "placement": near_by.placement, "type": near_by.type}


def _conversion(made: Converted) -> dict[str, Any]:
    return {
        "axis": made.axis,
        "from": made.source,
        "to": made.target,
        "forward": made.forward,
        "backward": made.backward,
        "bytes": made.nbytes,
        "again": made.again,
        "time": sum(made.times),
        "users": list(made.users),
        "cause": list(made.cause),
    } | summed(made)


def _alternative(other: Alternative) -> dict[str, Any]:
    named: dict[str, Any] = {"axis": other.axis, "placement": other.placement, "type": other.type.value}
    if other.obstacle:
        return {**named, "possible": False, "obstacle": other.obstacle}
    return {
        **named,
        "possible": True,
        "made": other.made or None,
        "time": other.time,
        "communication": other.communication,
        "compute": other.compute,
        "bytes": other.sent,
        "saved_for_backward": other.kept,
        "launches": other.launches,
        "proven": other.proven,
    }


# -- text ---------------------------------------------------------------------------------------------


def why_text(answer: Why, width: int = 80, *, color: bool = False) -> str:
    """The answer for people, every line at most ``width`` characters (60 at least)."""
    return _Page(answer, width, color=color).text()


class _Page(Page):
    _LABEL = 12
    _COLUMNS = (9, 8, 10, 10, 8)  # time, share of the step, bytes sent, bytes kept, launches

    def __init__(self, answer: Why, width: int, *, color: bool) -> None:
        super().__init__(width, color=color)
        self.answer = answer

    def text(self) -> str:
        lines = list(self.heading(self.answer.facts))
        hooks = [found.hook.axis for found in self.answer.found if found.hook]
        lines += self.groups(self.answer.facts, [*hooks, *(c.axis for f in self.answer.found for c in f.conversions)])
        for found in self.answer.found:
            lines += ["", *self.found(found)]
        return "\n".join(lines) + "\n"

    def found(self, found: Found) -> Iterator[str]:
        (title, *others) = patterns(found.names)
        alike = len(found.names)
        kind = f"{found.kind}, {alike} alike, the first:" if alike > 1 else found.kind
        yield from self.sides(title, kind, "bold", "dim")
        yield from (self.paint(self.shorten(other), "bold") for other in others)
        placed = ", ".join(f"{placement} @ {axis}" for axis, placement in found.placement.items())
        made = f", converted at once from {found.made}" if found.made else ""
        yield from self.labelled("placement", placed + made)
        yield from self.because(found)
        if found.producer is not None:
            yield from self.neighbours("made by", [found.producer])
        yield from self.neighbours("used by", list(found.consumers))
        for made in found.conversions:
            yield from self.conversion(made)
        if found.hook is not None:
            met = f", as it meets {', '.join(found.hook.meets)}" if found.hook.meets else ""
            yield from self.labelled("gradient", f"summed over {found.hook.axis} after backward{met}")
        yield from self.alternatives(found)

    def because(self, found: Found) -> Iterator[str]:
        if found.statement is not None:
            cause, text = found.statement
            yield from self.labelled("because", f"{cause} places it")
            if text:
                yield self.shorten(f"{'':<{self._LABEL + 4}}{text}")
            return
        yield from self.labelled("because", found.rule)
        if found.follows:
            yield from self.labelled("", f"nearest statements: {causes(found.follows)}")

    def neighbours(self, label: str, found: list[Neighbour]) -> Iterator[str]:
        """Those in one placement folded into patterns."""
        by_placement: dict[str, list[str]] = {}
        for each in found:
            by_placement.setdefault(each.placement, []).append(each.name)
        for placement, names in by_placement.items():
            plain = [name for name in names if " " not in name]
            outputs = [name for name in names if " " in name]
            room = self.width - self._LABEL - 4
            limit = room - len(placement) if len(placement) < room // 2 else room  # else each on a line of its own
            for pattern in (*patterns(plain, limit), *outputs):
                yield from self.sides(f"  {label:<{self._LABEL}}{pattern}", placement)
                label = ""

    def conversion(self, made: Converted) -> Iterator[str]:
        both = " | ".join("-" if action == "none" else action for action in (made.forward, made.backward))
        what = f"{arrow(made)} @ {made.axis}"
        sizes = dict.fromkeys(nbytes for _, _, nbytes in made.launches) or [made.nbytes]
        sent = " | ".join(map(show_bytes, sizes))
        yield from self.sides(f"  {'converted':<{self._LABEL}}{what}", f"{both}  {sent}")
        if made.again:
            again = f"- | {made.again if made.again > 1 else ''} {made.forward}".replace("  ", " ")
            size = show_bytes(made.again * made.nbytes)
            yield from self.sides(f"  {'':<{self._LABEL}}{AGAIN} @ {made.axis}", f"{again}  {size}")

    def labelled(self, label: str, text: str) -> Iterator[str]:
        yield from self.fill(f"  {label}", text, self._LABEL + 2)

    # -- alternatives ---------------------------------------------------------------------------

    def alternatives(self, found: Found) -> Iterator[str]:
        others = found.alternatives
        if others is None:
            yield from self.labelled("", "its alternatives are not priced: name fewer values")
            return
        if not others:
            yield from self.labelled("", "there is no other placement that it could have")
            return
        what = {1: "  if it were", 2: "  if both were"}.get(len(found.names), f"  if all {len(found.names)} were")
        yield from self.row(what, ("time", "of step", "sent", "kept", "launches"), "dim")
        for other in others:
            yield from self.alternative(other)
        notes = list(self.footnotes(found, others))
        yield from (self.paint(line, "dim") for note in notes for line in self.fill("", note, 4))

    def alternative(self, other: Alternative) -> Iterator[str]:
        name = f"    {other.placement} @ {other.axis}{' *' if other.made else ''}"
        if other.obstacle:
            yield self.shorten(name)
            yield from self.fill("", f"impossible: {other.obstacle}", 6)
            return
        share = f"{100 * other.time / max(self.answer.facts.cost, 1):+.1f} %" if other.time else "0"
        sizes = signed(other.sent, show_bytes), signed(other.kept, show_bytes)
        numbers = (signed(other.time, show_time), share, *sizes, signed(other.launches, str))
        yield from self.row(name, numbers)

    def row(self, name: str, columns: tuple[str, ...], style: str = "") -> Iterator[str]:
        """A name and what belongs to it at the right margin; a name that is too long has a line of its own."""
        numbers = "".join(f" {text:>{size}}" for text, size in zip(columns, self._COLUMNS, strict=True))
        if len(name) + len(numbers) > self.width:
            yield self.paint(self.shorten(name), style)
            name = ""
        yield self.paint(f"{name:<{self.width - len(numbers)}}{numbers}", style)

    def footnotes(self, found: Found, others: tuple[Alternative, ...]) -> Iterator[str]:
        if any(other.made for other in others):
            yield "* the op gives it otherwise; it is converted at once"
        words = {other.placement for other in others} | set(found.placement.values())
        if {"Invariant", "Replicate"} <= words:
            yield "Invariant is what a 'value' line calls Replicate; the gradient of the other is a sum over ranks"
        if not all(other.proven for other in others):
            yield "not every plan is proven to be the best: differences are of the plans found"
