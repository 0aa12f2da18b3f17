"""A step of training as the cost model sees it: every op and every collective, one after another.

Nothing overlaps, since the predicted time is a sum; the durations add up to it exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from placement.report.data import FORMAT_VERSION
from placement.report.facts import Converted, Facts, facts
from placement.report.fold import AGAIN, arrow, layer_of, patterns
from placement.report.names import Names, common, relative
from placement.report.page import Page
from placement.report.units import plural, show_time
from placement.types import Action

if TYPE_CHECKING:
    from placement.graph.ir import Node
    from placement.solver.plan import Plan

COMPUTE, COMMUNICATION = "compute", "communication"
FORWARD, BACKWARD = "forward", "backward"
ZEROS = "zeros"  # what only writes zeros: it has a price, and sends nothing
GRADIENTS = "(gradients)"  # the module of their flat reduction, which is none of the model's

_Place = tuple[int, int, int]  # of the op in the program; before, at or after it; among several there


@dataclass(frozen=True, slots=True)
class Event:
    """One piece of work of one rank. start, duration: picoseconds.

    name: the op or the value. module: whose business it is, '' is the model itself. track: ``compute`` or
    ``communication``. what: an arrow of placements, an implementation or ''. action, axis: '' for compute.
    nbytes: of the whole value communicated.
    """

    name: str
    module: str
    phase: str
    track: str
    what: str
    action: str
    axis: str
    nbytes: int
    duration: int
    start: int = 0


@dataclass(frozen=True, slots=True)
class Timeline:
    """The events of a step in order, each starting where the one before it ends."""

    facts: Facts
    events: tuple[Event, ...]

    @property
    def duration(self) -> int:
        """Picoseconds of the step."""
        return sum(event.duration for event in self.events)


def timeline(plan: Plan) -> Timeline:
    """The step of ``plan``: forward in program order, backward in the opposite one, then the sums of gradients.

    What takes no time has no event, and neither has what the prices count as hidden: a layer's input, gathered again
    while its gradient is computed.
    """
    names, found = Names(plan), facts(plan)
    placed = [*_ops(plan, names), *_conversions(found)]
    events: list[Event] = []
    for phase in (FORWARD, BACKWARD):
        here = [(place, event) for place, event in placed if event.phase == phase]
        here.sort(key=lambda item: item[0], reverse=phase == BACKWARD)
        events += [event for _, event in here]
    events += _gradients(found)
    started: list[Event] = []
    now = 0
    for event in events:
        if event.duration:
            started.append(replace(event, start=now))
            now += event.duration
    return Timeline(found, tuple(started))


def _ops(plan: Plan, names: Names) -> Iterator[tuple[_Place, Event]]:
    """Each op's work, and after it, in the backward before it, what it sends by itself."""
    for node in plan.graph.nodes:
        place, module = names.order[node], common([node.stack])
        for phase, duration in zip((FORWARD, BACKWARD), plan.work[node], strict=True):
            work = Event(names.user(node), module, phase, COMPUTE, "", "", "", 0, duration)
            yield (place, 1, 0), work
        yield from _inside(plan, node, names.user(node), module, place)


def _inside(plan: Plan, node: Node, name: str, module: str, place: int) -> Iterator[tuple[_Place, Event]]:
    strategy = plan.strategies[node]
    for index, sent in enumerate(plan.inside.get(node, ())):
        action, phase = sent.collective.action, sent.collective.phase
        order = index if phase == FORWARD else -index  # backward they run as they are listed, too
        what = f"by {strategy.parts[sent.axes[0]].implementation}"
        sender = plan.mesh.name(sent.axes), sent.nbytes, sent.time
        event = Event(name, module, phase, COMMUNICATION, what, action.value, *sender)
        yield (place, 2, order), event


def _conversions(found: Facts) -> Iterator[tuple[_Place, Event]]:
    """Each where it is done; what is gathered again, right before the op that needs it in the backward."""
    for index, made in enumerate(found.conversions):
        place, side = made.position
        once = made.times[0] if made.stored else 0  # a layer's input is gathered again behind its own arithmetic
        again = once * made.again
        durations = made.times[0], made.times[1] - again
        for phase, action, duration in zip((FORWARD, BACKWARD), (made.forward, made.backward), durations, strict=True):
            yield (place, 3 * side, index), _converted(made, phase, action, duration)
        for op in made.kept_by:
            yield (op, 2, 1 + index), _converted(made, BACKWARD, made.forward, once, AGAIN)


def _converted(made: Converted, phase: str, action: str, duration: int, what: str = "") -> Event:
    what = what or arrow(made)
    named = ZEROS if Action(action) is Action.NONE else action
    nbytes = made.sent(action) if Action(action).communicates else 0
    return Event(made.value, made.place, phase, COMMUNICATION, what, named, made.axis, nbytes, duration)


def _gradients(found: Facts) -> Iterator[Event]:
    """The flat reductions, in order."""
    flat: dict[tuple[int, str, str], tuple[int, int, int]] = {}
    for hook in found.hooks:
        key = hook.bucket, hook.dtype.removeprefix("torch."), hook.axis
        count, nbytes, time = flat.get(key, (0, 0, 0))
        flat[key] = count + 1, nbytes + hook.nbytes, time + hook.time
    for (_, dtype, axis), (count, nbytes, time) in sorted(flat.items()):
        what, action = f"{plural(count, 'parameter')} of {dtype}", Action.ALL_REDUCE.value
        yield Event("gradients", GRADIENTS, BACKWARD, COMMUNICATION, what, action, axis, nbytes, time)


