"""Why a value lies as it does: the statement that pins it, what it meets, and what every other placement would cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from placement.graph.ir import Node, Output, Value
from placement.lang.diagnostics import PlacementError
from placement.report.facts import Converted, Facts, Hooked, facts, files_of, told_causes
from placement.report.fold import layer_of, seen_from
from placement.report.names import Names
from placement.report.subjects import Subject, subjects
from placement.solver.bind import Bound, Pin, leading
from placement.solver.build import plan as solve
from placement.solver.causes import Causes
from placement.solver.plan import Plan
from placement.types import I, Joint, Kind, R, S, Type

if TYPE_CHECKING:
    from placement.lang.source import Span

MOST_SOLVES = 32
"""How many alternatives are priced for one question; each is a plan of its own."""

Say = Callable[[str], None]
_Choice = tuple[int, str, list[Type]]  # on an axis, a placement, and the type of each


@dataclass(frozen=True, slots=True)
class Neighbour:
    """An op (or output) and the placement that it gives the value or takes it in.

    ``type`` tells I from R; of several axes ``S, R``.
    """

    name: str
    placement: str
    type: str


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another placement of all that is asked about, on one axis, and how the best plan with it differs.

    obstacle: why there is no such plan; the differences are then 0. made: the placement in which the value is made
    and from which it is converted at once, '' where the op gives the alternative itself. time, communication,
    compute: picoseconds of a step. sent: bytes of whole values. kept: bytes for the backward on one rank. proven:
    whether both plans are proven to be the best.
    """

    axis: str
    placement: str
    type: Kind
    obstacle: str = ""
    made: str = ""
    time: int = 0
    communication: int = 0
    compute: int = 0
    sent: int = 0
    kept: int = 0
    launches: int = 0
    proven: bool = True


@dataclass(frozen=True, slots=True)
class Found:
    """One thing that is asked about, or several alike; what is told by name is told of the first.

    placement: by axis. made: where a ``value`` line has the value converted at once, the placement before that.
    statement: ``file:line`` and text of the statement that pins it, None where nothing does; rule is then what the
    language says of such. follows: the nearest statements around. alternatives: None where there would be too many.
    """

    kind: str
    names: tuple[str, ...]
    placement: Mapping[str, str]
    type: str
    made: str
    statement: tuple[str, str] | None
    rule: str
    follows: tuple[str, ...]
    producer: Neighbour | None
    consumers: tuple[Neighbour, ...]
    conversions: tuple[Converted, ...]
    hook: Hooked | None
    alternatives: tuple[Alternative, ...] | None


@dataclass(frozen=True, slots=True)
class Why:
    """The answer to one question."""

    asked: str
    facts: Facts
    found: tuple[Found, ...]


_RULES = {
    "parameter": "no line places it: it is used replicated",
    "buffer": "no line places it: every rank has all of it",
    "input": "no line places it: every rank is given all of it",
    "output": "no line places it: outputs are returned replicated",
    "value": "no line places it: it lies where the step costs least",
}
_FREE_OUTPUT = "left to the solver: it is returned where the step costs least"


def why(plan: Plan, asked: str, sources: Mapping[str, str] | None = None, say: Say | None = None) -> Why:
    """Everything there is to say of the values that ``asked`` names: a dotted name or a pattern.

    ``sources`` are the spec's texts by file: with them the statements are quoted. ``say`` is told what takes long.
    Raises UnknownNameError where nothing has such a name.
    """
    return _Answer(plan, sources or {}, say or (lambda _: None)).why(asked)


