"""What repeats is said once: alike layers become one block, names that differ in one segment one pattern."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from placement.report.facts import Converted, Facts, Hooked, Inside
from placement.report.names import join, relative, shared, within
from placement.types import Action, Kind

Segments = tuple[tuple[str, ...], ...]  # a product of alternatives, segment by segment
AS_PLACED = "as placed"  # where a `value` line has a value converted at once
OUTPUT = "output"  # the block's own
INPUT = "input"  # what alike layers are given under different names
USES = "their uses"  # of several parameters
AGAIN = "gathered again"
GRADIENT = "its gradient"


@dataclass(frozen=True, slots=True)
class Row:
    """One conversion or one collective inside an op: what it does forward and backward ('' for nothing).

    count: how often, as of several parameters. nbytes: of all of them.
    """

    what: str
    axis: str
    forward: str
    backward: str
    nbytes: int
    count: int = 1

    @property
    def actions(self) -> tuple[str, str]:
        """Forward and backward for a reader: ``7 all_gather`` and ``reduce_scatter``; ``-`` for nothing."""
        times = f"{self.count} " if self.count > 1 else ""
        forward = f"{times}{self.forward}" if self.forward else "-"
        return forward, (f"{times if forward == '-' else ''}{self.backward}" if self.backward else "-")


@dataclass(frozen=True, slots=True)
class Item:
    """A value on its way (``source -> target``), or an op that communicates (no target), as seen from its block.

    goal: the target's path from the block; ``target`` leaves out what it shares with the source.
    """

    source: str
    target: str
    goal: str
    rows: tuple[Row, ...]
    launches: tuple[tuple[str, str, int], ...]
    cause: tuple[str, ...]
    members: tuple[Converted | Inside, ...]  # what is said here; one of each layer of the block


@dataclass(frozen=True, slots=True)
class Block:
    """What happens in one module, or in each of several alike layers. title: a pattern that matches them all."""

    title: str
    modules: tuple[str, ...]
    items: tuple[Item, ...]
    is_layer: bool


def blocks(found: Facts) -> tuple[Block, ...]:
    """Every conversion and every op that communicates exactly once, in program order of first appearance."""
    everything = sorted([*found.conversions, *found.inside], key=lambda e: e.position)
    layers: dict[str, list[Converted | Inside]] = {}
    runs: list[list[Converted | Inside]] = []  # what lies outside of layers, uninterrupted by one
    previous = None
    for event in everything:
        layer = layer_of(place(event))
        if layer is not None:
            layers.setdefault(layer, []).append(event)
        elif previous is None and runs:
            runs[-1].append(event)
        else:
            runs.append([event])
        previous = layer
    made = [*_alike(layers), *(_outside(run) for run in runs)]
    return tuple(sorted(made, key=lambda block: block.items[0].members[0].position))


def place(event: Converted | Inside) -> str:
    """The module that an event is told under."""
    return event.place if isinstance(event, Converted) else event.module


def layer_of(path: str) -> str | None:
    """``model.layers.3`` for ``model.layers.3.mlp``: the outermost module that is one of a numbered list."""
    segments = path.split(".")
    for index, segment in enumerate(segments):
        if segment.isdigit():
            return ".".join(segments[: index + 1])
    return None


def seen_from(layer: str | None, path: str) -> str:
    """A path as a layer sees it: its own parts without its name, those of other layers by how far away they are."""
    if layer is None:
        return path
    if within(path, layer):
        return f".{relative(path, layer)}"
    listed, _, index = layer.rpartition(".")
    other = layer_of(path)
    if other is None or other.rpartition(".")[0] != listed:
        return path
    return f"{int(other.rpartition('.')[2]) - int(index):+}.{relative(path, other)}"


def _alike(layers: dict[str, list[Converted | Inside]]) -> Iterator[Block]:
    groups: dict[object, list[tuple[str, tuple[Item, ...]]]] = {}
    for layer, events in layers.items():
        items = _items(events, layer)
        key = layer.rpartition(".")[0], tuple((_seen(item, layer), item.target, item.rows) for item in items)
        groups.setdefault(key, []).append((layer, items))
    for members in groups.values():
        names = tuple(layer for layer, _ in members)
        (title,) = patterns(names)  # they differ in their index alone
        columns = zip(*(items for _, items in members), strict=True)
        yield Block(title, names, tuple(map(_merged, columns)), is_layer=True)


def _seen(item: Item, layer: str) -> str:
    """The source as alike layers share it: what comes from outside is just the input."""
    member = item.members[0]
    return item.source if isinstance(member, Inside) or within(member.value, layer) else INPUT


def _merged(column: Sequence[Item]) -> Item:
    """One item for the same thing in every layer."""
    return replace(
        column[0],
        source=column[0].source if len({item.source for item in column}) == 1 else INPUT,
        cause=tuple(dict.fromkeys(cause for item in column for cause in item.cause)),
        members=tuple(member for item in column for member in item.members),
    )


def _outside(run: Sequence[Converted | Inside]) -> Block:
    module = ".".join(shared(place(event).split(".") for event in run))
    return Block(module, (module,), _items(run, module), is_layer=False)


def _items(events: Sequence[Converted | Inside], block: str) -> tuple[Item, ...]:
    """Each where its first event is: the conversions of a value on its way to one goal, and what is gathered alike."""
    ways: dict[object, list[Item]] = {}
    for event in events:
        item = _item(event, block)
        key = (event.value, item.goal) if isinstance(event, Converted) else event
        ways.setdefault(key, []).append(item)
    gathers: dict[object, list[Item]] = {}
    for way in map(_way, ways.values()):
        stored = any(isinstance(member, Converted) and member.stored for member in way.members)
        key = tuple(replace(row, nbytes=0) for row in way.rows) if stored else way.members
        gathers.setdefault(key, []).append(way)
    return tuple(item for alike in gathers.values() for item in _gathered(alike))


def _way(items: Sequence[Item]) -> Item:
    """One after the other, as one item."""
    return replace(
        items[0],
        rows=tuple(row for item in items for row in item.rows),
        launches=tuple(launch for item in items for launch in item.launches),
        cause=tuple(dict.fromkeys(cause for item in items for cause in item.cause)),
        members=tuple(member for item in items for member in item.members),
    )


def _gathered(items: Sequence[Item]) -> Iterator[Item]:
    """Parameters that are kept and gathered alike, as few patterns as there are."""
    if len(items) == 1:
        yield items[0]
        return
    for pattern in _patterns([item.source for item in items], 50):
        alike = [item for item in items if _matches(pattern, item.source)]
        if len(alike) == 1:
            yield alike[0]
            continue
        whole, name = _way(alike), show(pattern)
        columns = zip(*(item.rows for item in alike), strict=True)
        rows = tuple(replace(c[0], nbytes=sum(r.nbytes for r in c), count=sum(r.count for r in c)) for c in columns)
        yield replace(whole, source=name, target=USES, goal=f"uses of {name}", rows=rows)


def _item(event: Converted | Inside, block: str) -> Item:
    if isinstance(event, Inside):
        name = join(relative(event.module, block), event.op)
        rows = tuple(_rows_inside(event))
        return Item(name, "", "", rows, event.launches, (), (event,))
    forward, backward = ("" if action == "none" else action for action in (event.forward, event.backward))
    rows = _rows(event, forward, backward)
    if event.again:
        rows.append(Row(AGAIN, event.axis, "", forward, event.again * event.nbytes, event.again))
    target, goal = _target(event, block)
    name = relative(event.value, block) or OUTPUT
    return Item(name, target, goal, tuple(rows), event.launches, event.cause, (event,))


def _rows(event: Converted, forward: str, backward: str) -> list[Row]:
    """What a conversion does: one row, or two where it sends unlike sizes forward and backward."""
    sizes = [event.sent(action) if action and Action(action).communicates else None for action in (forward, backward)]
    there, back = sizes
    if there is not None and back is not None and there != back:
        return [Row(arrow(event), event.axis, forward, "", there), Row(GRADIENT, event.axis, "", backward, back)]
    nbytes = event.nbytes if there is None and back is None else back if there is None else there
    return [Row(arrow(event), event.axis, forward, backward, nbytes or 0)]


def _rows_inside(event: Inside) -> Iterator[Row]:
    """What an op sends, a row for each launch; steps that follow one another alike, from rank to rank, are one."""
    for (phase, action, nbytes), alike in groupby(event.launches):
        sides = (action, "") if phase == "forward" else ("", action)
        count = len(list(alike))
        if action == Action.SEND_RECV.value:
            yield Row(f"by {event.name}", event.axis, *sides, nbytes * count, count)
        else:
            yield from [Row(f"by {event.name}", event.axis, *sides, nbytes)] * count


def arrow(event: Converted) -> str:
    """``Shard(seq) -> Replicate``; between the two kinds of Replicate the one is told from the other."""
    source, target = event.source, event.target
    if source == target:
        source = "Invariant" if event.source_type is Kind.I else source
        target = "Invariant" if event.target_type is Kind.I else target
    cut = f", {event.overlap}" if event.overlap else ""
    return f"{source} -> {target}{cut}" + " by price" * event.priced


def _target(event: Converted, block: str) -> tuple[str, str]:
    inner = relative(event.module, block)
    if not event.users:
        return AS_PLACED, join(inner, AS_PLACED)
    if event.module not in (event.home, block):
        return inner, inner
    users = zip(event.users, event.user_modules, strict=True)
    seen = list(dict.fromkeys(relative(user if home == event.module else home, event.module) for user, home in users))
    shown = ", ".join(seen[:2]) + (f" and {len(seen) - 2} more" if len(seen) > 2 else "")
    return shown, join(inner, shown)


# -- gradients ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Summed:
    """Parameters of one size whose gradients are summed for one reason, under one pattern."""

    pattern: str
    members: tuple[Hooked, ...]
    cause: tuple[str, ...]


def summed(found: Facts, limit: int = 1000) -> tuple[Summed, ...]:
    """The hooks, each once; no pattern of several names is longer than ``limit``."""
    groups: dict[tuple[object, ...], list[Hooked]] = {}
    for hook in found.hooks:
        groups.setdefault((hook.nbytes, hook.axes, hook.meets, hook.dtype), []).append(hook)
    result: list[Summed] = []
    for members in groups.values():
        for found_pattern in _patterns([hook.parameter for hook in members], limit):
            inside = tuple(hook for hook in members if _matches(found_pattern, hook.parameter))
            cause = tuple(dict.fromkeys(c for hook in inside for c in hook.cause))
            result.append(Summed(show(found_pattern), inside, cause))
    return tuple(result)


# -- sums and causes ----------------------------------------------------------------------------------

_ORDER = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv")


def order(action: str) -> int:
    """The place of a collective in a list of them."""
    return _ORDER.index(action)


def layer_sums(items: Iterable[Item], phase: str) -> dict[str, tuple[int, int]]:
    """By action, launches and bytes of one phase in one of a block's modules."""
    sums: dict[str, tuple[int, int]] = {}
    for item in items:
        for when, action, nbytes in item.launches:
            if when == phase:
                count, total = sums.get(action, (0, 0))
                sums[action] = count + 1, total + nbytes
    return {action: sums[action] for action in sorted(sums, key=order)}


