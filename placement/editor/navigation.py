"""What is told of a place, and where one goes from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import PurePath

from placement.editor.document import Declared, Document, Slot, Stated, resolve
from placement.editor.knowledge import Effect, Known
from placement.lang.spec import COLLECTIVES, InputLine, Name, OutputLine, ParamLine, Span, ValueLine

_SHOWN = 5  # names, then a count
Uri = Callable[[str], str]


def declaration(document: Document, offset: int, names: Declared) -> Span | None:
    """Where the axis, dim or link at ``offset`` is declared, or the file that is included there begins."""
    found = _named(document, offset, names)
    return None if found is None else found.span


def _named(document: Document, offset: int, names: Declared) -> Name | None:
    place = document.place(offset)
    if place is None:
        return _declaring(document, offset, names)
    word = document.text.source.text[place.start : place.end]
    match place.slot:
        case Slot.AXIS:
            return names.axes.get(word)
        case Slot.LINK:
            return names.links.get(word)
        case Slot.DIM | Slot.DIMS:
            return names.dims.get(word)
        case Slot.FILE:
            return _file(document, offset)
        case _:
            return None


def _declaring(document: Document, offset: int, names: Declared) -> Name | None:
    """The axis or link that is declared right here: whoever asks for it is there already."""
    here = document.text.source.span(offset, offset)
    for name in (*names.axes.values(), *names.links.values()):
        span = name.span
        if span.file == here.file and span.line == here.line and span.column <= here.column <= span.end_column:
            return name
    return None


def _file(document: Document, offset: int) -> Name | None:
    stated = document.at(offset)
    name = getattr(stated.parsed, "name", None) if stated is not None else None
    if not isinstance(name, Name):
        return None
    return Name(str(name), Span(resolve(document.text.file, name), 1, 1, 1, 1))


def causes(document: Document, offset: int, known: Known) -> list[tuple[str, int]]:
    """The other statements, as (file, line), that the collectives of the statement at ``offset`` follow from."""
    stated = document.at(offset)
    if stated is None:
        return []
    own = (document.text.file, lines(document, stated))
    found = (cause for effect in known.caused_by(*own) for cause in effect.cause)
    return list(dict.fromkeys(c for c in found if c[0] != own[0] or c[1] not in own[1]))


def lines(document: Document, stated: Stated) -> range:
    """The lines of a statement, counted from 1."""
    first, last = stated.raw.start, max(stated.raw.end - 1, stated.raw.start)
    return range(document.text.line_of(first), document.text.line_of(last) + 1)


def hover(document: Document, offset: int, names: Declared, known: Known, uri: Uri) -> tuple[str, int, int] | None:
    """Markdown on the name or the statement at ``offset``, and the stretch of text that it speaks of."""
    stated = document.at(offset)
    named = _named(document, offset, names)
    if named is not None:
        text = _declared(named, known)
        place = document.place(offset)
        start, end = (place.start, place.end) if place is not None else (offset, offset)
        return (text, start, end) if text else None
    if stated is None or stated.parsed is None or offset > stated.raw.end:
        return None
    parts = [*_placed(stated, known), *_caused(document, stated, known, uri)]
    if offset <= stated.raw.start + len(stated.raw.keyword) and type(stated.parsed).__doc__:
        # A docstring's double back-quotes are Markdown too.
        parts.insert(0, " ".join((type(stated.parsed).__doc__ or "").partition("\n\n")[0].split()))
    return ("\n\n".join(parts), stated.raw.start, stated.raw.end) if parts else None


def _declared(name: Name, known: Known) -> str:
    ranks = known.mesh.get(name)
    size = "" if ranks is None else f": {ranks} rank{'' if ranks == 1 else 's'}"
    return f"{_code(name)}{size}, line {name.span.line} of {_plain(PurePath(name.span.file).name)}"


def _placed(stated: Stated, known: Known) -> Iterator[str]:
    """What the statement speaks of, by solved placement."""
    parsed = stated.parsed
    if isinstance(parsed, ParamLine):
        matched = [name for name in known.params if parsed.pattern.matches(name)]
        yield from _grouped("parameter", matched, known.placed_params, known.params)
    elif isinstance(parsed, ValueLine):
        matched = [path for path in known.modules if parsed.pattern.matches(path)]
        yield from _grouped("module", matched, known.placed_values, known.modules)
    elif isinstance(parsed, InputLine):
        yield from _grouped("input", map(str, parsed.names), known.placed_inputs, known.inputs)
    elif isinstance(parsed, OutputLine):
        yield from _grouped("output", map(str, parsed.names), known.outputs, {})


def _grouped(noun: str, matched: Iterable[str], placed: Mapping[str, str], details: Mapping[str, str]) -> Iterator[str]:
    groups: dict[str, list[str]] = {}
    for name in matched:
        if name in placed:
            groups.setdefault(placed[name], []).append(name)
    for placement, members in groups.items():
        shown = [f"- {_code(name)} {_plain(details.get(name, ''))}".rstrip() for name in members[:_SHOWN]]
        more = [f"- and {len(members) - _SHOWN} more"] if len(members) > _SHOWN else []
        count = f"{len(members)} {noun}{'' if len(members) == 1 else 's'}"
        yield "\n".join([f"{_code(placement)}: {count}", "", *shown, *more])


def _caused(document: Document, stated: Stated, known: Known, uri: Uri) -> Iterator[str]:
    effects = known.caused_by(document.text.file, lines(document, stated))
    sent = [effect for effect in effects if {effect.forward, effect.backward} & set(COLLECTIVES)]
    if sent:
        yield "\n".join(["Collectives that follow from it:", "", *(_effect(effect, uri) for effect in sent)])


def _effect(effect: Effect, uri: Uri) -> str:
    path = effect.source + (f" → {effect.target}" if effect.target else "")
    alike = f" ({effect.alike} alike)" if effect.alike > 1 else ""
    where = f"{_code(effect.where)}{alike}: " if effect.where else ""
    phases = (("forward", effect.forward), ("backward", effect.backward))
    both = ", ".join(f"{_code(action)} {phase}" for phase, action in phases if action)
    links = ", ".join(f"[{_plain(PurePath(f).name)}:{line}]({uri(f)}#L{line})" for f, line in effect.cause)
    return f"- {where}{_code(path)}, {_code(f'{effect.what} @ {effect.axis}')}: {both}, {effect.size}; from {links}"


def _code(text: str) -> str:
    """Text as a code span, which a back-quote inside would end."""
    return "`" + text.replace("`", "'") + "`"


def _plain(text: str) -> str:
    """Text without a meaning in Markdown."""
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>()#|" else c for c in text)