class _Answer:
    def __init__(self, plan: Plan, sources: Mapping[str, str], say: Say) -> None:
        self.plan, self.sources, self.say = plan, sources, say
        self.names = Names(plan)
        self.facts = facts(plan)
        self.files = files_of(plan)
        self.causes = Causes(plan.bound)
        self.placed = {s.value: s.target.type for s in plan.steps if s.source.stage == 0 and s.target.stage == 1}
        self.users: dict[Value, list[tuple[Node | Output, Joint]]] = {}
        for (user, _), version in plan.uses.items():
            self.users.setdefault(version.value, []).append((user, version.type))

    def why(self, asked: str) -> Why:
        groups: dict[object, list[tuple[Subject, Found]]] = {}
        for subject in subjects(self.plan, self.names, asked):
            found = self.found(subject)
            groups.setdefault(_likeness(found), []).append((subject, found))
        choices = [self.choices([subject for subject, _ in group]) for group in groups.values()]
        whole = sum(map(len, choices))
        pricing = _Pricing(self, min(whole, MOST_SOLVES))
        answers: list[Found] = []
        for group, offered in zip(groups.values(), choices, strict=True):
            first = group[0][1]
            names = tuple(subject.name for subject, _ in group)
            members = [subject for subject, _ in group]
            answers.append(dataclasses.replace(first, names=names, alternatives=pricing.price(members, offered)))
        return Why(asked, self.facts, tuple(answers))

    # -- as it is -------------------------------------------------------------------------------

    def found(self, subject: Subject) -> Found:
        value, pin = subject.value, self.pin(subject)
        kind = self.current(subject)
        made = self.plan.produced[value]
        converted_at_once = subject.kind == "value" and made != kind
        users = [] if subject.output else self.users.get(value, [])
        producer = self.names.producers.get(value)
        name = self.names.value(value)
        is_parameter = subject.kind == "parameter"
        return Found(
            kind=subject.kind,
            names=(subject.name,),
            placement=self.words(subject, kind),
            type=self.kinds(kind),
            made=self.said(subject, made) if converted_at_once else "",
            statement=self.statement(pin) if pin is not None and pin.span is not None else None,
            rule=_FREE_OUTPUT if subject.output and pin is None else _RULES[subject.kind],
            follows=told_causes(self.causes.around(value, [user for user, _ in users]), self.files),
            producer=None if producer is None else self.neighbour(subject, producer, made),
            consumers=tuple(dict.fromkeys(self.neighbour(subject, *user) for user in users)),
            conversions=tuple(c for c in self.facts.conversions if c.value == name),
            hook=next((h for h in self.facts.hooks if is_parameter and h.parameter == name), None),
            alternatives=None,
        )

    def pin(self, subject: Subject) -> Pin | None:
        bound = self.plan.bound
        if subject.output is not None:
            return bound.outputs[subject.output]
        return {**bound.inputs, **bound.parameters, **bound.values}.get(subject.value)

    def current(self, subject: Subject) -> Joint:
        if subject.output is not None:
            return self.plan.uses[subject.output, 0].type
        return self.placed.get(subject.value, self.plan.produced[subject.value])

    def statement(self, pin: Pin) -> tuple[str, str]:
        (cause,) = told_causes([pin.cause], self.files)
        return cause, "" if pin.span is None else _line(self.sources, pin.span)

    def neighbour(self, subject: Subject, user: Node | Output, kind: Joint) -> Neighbour:
        return Neighbour(self.names.user(user), self.said(subject, kind), self.kinds(kind))

    def words(self, subject: Subject, joint: Joint) -> dict[str, str]:
        """The placement by axis."""
        axes = self.plan.mesh.axes
        return {axis.name: self.word(subject, kind, i) for i, (axis, kind) in enumerate(zip(axes, joint, strict=True))}

    def said(self, subject: Subject, joint: Joint) -> str:
        """The placement on one axis, or ``Shard(batch) @ dp, Replicate @ tp``."""
        words = self.words(subject, joint)
        return next(iter(words.values())) if len(words) == 1 else ", ".join(f"{w} @ {a}" for a, w in words.items())

    def kinds(self, joint: Joint) -> str:
        """The kind of type on one axis, or ``S, R``."""
        return ", ".join(kind.kind.value for kind in joint)

    def word(self, subject: Subject, kind: Type, axis: int) -> str:
        """As users write it; ``Invariant`` where both kinds of Replicate may occur."""
        both = subject.value.requires_grad and subject.kind == "value"
        return "Invariant" if both and kind == I else self.names.placement(subject.value, kind, (axis,))

    # -- as it could be -------------------------------------------------------------------------

    def choices(self, group: Sequence[Subject]) -> list[_Choice]:
        """The placements that all of the group could have and do not, each with the type of every member."""
        return [choice for axis in range(len(self.plan.mesh.axes)) for choice in self._choices(group, axis)]

    def _choices(self, group: Sequence[Subject], axis: int) -> Iterator[_Choice]:
        offered: list[dict[str, Type]] = []
        for subject in group:
            here: dict[str, Type] = {}
            for kind in self.types(subject, axis):
                here.setdefault(self.word(subject, kind, axis), kind)
            offered.append(here)
        now = self.word(group[0], self.current(group[0])[axis], axis)
        for word in offered[0]:
            if word != now and all(word in here for here in offered):
                yield axis, word, [here[word] for here in offered]

    def types(self, subject: Subject, axis: int) -> Iterator[Type]:
        """What a statement may say of a parameter, input or output; for any other value what the algebra has."""
        value, context = subject.value, self.plan.bound.contexts[axis]
        if subject.kind == "value":
            yield from context.types(value)
        elif subject.kind == "output":
            yield from (kind for kind in context.types(value) if kind != R or not value.requires_grad)
        else:
            yield I if value.requires_grad else R
            for factors in self.plan.bound.dims.of(value):
                run = leading(context, factors) if factors else None
                if run is not None and self.plan.bound.dims.locate(value, run) is not None:
                    yield S(*run)
            if subject.kind == "parameter":
                yield from self.stored(subject, axis)

    def stored(self, subject: Subject, axis: int) -> Iterator[Type]:
        """Blocks of the first dim, where the parameter has one that all axes together divide."""
        bound, now = self.plan.bound, self.current(subject)
        (first, *_) = bound.dims.of(subject.value) or ((),)
        if first and bound.dims.locate(subject.value, first) and now[axis].kind in (Kind.I, Kind.R):
            blocks = Type(Kind.S, first, stored=True)
            if self.plan.mesh.fits(now.replaced((axis,), blocks), bound.hints):
                yield blocks