def causes(found: Iterable[str]) -> str:
    """``qwen3.plc:9,13`` for lines of one file; the files of several are separated by spaces."""
    lines: dict[str, set[int]] = {}
    for cause in found:
        file, _, line = cause.rpartition(":")
        lines.setdefault(file, set()).add(int(line))
    return " ".join(f"{file}:{','.join(map(str, sorted(numbers)))}" for file, numbers in lines.items())


# -- patterns -----------------------------------------------------------------------------------------


def patterns(names: Iterable[str], limit: int = 1000) -> list[str]:
    """Patterns of the language that match ``names`` and nothing else, as few as a simple search finds.

    Index ranges are joined first, then names that differ in one segment while the pattern has at most
    ``limit`` characters: ``layers.[0-3].self_attn.{q_norm,k_norm}.weight``.
    """
    return [show(pattern) for pattern in _patterns(names, limit)]


def _patterns(names: Iterable[str], limit: int) -> list[Segments]:
    found: list[Segments] = [tuple((segment,) for segment in name.split(".")) for name in dict.fromkeys(names)]
    for digits in (True, False):
        depth = max((len(p) for p in found), default=0)
        for position in reversed(range(depth)):
            found = list(_joined(found, position, limit, digits=digits))
    return found


def _matches(pattern: Segments, name: str) -> bool:
    """By its segments, since a module's name may have characters that a pattern in text cannot."""
    segments = name.split(".")
    return len(segments) == len(pattern) and all(s in options for s, options in zip(segments, pattern, strict=True))


