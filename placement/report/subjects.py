"""What a question can be about: everything in a plan that has a name, and what is near where nothing has it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from placement.graph.ir import Output, Value
from placement.lang.diagnostics import near
from placement.lang.patterns import PatternError, compile_pattern
from placement.report.fold import patterns
from placement.solver.nearest import nearest_path

if TYPE_CHECKING:
    from placement.report.names import Names
    from placement.solver.plan import Plan

_MOST_SUGGESTED = 2


class UnknownNameError(ValueError):
    """Nothing in the model has such a name; the message names what is near."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is asked about. kind: ``parameter``, ``buffer``, ``input``, ``output`` or ``value``."""

    kind: str
    name: str
    value: Value
    output: Output | None = None


def subjects(plan: Plan, names: Names, asked: str) -> tuple[Subject, ...]:
    """What ``asked`` names, each once, in program order. Raises UnknownNameError where that is nothing."""
    known = list(_known(plan, names))
    found = [subject for subject in known if subject.name == asked]
    if not found:
        try:
            matches = compile_pattern(asked).fullmatch
        except PatternError as error:
            raise UnknownNameError(f"{asked!r} is no name and no pattern: {error}") from error
        found = [subject for subject in known if matches(subject.name)]
    if not found:
        raise UnknownNameError(f"nothing in the model is called {asked!r}{_suggestion(asked, known)}")
    once: dict[tuple[Value, Output | None], Subject] = {}
    for subject in found:
        once.setdefault((subject.value, subject.output), subject)
    return tuple(once.values())


def _known(plan: Plan, names: Names) -> Iterator[Subject]:
    """Everything that has a name: a module stands for its first output, an op for its results."""
    graph = plan.graph
    own: dict[Value, str] = {item.value: "input" for item in graph.inputs}
    own |= {p.value: "buffer" if p.is_buffer else "parameter" for p in graph.parameters}
    for item in graph.inputs:
        yield Subject("input", item.name, item.value)
    for parameter in graph.parameters:
        yield from (Subject(own[parameter.value], name, parameter.value) for name in parameter.names)
    called: dict[Value, list[str]] = {}
    for path, info in graph.modules.items():
        for index, returned in info.returned.items():
            if path and returned:
                called.setdefault(returned[0], []).append(path if not index else f"{path}@{index}")
    for value in graph.values():
        producer = names.producers.get(value)
        first = producer is not None and producer.results[0] is value
        aliases = dict.fromkeys((*called.get(value, []), names.value(value)))
        if producer is not None and first:  # neighbours are told by their ops
            aliases[names.user(producer)] = None
        if value not in own:
            yield from (Subject("value", name, value) for name in aliases)
    for output in graph.outputs:
        if output.value is not None:
            yield Subject("output", output.name, output.value, output)


def _suggestion(asked: str, known: Sequence[Subject]) -> str:
    names = list(dict.fromkeys(subject.name for subject in known))
    ending = patterns([name for name in names if name.endswith(f".{asked}")])[:_MOST_SUGGESTED]
    mended = nearest_path(asked, names) if "." in asked else None
    close = ending or ([mended] if mended is not None and mended.strip(".*") else near(asked, names))
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
