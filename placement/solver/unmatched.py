"""Patterns of a spec that match nothing of a model, and what they were probably meant to be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from placement.graph.ir import Graph
from placement.lang.diagnostics import Diagnostics, near
from placement.lang.patterns import compile_pattern, expand
from placement.lang.source import Span
from placement.lang.spec import ExpectLine, LowerLine, ParamLine, Pattern, Spec, StrategyLine, ValueLine
from placement.solver.nearest import nearest, nearest_path

_Line = ParamLine | ValueLine | StrategyLine | LowerLine | ExpectLine
_MOST = 8  # names to list


def unmatched_lines(graph: Graph, spec: Spec, found: Diagnostics) -> list[_Line]:
    """The lines whose pattern, or an alternative of it, matches nothing: reported (PLC104).

    Where no line of a block matches because of the block's own path, that path is at fault, once.
    """
    return _Check(graph, found).run((*spec.params, *spec.values, *spec.strategies, *spec.lowers, *spec.expects))


class _Check:
    def __init__(self, graph: Graph, found: Diagnostics) -> None:
        self.found = found
        self.modules = [path for path in graph.modules if path]
        self.parameters = [name for parameter in graph.parameters for name in parameter.names]

    def run(self, lines: Sequence[_Line]) -> list[_Line]:
        unmatched: list[_Line] = []
        sound: set[Span] = set()  # blocks that a line matches in
        for line in lines:
            if _any(line.pattern.text, self.names(line)):
                sound.update(block.span for block in _blocks(line.pattern))
                self.alternatives(line)
            else:
                unmatched.append(line)
        for line in unmatched:
            at_fault = self.block_at_fault(line, sound)
            if at_fault is not None:
                self.found.error("PLC104", at_fault[1], at_fault[0].span, hint=at_fault[2])
            else:
                message = f"pattern '{line.pattern}' matches no {_what(line)}"
                self.found.error("PLC104", message, line.pattern.span, hint=self.hint(line))
        return unmatched

    def names(self, line: _Line) -> list[str]:
        return self.parameters if isinstance(line, ParamLine) else self.modules

    # -- a block's path ------------------------------------------------------------------------

    def block_at_fault(self, line: _Line, sound: set[Span]) -> tuple[Pattern, str, str] | None:
        """The outermost block whose path is the mistake: the line matches once it is mended. With message and hint."""
        mended = nearest_path(line.pattern.text, self.names(line))
        for block in _blocks(line.pattern):
            for rest in expand(line.pattern.text.removeprefix(f"{block.text}.")):
                head = None if mended is None or block.span in sound else mended.removesuffix(f".{rest}")
                if head is not None and head != mended and head not in expand(block.text):
                    message = f"what this block speaks of is not inside '{block}'"
                    if not _any(block.text, self.modules):
                        message = f"pattern '{block}' matches no module"
                    return block, message, f"did you mean '{_from(block.block, head)}'?"
        return None

    # -- a line's own path ---------------------------------------------------------------------

    def hint(self, line: _Line) -> str | None:
        pattern, names = line.pattern, self.names(line)
        block = pattern.block
        if block is not None and _any(pattern.own, names):
            inside = pattern.own.removeprefix(f"{block}.")
            if inside != pattern.own:
                return f"a path inside the block goes on from '{block}': write {inside}"
            return f"'{pattern.own}' is not inside '{block}': write the line outside of the block"
        others = {"value": self.modules} if isinstance(line, ParamLine) else {"param": self.parameters}
        other_kind = any(_any(pattern.text, paths) for paths in others.values())
        told = None if other_kind else self.missing_leaf(line)
        if told is None and not other_kind and nearest_path(pattern.text, names) is None:
            told = self.what_is_there(pattern, names)
        told = told or nearest(pattern.text, names, others)
        return told if told is None or block is None else told.replace(f"{block}.", "")

    def missing_leaf(self, line: _Line) -> str | None:
        """A module that is there and has no such parameter: a bias, mostly."""
        if not isinstance(line, ParamLine):
            return None
        for flat in expand(line.pattern.text):
            module, _, leaf = flat.rpartition(".")
            owners = [name.rpartition(".") for name in self.parameters] if module else []
            leaves = dict.fromkeys(own for path, _, own in owners if compile_pattern(module).fullmatch(path))
            if leaves and not near(leaf, leaves):
                here = _from(line.pattern.block, module)
                return f"'{here}' has no parameter '{leaf}', only {_listed(leaves)}: leave the line out"
        return None

    def what_is_there(self, pattern: Pattern, names: Sequence[str]) -> str | None:
        """The names below the longest beginning of the pattern that the model has."""
        segments = expand(pattern.text)[0].split(".")
        for depth in range(len(segments) - 1, 0, -1):
            head = segments[:depth]
            split = [name.split(".") for name in names]
            matches = compile_pattern(".".join(head)).fullmatch
            below = [s[depth] for s in split if len(s) > depth and "**" not in head and matches(".".join(s[:depth]))]
            if below:
                return f"inside '{'.'.join(head)}' there is {_listed(dict.fromkeys(below))}"
        return None

    # -- alternatives --------------------------------------------------------------------------

    def alternatives(self, line: _Line) -> None:
        """Each alternative in braces must matter: one that is misspelt would be left out in silence."""
        pattern, names = line.pattern, self.names(line)
        before = pattern.text.removesuffix(pattern.own)
        for start, end, opened, closed in _alternatives(pattern.own):
            chosen = pattern.own[start:end]
            text = before + pattern.own[:opened] + chosen + pattern.own[closed + 1 :]
            if not _any(text, names):
                mended = nearest_path(text, names)
                hint = None if mended is None else f"did you mean '{_from(pattern.block, mended)}'?"
                message = f"alternative '{chosen}' matches no {_what(line)}"
                self.found.error("PLC104", message, _part(pattern, start, end), hint=hint)


def _what(line: _Line) -> str:
    return "parameter" if isinstance(line, ParamLine) else "module"


def _any(pattern: str, names: Sequence[str]) -> bool:
    matches = compile_pattern(pattern).fullmatch
    return any(map(matches, names))


def _blocks(pattern: Pattern) -> list[Pattern]:
    """The patterns of the blocks around, the outermost first."""
    return [] if pattern.block is None else [*_blocks(pattern.block), pattern.block]


def _from(block: Pattern | None, path: str) -> str:
    """The path as a line inside the block writes it."""
    return path if block is None else path.removeprefix(f"{block}.")


def _listed(names: dict[str, None]) -> str:
    shown = [f"'{name}'" for name in names]
    rest = [f"{len(shown) - _MOST} more"] if len(shown) > _MOST else []
    shown = [*shown[:_MOST], *rest]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _alternatives(text: str) -> Iterator[tuple[int, int, int, int]]:
    """Start and end of every alternative, and the offsets of the braces around it."""
    opened: list[tuple[int, list[int]]] = []  # a brace, and where the alternatives in it begin
    for at, character in enumerate(text):
        if character == "{":
            opened.append((at, [at + 1]))
        elif character == "," and opened:
            opened[-1][1].append(at + 1)
        elif character == "}" and opened:
            brace, starts = opened.pop()
            if len(starts) > 1:
                ends = [start - 1 for start in starts[1:]] + [at]
                yield from ((start, end, brace, at) for start, end in zip(starts, ends, strict=True))


def _part(pattern: Pattern, start: int, end: int) -> Span:
    """The place of a stretch of a line's own path; all of it where blanks stand in between."""
    span = pattern.span
    if span.end_line != span.line or span.end_column - span.column != len(pattern.own):
        return span
    return Span(span.file, span.line, span.column + start, span.line, span.column + end)
