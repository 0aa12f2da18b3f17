"""One call for every form of an explanation and for every question that it answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from placement.report.against import Explanation, against_data, compare
from placement.report.against_pages import against_text
from placement.report.data import explain_data, to_json
from placement.report.dot import to_dot
from placement.report.html import to_html
from placement.report.memory import memory_text
from placement.report.text import explain_text
from placement.report.timeline import timeline_data, timeline_text
from placement.report.trace import timeline_chrome
from placement.report.why import why as answer_why
from placement.report.why_pages import why_data, why_text

if TYPE_CHECKING:
    from placement.solver.plan import Plan

FORMS = ("text", "json", "html", "dot", "chrome")
_OF_QUESTIONS = {
    "why": ("text", "json"),
    "against": ("text", "json"),
    "time": ("text", "json", "chrome"),
    "memory": ("text", "json"),
}


class ViewError(ValueError):
    """Two questions at once, or a form that a question has no answer in."""


def check_view(form: str, *, why: bool, against: bool, time: bool, memory: bool = False) -> str:
    """The question that is asked, '' for none; ``chrome`` asks for the time. Raises ViewError."""
    if form not in FORMS:
        raise ViewError(f"there is no format {form!r}: {', '.join(FORMS)}")
    questions = (("why", why), ("against", against), ("time", time), ("memory", memory))
    asked = [name for name, given in questions if given]
    if form == "chrome" and not asked:
        return "time"
    if len(asked) > 1:
        raise ViewError(f"{' and '.join(asked)} are two questions: ask one at a time")
    for question in asked:
        if form not in _OF_QUESTIONS[question]:
            raise ViewError(f"{question} is answered as {' or '.join(_OF_QUESTIONS[question])}, not as {form}")
    return asked[0] if asked else ""


def view(
    plan: Plan,
    form: str = "text",
    *,
    why: str | None = None,
    against: tuple[str, Explanation] | None = None,
    time: bool = False,
    memory: bool = False,
    name: str = "the plan",
    sources: Mapping[str, str] | None = None,
    width: int = 80,
    color: bool = False,
    verbose: bool = False,
    say: Callable[[str], None] | None = None,
) -> str:
    """The plan explained, or one question about it answered.

    why: a name or pattern. against: the name of another explanation and its data; ``name`` is what this plan is
    called beside it. time: the step as a timeline. memory: what a rank holds. sources: the spec's texts by
    file. width, color, verbose: of text alone. say: is told what takes long. Raises ViewError, and UnknownNameError
    for a name that nothing has.
    """
    question = check_view(form, why=why is not None, against=against is not None, time=time, memory=memory)
    if question == "why" and why is not None:
        answer = answer_why(plan, why, sources, say)
        return why_text(answer, width, color=color) if form == "text" else _json(why_data(answer))
    if question == "against" and against is not None:
        changes = compare(against[1], explain_data(plan), *told_apart(against[0], name))
        return against_text(changes, width, color=color) if form == "text" else _json(against_data(changes))
    if question == "time":
        if form == "text":
            return timeline_text(plan, width, color=color)
        return timeline_chrome(plan) if form == "chrome" else _json(timeline_data(plan))
    if question == "memory":
        if form == "text":
            return memory_text(plan, width, color=color)
        data = explain_data(plan)
        return _json({key: data[key] for key in ("format_version", "mesh", "memory")})
    if form == "text":
        return explain_text(plan, width, color=color, verbose=verbose)
    return {"json": to_json, "html": to_html, "dot": to_dot}[form](plan)


def told_apart(before: str, after: str) -> tuple[str, str]:
    """The last parts of two paths, as many as tell them apart."""
    one, other = PurePath(before).parts, PurePath(after).parts
    for count in range(1, max(len(one), len(other)) + 1):
        if one[-count:] != other[-count:]:
            return "/".join(one[-count:]), "/".join(other[-count:])
    return before, after


def _json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