def _joined(found: Sequence[Segments], position: int, limit: int, *, digits: bool) -> Iterator[Segments]:
    groups: dict[Segments, list[Segments]] = {}
    for pattern in found:
        fits = position < len(pattern) and all(s.isdigit() == digits for s in pattern[position])
        rest = (*pattern[:position], (), *pattern[position + 1 :]) if fits else pattern
        groups.setdefault(rest, []).append(pattern)
    for rest, members in groups.items():
        if len(members) == 1:
            yield from members
            continue
        options = tuple(dict.fromkeys(segment for pattern in members for segment in pattern[position]))
        whole = (*rest[:position], options, *rest[position + 1 :])
        if digits or len(show(whole)) <= limit:
            yield whole
        else:
            yield from members


def show(pattern: Segments) -> str:
    """The pattern's text."""
    return ".".join(_segment(options) for options in pattern)


def _segment(options: Sequence[str]) -> str:
    if len(options) == 1:
        return options[0]
    if not all(option.isdigit() for option in options):
        return f"{{{','.join(options)}}}"
    numbers = sorted(map(int, options))
    ends = [i for i, n in enumerate(numbers) if i + 1 == len(numbers) or numbers[i + 1] != n + 1]
    runs = [(numbers[start], numbers[end]) for start, end in zip([0, *(e + 1 for e in ends)], ends, strict=False)]
    shown = [str(a) if a == b else f"[{a}-{b}]" for a, b in runs]
    return shown[0] if len(shown) == 1 else f"{{{','.join(shown)}}}"
