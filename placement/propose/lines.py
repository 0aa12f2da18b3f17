"""Groups of parameters as lines of the language: patterns that match them and nothing else, aligned with their why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from placement.lang.patterns import compile_pattern, expand
from placement.propose.cuts import Cut, Group
from placement.report.fold import patterns
from placement.report.names import shared

MOST_LINES = 14  # without comments; past it lines of one placement are joined


@dataclass(frozen=True, slots=True)
class Line:
    """One statement. block: the ``within`` pattern around it, '' for none. tail: what follows the colon."""

    block: str
    keyword: str
    pattern: str
    tail: str
    groups: tuple[Group, ...] = ()
    comment: str = ""

    @property
    def head(self) -> str:
        """What stands before the colon."""
        return f"{self.keyword} {self.pattern}"


def block_of(wild: str) -> str:
    """``model.layers.*`` for ``model.layers.*.mlp.up.weight``: the outermost numbered list, '' where there is none."""
    segments = wild.split(".")
    head = list(takewhile(lambda segment: segment != "*", segments))
    return ".".join([*head, "*"]) if len(head) < len(segments) else ""


def parameter_lines(cuts: Iterable[Cut], axis: str, every: Sequence[str]) -> list[Line]:
    """The lines that place the cuts' groups; ``every`` lists the names that a pattern could match by mistake."""
    made: list[Line] = []
    for cut in cuts:
        alike: dict[tuple[str, str], list[Group]] = {}
        for group in cut.groups:
            alike.setdefault((block_of(group.wild), f"Shard({group.spoken}) @ {axis}"), []).append(group)
        for (block, tail), groups in alike.items():
            made += _lines(block, tail, groups, every)
    return made


def _lines(block: str, tail: str, groups: Sequence[Group], every: Sequence[str]) -> Iterator[Line]:
    exact = [group for group in groups if _matched(group.wild, every) == set(group.names)]
    inside = {group.wild[len(block) + 1 :] if block else group.wild: group for group in exact}
    for pattern in patterns(inside):
        matches = compile_pattern(pattern).fullmatch
        members = tuple(group for path, group in inside.items() if matches(path))
        yield Line(block, "param", shortened(pattern), tail, members)
    for group in groups:
        if group not in exact:  # the same path exists in layers of another kind
            for pattern in patterns(group.names):
                yield Line("", "param", shortened(pattern), tail, (group,))


def _matched(pattern: str, names: Iterable[str]) -> set[str]:
    matches = compile_pattern(pattern).fullmatch
    return {name for name in names if matches(name)}


def shortened(pattern: str) -> str:
    """``{q,k,v}_proj.weight`` for ``{q_proj,k_proj,v_proj}.weight``."""
    return ".".join(_short(segment) for segment in _segments(pattern))


def _segments(pattern: str) -> Iterator[str]:
    depth, current = 0, ""
    for character in pattern:
        depth += (character == "{") - (character == "}")
        if character == "." and not depth:
            yield current
            current = ""
        else:
            current += character
    yield current


def _short(segment: str) -> str:
    options = expand(segment) if segment.startswith("{") and segment.endswith("}") and "[" not in segment else ()
    if len(options) < 2:
        return segment
    words = [option.split("_") for option in options]
    lead = shared(words)
    tail = shared([word[len(lead) :][::-1] for word in words])[::-1]
    cores = ["_".join(word[len(lead) : len(word) - len(tail)]) for word in words]
    if not all(cores):
        return segment
    return "_".join([*lead, f"{{{','.join(cores)}}}", *tail])


def joined(lines: Sequence[Line]) -> list[Line]:
    """Fewer lines: those of one block and placement become one, in the place of the first."""
    result: dict[tuple[str, str, str], Line] = {}
    for line in lines:
        key = line.block, line.keyword, line.tail
        first = result.get(key)
        if first is None:
            result[key] = line
        else:
            both = f"{first.pattern[1:-1] if first.comment == '...' else first.pattern},{line.pattern}"
            result[key] = replace(first, pattern=f"{{{both}}}", groups=(*first.groups, *line.groups), comment="...")
    return [replace(line, comment="") for line in result.values()]


def count(lines: Sequence[Line]) -> int:
    """Lines of a file with these statements: each block has two more."""
    return len(lines) + 2 * len({line.block for line in lines if line.block})


def written(lines: Sequence[Line]) -> list[str]:
    """The statements, each block where its first line stands; the formatter aligns them."""
    out: list[str] = []
    done: set[str] = set()
    for line in lines:
        if not line.block:
            out.append(_statement(line))
        elif line.block not in done:
            done.add(line.block)
            inside = [_statement(other) for other in lines if other.block == line.block]
            out += ["", f"within {line.block} {{", *inside, "}", ""]
    return out


def _statement(line: Line) -> str:
    return f"{line.head} : {line.tail}" + (f"  # {line.comment}" if line.comment else "")
