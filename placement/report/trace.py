"""A step in Chrome's Trace Event format, which Perfetto and chrome://tracing read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from placement.report.timeline import COMMUNICATION, COMPUTE, Event, Timeline, timeline

if TYPE_CHECKING:
    from placement.solver.plan import Plan

_TRACKS = ("step", "modules", COMPUTE, COMMUNICATION)  # in the order in which a viewer shows them
_MICRO = 10**6  # picoseconds


def timeline_chrome(plan: Plan) -> str:
    """The predicted step as JSON for Perfetto: one process, four tracks, times in microseconds."""
    made = timeline(plan)
    mesh = ", ".join(f"{axis} = {n}" for axis, n in made.facts.mesh.items())
    events = [_meta("process_name", 0, {"name": f"a rank of {mesh}, predicted"})]
    for index, track in enumerate(_TRACKS):
        events.append(_meta("thread_name", index, {"name": track}))
        events.append(_meta("thread_sort_index", index, {"sort_index": index}))
    events += [_slice(name, "step", start, end - start, {}) for name, start, end in _spans(made, _phase)]
    events += [_slice(name, "modules", start, end - start, {}) for name, start, end in _spans(made, _path)]
    events += [_slice(_title(e), e.track, e.start, e.duration, _arguments(e)) for e in made.events]
    return json.dumps({"displayTimeUnit": "ns", "traceEvents": events}, indent=1, ensure_ascii=False) + "\n"


def _meta(name: str, thread: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": 0, "tid": thread, "args": arguments}


def _slice(name: str, track: str, start: int, duration: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "cat": track,
        "ph": "X",
        "ts": start / _MICRO,
        "dur": duration / _MICRO,
        "pid": 0,
        "tid": _TRACKS.index(track),
        "args": arguments,
    }


def _title(event: Event) -> str:
    return f"{event.action} {event.name}" if event.action else event.name


def _arguments(event: Event) -> dict[str, Any]:
    told: dict[str, Any] = {"module": event.module, "phase": event.phase}
    if event.track == COMMUNICATION:
        told |= {"axis": event.axis, "bytes": event.nbytes, "what": event.what}
    return told


def _phase(event: Event) -> tuple[str, ...]:
    return (event.phase,)


def _path(event: Event) -> tuple[str, ...]:
    """The modules around, by their full names; in the backward other ones, so that no slice spans both."""
    segments = event.module.split(".") if event.module else []
    return tuple(".".join(segments[: depth + 1]) for depth in range(len(segments)))


def _spans(made: Timeline, levels: Callable[[Event], tuple[str, ...]]) -> Iterator[tuple[str, int, int]]:
    """Nested slices, the outer before the inner: each as long as its level has the same name in one phase."""
    opened: list[tuple[str, int]] = []
    spans: list[tuple[str, int, int]] = []
    phase, end = "", 0
    for event in (*made.events, None):
        names = levels(event) if event else ()
        same = 0
        while event and event.phase == phase and same < min(len(opened), len(names)) and opened[same][0] == names[same]:
            same += 1
        while len(opened) > same:
            name, start = opened.pop()
            spans.append((name, start, end))
        if event:
            opened += [(name, event.start) for name in names[same:]]
            phase, end = event.phase, event.start + event.duration
    return iter(sorted(spans, key=lambda span: (span[1], -span[2], len(span[0]))))