# -- JSON ---------------------------------------------------------------------------------------------


def timeline_data(plan: Plan) -> dict[str, Any]:
    """The events as plain dicts; times are picoseconds, sizes bytes."""
    made = timeline(plan)
    sums = {track: sum(e.duration for e in made.events if e.track == track) for track in (COMPUTE, COMMUNICATION)}
    return {
        "format_version": FORMAT_VERSION,
        "mesh": dict(made.facts.mesh),
        "timeline": {"time": sums, "events": [_event(event) for event in made.events]},
    }


def _event(event: Event) -> dict[str, Any]:
    sent = {"action": event.action, "axis": event.axis, "bytes": event.nbytes, "what": event.what}
    return {
        "name": event.name,
        "module": event.module,
        "phase": event.phase,
        "track": event.track,
        "start": event.start,
        "duration": event.duration,
        **(sent if event.track == COMMUNICATION else {}),
    }


# -- text ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Sum:
    """What the events of one row take. forward, backward: picoseconds; sent: of these, communication."""

    forward: int = 0
    backward: int = 0
    sent: int = 0

    def add(self, event: Event) -> None:
        if event.phase == FORWARD:
            self.forward += event.duration
        else:
            self.backward += event.duration
        self.sent += event.duration * (event.track == COMMUNICATION)

    @property
    def whole(self) -> int:
        return self.forward + self.backward


@dataclass(frozen=True, slots=True)
class Row:
    """Modules that take alike. title: their pattern; count: how many; parts: by child, for a layer."""

    title: str
    count: int
    total: _Sum
    parts: Mapping[str, _Sum]


def timeline_rows(made: Timeline) -> tuple[Row, ...]:
    """The events summed by module, in program order; layers that take alike are one row, with the sum of them all."""
    layers: dict[str, dict[str, _Sum]] = {}
    for event in made.events:
        layer = layer_of(event.module)
        home = event.module if layer is None else layer
        part = relative(event.module, home).split(".")[0]
        layers.setdefault(home, {}).setdefault(part, _Sum()).add(event)
    alike: dict[object, list[str]] = {}
    for home, parts in layers.items():
        times = tuple((name, part.forward, part.backward, part.sent) for name, part in parts.items())
        key = (home.rpartition(".")[0], times) if layer_of(home) else home
        alike.setdefault(key, []).append(home)
    return tuple(_row(homes, layers) for homes in alike.values())


def _row(homes: Sequence[str], layers: Mapping[str, Mapping[str, _Sum]]) -> Row:
    parts: dict[str, _Sum] = {}
    total = _Sum()
    for home in homes:
        for name, part in layers[home].items():
            for whole in (total, parts.setdefault(name, _Sum())):
                whole.forward += part.forward
                whole.backward += part.backward
                whole.sent += part.sent
    (title,) = patterns(homes)
    return Row(title, len(homes), total, parts if layer_of(homes[0]) else {})


def timeline_text(plan: Plan, width: int = 80, *, color: bool = False) -> str:
    """How long each module takes forward and backward, as text; every line at most ``width`` characters."""
    return _Page(timeline(plan), width, color=color).text()


class _Page(Page):
    _TIME, _SHARE = 8, 7

    def __init__(self, made: Timeline, width: int, *, color: bool) -> None:
        super().__init__(width, color=color)
        self.made = made
        self.bar = min(self.width // 4, 30)
        self.name = self.width - 2 * (self._TIME + 2) - (self._SHARE + 2) - self.bar - 2
        self.rows = timeline_rows(made)
        self.longest = max((row.total.whole for row in self.rows), default=0)

    def text(self) -> str:
        found = self.made.facts
        lines = [*self.heading(found), "", self.paint(self.columns("", "forward", "backward", "share", ""), "dim")]
        for row in self.rows:
            title = row.title or "(the model itself)"
            lines += self.line(f"{title} x {row.count}" if row.count > 1 else title, row.total)
            for name, part in row.parts.items():
                lines += self.line(f"  {name or '(itself)'}", part)
        lines += ["", *self.totals(), self.paint("# compute  = communication", "dim")]
        return "\n".join(lines) + "\n"

    def totals(self) -> Iterator[str]:
        whole = _Sum()
        for event in self.made.events:
            whole.add(event)
        yield from self.line("One step", whole, bars=False)
        compute, sent = show_time(whole.whole - whole.sent), show_time(whole.sent)
        line = f"{show_time(whole.whole)}: {compute} compute + {sent} communication, predicted, one after another"
        yield from self.fill("", line, 0)

    def line(self, name: str, sums: _Sum, *, bars: bool = True) -> Iterator[str]:
        """A row; a name that is too long has a line of its own."""
        if len(name) > self.name:
            yield self.shorten(name)
            name = ""
        share = f"{100 * sums.whole / max(self.made.duration, 1):.1f} %"
        drawn = self.drawn(sums) if bars else ""
        yield self.columns(name, show_time(sums.forward), show_time(sums.backward), share, drawn)

    def columns(self, name: str, forward: str, backward: str, share: str, drawn: str) -> str:
        sides = f"  {forward:>{self._TIME}}  {backward:>{self._TIME}}  {share:>{self._SHARE}}  {drawn}"
        return (f"{name:<{self.name}}" + sides).rstrip()

    def drawn(self, sums: _Sum) -> str:
        """A bar in proportion to the longest row's."""
        whole = round(self.bar * sums.whole / max(self.longest, 1))
        sent = round(whole * sums.sent / max(sums.whole, 1))
        return "#" * (whole - sent) + "=" * sent