class _Pricing:
    """Solves the problem again with other pins, as often as it may."""

    def __init__(self, answer: _Answer, most: int) -> None:
        self.answer, self.plan = answer, answer.plan
        self.most, self.solved = most, 0

    def price(self, group: Sequence[Subject], offered: Sequence[_Choice]) -> tuple[Alternative, ...] | None:
        """Each placement offered, or None where that would be more than may be solved."""
        if self.solved + len(offered) > self.most:
            return None
        return tuple(self.alternative(group, *choice) for choice in offered)

    def alternative(self, group: Sequence[Subject], axis: int, word: str, kinds: Sequence[Type]) -> Alternative:
        self.solved += 1
        self.answer.say(f"pricing alternative {self.solved} of {self.most}")
        plain = Alternative(self.plan.mesh.axes[axis].name, word, kinds[0].kind)
        try:
            other = solve(_pinned(self.plan.bound, axis, zip(group, kinds, strict=True)))
        except PlacementError as error:
            return dataclasses.replace(plain, obstacle=error.diagnostics[0].message)
        old, first = self.plan, group[0]
        made = other.produced[first.value][axis]
        (sent, count), (sent_now, count_now) = _launched(other), _launched(old)
        time, compute = other.cost[0] - old.cost[0], other.compute - old.compute
        return dataclasses.replace(
            plain,
            made=self.answer.word(first, made, axis) if first.kind == "value" and made != kinds[0] else "",
            time=time,
            communication=time - compute,
            compute=compute,
            sent=sent - sent_now,
            kept=other.saved - old.saved,
            launches=count - count_now,
            proven=all(plan.cost == plan.lower_bound for plan in (old, other)),
        )


def _launched(plan: Plan) -> tuple[int, int]:
    """Bytes and number of all launches of a step."""
    launches = plan.launches()
    return sum(launch.nbytes for launch in launches), len(launches)


def _pinned(bound: Bound, axis: int, pins: Iterable[tuple[Subject, Type]]) -> Bound:
    """What the spec would say if statements placed the subjects so on the axis."""
    changed: dict[str, dict[Any, Pin | None]] = {
        "inputs": dict(bound.inputs),
        "parameters": dict(bound.parameters),
        "values": dict(bound.values),
        "outputs": dict(bound.outputs),
    }
    for subject, kind in pins:
        where = "parameters" if subject.kind == "buffer" else f"{subject.kind}s"
        key: Any = subject.output or subject.value
        old = changed[where].get(key)
        kinds = list(old.kinds if old else [None] * len(bound.mesh.axes))
        kinds[axis] = (kind,)
        changed[where][key] = Pin(tuple(kinds))
    changes: dict[str, Any] = changed
    return dataclasses.replace(bound, **changes)


def _line(sources: Mapping[str, str], span: Span) -> str:
    lines = sources.get(span.file, "").splitlines()
    return " ".join(lines[span.line - 1].split("#")[0].split()) if span.line <= len(lines) else ""


# -- alike --------------------------------------------------------------------------------------------


def _likeness(found: Found) -> object:
    """Equal for what is the same in different layers."""
    (name,) = found.names
    layer = layer_of(name)

    def seen(path: str) -> str:
        return seen_from(layer, path)

    return (
        found.kind,
        seen(name),
        tuple(found.placement.items()),
        found.type,
        found.made,
        found.statement,
        found.producer and (seen(found.producer.name), found.producer.placement),
        frozenset((seen(n.name), n.placement) for n in found.consumers),
        tuple((c.source, c.target, c.launches, c.nbytes, frozenset(map(seen, c.users))) for c in found.conversions),
        found.hook and found.hook.meets,
    )
