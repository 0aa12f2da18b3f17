"""What may stand at a place: words of the language, names of the spec, and names of the model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from lsprotocol.types import CompletionItem, CompletionItemKind, TextEdit

from placement.editor import words
from placement.editor.document import Declared, Document, Place, Slot
from placement.editor.knowledge import Known
from placement.lang.patterns import PatternError, compile_pattern

_KINDS = {
    Slot.STATEMENT: CompletionItemKind.Keyword,
    Slot.OVER: CompletionItemKind.Keyword,
    Slot.DIRECTION: CompletionItemKind.Keyword,
    Slot.PLACEMENT: CompletionItemKind.Class,
    Slot.STORED: CompletionItemKind.Class,
    Slot.COLLECTIVE: CompletionItemKind.Function,
    Slot.STRATEGY: CompletionItemKind.Function,
    Slot.SETTING: CompletionItemKind.Property,
    Slot.CHOICE: CompletionItemKind.EnumMember,
    Slot.PATH: CompletionItemKind.Module,
}
_LATE = "~"  # sorts behind every name


def complete(document: Document, offset: int, names: Declared, known: Known) -> list[CompletionItem]:
    """The words that may stand at ``offset``, each replacing the word that is there."""
    place = document.place(offset)
    if place is None:
        return []
    if place.slot is Slot.PATH:
        start, found = _paths(place, known)
    else:
        details = _details(place.slot, known)
        start, found = place.start, {word: details.get(word, "") for word in _words(place, names, known)}
    kind = _KINDS.get(place.slot, CompletionItemKind.Variable)
    edit = document.text.between(start, max(offset, place.end))
    return [
        CompletionItem(
            label=word,
            kind=kind,
            detail=detail or None,
            sort_text=f"{_LATE if word == '*' else ''}{index:04}",
            filter_text=document.text.source.text[start:offset] if word == "*" else word,
            text_edit=TextEdit(edit, word),
        )
        for index, (word, detail) in enumerate(found.items())
    ]


def _words(place: Place, names: Declared, known: Known) -> Iterable[str]:
    """The words of a slot, in the order in which they are offered."""
    match place.slot:
        case Slot.STATEMENT:
            return words.pathed() if place.block is not None else words.STATEMENTS
        case Slot.AXIS:
            return [*names.axes]
        case Slot.LINK:
            return dict.fromkeys([*names.links, *words.LINKS])
        case Slot.DEVICE:
            return words.DEVICES
        case Slot.DTYPE:
            return words.DTYPES
        case Slot.OVER:
            return ["over"]
        case Slot.PLACEMENT:
            return words.PLACEMENTS
        case Slot.STORED:
            return [*words.PLACEMENTS, "stored"]
        case Slot.DIM:
            builtin = words.PARAMETER_DIMS if place.statement == "param" else ()
            return dict.fromkeys([*names.dims, *builtin])
        case Slot.DIMS:
            return names.dims
        case Slot.CHOICE:
            return words.LOWERINGS.get(place.setting, ())
        case _:
            return {
                Slot.RESOURCE: words.RESOURCES,
                Slot.ORDER: words.ORDERS,
                Slot.SETTING: tuple(words.LOWERINGS),
                Slot.COLLECTIVE: words.COLLECTIVES,
                Slot.DIRECTION: words.DIRECTIONS,
                Slot.STRATEGY: known.strategies,
                Slot.INPUT: tuple(known.inputs),
                Slot.OUTPUT: tuple(known.outputs),
            }.get(place.slot, ())


def _details(slot: Slot, known: Known) -> Mapping[str, str]:
    if slot is Slot.AXIS:
        return {axis: f"{n} ranks" for axis, n in known.mesh.items()}
    return {Slot.INPUT: known.inputs, Slot.OUTPUT: known.outputs}.get(slot, {})


# -- paths ------------------------------------------------------------------------------------------


def _paths(place: Place, known: Known) -> tuple[int, dict[str, str]]:
    """Where the segment being written starts, and the segments that may stand there: the model's own."""
    paths = known.params if place.statement == "param" else known.modules
    prefix = place.word if place.block is None else f"{place.block}.{place.word}"
    opened, partial = _segment(prefix)
    try:
        pattern = compile_pattern(opened) if opened else None
    except PatternError:
        return place.end, {}
    found: dict[str, str] = {}
    for path, detail in paths.items():
        for segment, last in _next(path, pattern):
            found[segment] = detail if last else found.get(segment, "")
    numbers = [segment for segment in found if segment.isdigit()]
    if len(numbers) > 1:
        found["*"] = f"{numbers[0]} to {numbers[-1]}"
    return place.end - len(partial), found


def _segment(prefix: str) -> tuple[str, str]:
    """The pattern of what lies before the segment that ``prefix`` ends in, and that segment.

    Inside open braces the earlier alternatives are left out: ``mlp.{gate_proj,up`` continues ``mlp.up``.
    """
    flat = ""
    for piece in re.split(r"(\{[^{}]*\})", prefix):  # closed braces stay as they are
        if piece.startswith("{"):
            flat += piece
            continue
        head, *inner = piece.split("{")
        flat += head + "".join(part.rpartition(",")[2].lstrip() for part in inner)
    opened, _, partial = flat.rpartition(".")
    return opened, partial


def _next(path: str, pattern: re.Pattern[str] | None) -> Iterator[tuple[str, bool]]:
    """The segments of ``path`` that follow what ``pattern`` matches, and whether each is the last one."""
    segments = path.split(".") if path else []
    for index, segment in enumerate(segments):
        before = ".".join(segments[:index])
        if (index == 0) if pattern is None else (pattern.fullmatch(before) is not None):
            yield segment, index + 1 == len(segments)
