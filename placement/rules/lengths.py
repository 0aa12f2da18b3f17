"""Ops that look along a dim, where it is longer than it was given: ``Rule.past`` of each (see ``past``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from placement.graph._torch import draws_numbers, schema_name
from placement.graph.attention import bounds
from placement.graph.ir import Size, Value, leaves
from placement.graph.signature import Signature
from placement.rules.bounds import INFINITY, NO, Bound, Range, number
from placement.rules.past import NOTHING, Fact, Place, Region, Step, StuckError

_END = 2**62  # an end that is past all lengths


def before(step: Step) -> list[Fact]:
    """Each position follows from those up to it."""
    return step.follow(step.blocked)


def running(step: Step) -> list[Fact]:
    """A sum of those up to it: of terms between 0 and a number it is so many times that number at most."""
    (fact,) = step.follow(step.blocked)
    (source,) = step.node.operands
    if len(fact.places) != 1:
        return [fact]
    ((dim, place),) = fact.places.items()
    terms = [step.range(source, region) for region in step.fact(source).regions]
    most = max(x.high.more for x in terms)
    plain = all(NO.low.at_most(x.low) and x.high == Bound(more=x.high.more) for x in terms)
    if dim != step.given["dim"] % len(source.shape) or not place.alone or not plain or most == INFINITY:
        return [fact]
    if most != int(most):
        return [fact]
    most, more = int(most), int(most) * place.more
    ranges = {frozenset[int](): Bound(most, 0, more), frozenset({dim}): Bound(0, most, more)}
    return [Fact(fact.places, {region: Range(NO.low, high) for region, high in ranges.items()})]


def lower(step: Step) -> list[Fact]:
    """The lower triangle: zeros right of the diagonal, so past the length for rows before it."""
    (fact,) = step.follow(step.blocked)
    (value,) = step.node.results
    rank = len(value.shape)
    rows, columns = fact.places.get(rank - 2), fact.places.get(rank - 1)
    if rows is None or columns is None or columns.more <= rows.more - 1 + step.given["diagonal"]:
        return [fact]
    return [Fact(fact.places, {frozenset({rank - 1}): NO})]


# -- parts of a dim -----------------------------------------------------------------------------------


def part(step: Step) -> list[Fact]:
    """``slice`` and ``narrow``: from a place that is counted from the start, to one that is counted from either end."""
    source, given = step.node.operands[0], step.given
    dim = given["dim"] % len(source.shape)
    start = given["start"] or 0
    end = start + given["length"] if "length" in given else given["end"]
    size, place = step.node.results[0].shape[dim], step.place(source, dim)
    if place is None:
        return [_of_a_table(step, dim, start, end)]
    last = _from_the_end(step, end, place.more)
    if not isinstance(start, int) or start < 0 or given.get("step", 1) != 1:
        raise StuckError("takes a part that is counted from its end")
    fact = step.fact(source)
    if not step.sizes.depends(size):  # of the first ones
        step.sizes.at_least(start + int(size) - place.more)
        return [_without(fact, dim, keep=True)]
    more = step.sizes.more(size)
    if last is None or last > place.more or more != last - start:
        raise StuckError("takes a part that is counted from its end")
    places = {**fact.places, dim: replace(place, more=more)}
    ranges = dict(fact.ranges)
    if last < place.more:  # what follows begins with elements of the given length
        for region in fact.regions:
            if dim in region:
                ranges[region] = step.range(source, region - {dim}).hull(step.range(source, region))
    return [Fact(places, ranges)]


def _from_the_end(step: Step, end: Size | None, more: int) -> int | None:
    """What ``end`` has more than the length, for a dim that has ``more`` than it; None where that is unknown."""
    if end is None or (isinstance(end, int) and end >= _END):
        return more
    if isinstance(end, int):
        return more + end if end < 0 else None
    return step.sizes.more(end)


def _of_a_table(step: Step, dim: int, start: Size, end: Size | None) -> Fact:
    """As many of a dim of its own size as the length says, as of a table of positions."""
    fact, size = step.fact(step.node.operands[0]), step.node.results[0].shape[dim]
    if not any(map(step.sizes.depends, (start, end))):
        return fact
    rows, more = step.node.operands[0].shape[dim], step.sizes.more(size)
    if not isinstance(start, int) or start < 0 or more is None or not isinstance(rows, int):
        raise StuckError("takes a part that is counted from its end")
    if step.sizes.more(end) != start + more or step.given.get("step", 1) != 1:
        raise StuckError("takes a part that is counted from its end")
    step.sizes.at_most(rows - start - more)
    ranges = {r | extra: known for r, known in fact.ranges.items() for extra in (frozenset[int](), frozenset({dim}))}
    return Fact({**fact.places, dim: Place(more=more)}, ranges)


def _without(fact: Fact, dim: int, *, keep: bool = False) -> Fact:
    """A fact of the value at a place of ``dim`` before the length; without the dim unless it is to ``keep``."""

    def moved(d: int) -> int:
        return d if keep or d < dim else d - 1

    places = {moved(d): place for d, place in fact.places.items() if d != dim}
    ranges = {frozenset(map(moved, region)): known for region, known in fact.ranges.items() if dim not in region}
    return Fact(places, ranges)


def chosen(step: Step) -> list[Fact]:
    """``select``: one place, counted from the start."""
    (source,) = step.node.operands
    dim, index = step.given["dim"] % len(source.shape), step.given["index"]
    place = step.place(source, dim)
    if place is None:
        return step.follow()
    if not isinstance(index, int) or index < 0:
        raise StuckError("takes a part that is counted from its end")
    step.sizes.at_least(index + 1 - place.more)
    return [_without(step.fact(source), dim)]


def extended(step: Step) -> list[Fact]:
    """Padding with a number: after the end it has to be what is there already."""
    source, given = step.node.operands[0], step.given
    rank = len(source.shape)
    amounts = {rank - 1 - i // 2: given["pad"][i : i + 2] for i in range(0, len(given["pad"]), 2)}
    value = given.get("value") or 0
    fact = step.fact(source)
    places, ranges = dict(fact.places), dict(fact.ranges)
    for dim, (first, last) in amounts.items():
        place = step.place(source, dim)
        if place is None:
            ranges = {region: known for region, known in ranges.items() if known == number(value)}
            continue
        if any(not isinstance(n, int) or n < 0 for n in (first, last)) or given.get("mode", "constant") != "constant":
            raise StuckError("pads it with what is at its end")
        if last:
            _ends_in(step, source, dim, value)
        places[dim] = replace(place, more=place.more + first + last)
        ranges = {region: known for region, known in ranges.items() if dim in region}
    return [Fact(places, ranges)]


def _ends_in(step: Step, source: Value, dim: int, value: float) -> None:
    """Everything past the length in ``dim`` is ``value``."""
    for region in step.fact(source).regions:
        if dim in region and step.range(source, region).constant != value:
            raise StuckError("adds to its end", (source,), (value,))


def joined(step: Step) -> list[Fact]:
    """``cat``: whatever is before it has its own size; after it only what is there already."""
    operands, rank = step.node.operands, len(step.node.results[0].shape)
    dim = step.given["dim"] % rank
    longer = [v for v in operands if dim in step.fact(v).places]
    if not longer:
        return step.follow()
    before, (source, *after) = operands[: operands.index(longer[0])], operands[operands.index(longer[0]) :]
    place, sizes = step.place(source, dim), [v.shape[dim] for v in (*before, *after)]
    assert place is not None
    added = sum(size for size in sizes if isinstance(size, int))
    for one in after:
        value = step.range(one).constant
        if one in longer or value is None:
            raise StuckError("adds to its end")
        _ends_in(step, source, dim, value)
    if not all(isinstance(size, int) for size in sizes):
        raise StuckError("adds to its end")
    fact = step.fact(source)
    others = {d: p for v in operands for d, p in step.fact(v).places.items() if d != dim}
    if any(step.fact(v).places.get(d) != p for v in operands for d, p in others.items()):
        raise StuckError("meets two lengths")
    ranges = {region: known for region, known in fact.ranges.items() if dim in region}
    return [Fact({**others, dim: replace(place, more=place.more + added)}, ranges)]


def replaced(step: Step) -> list[Fact]:
    """``slice_scatter`` and ``select_scatter``: a part that is counted from the start, up to the end or one place."""
    base, part = step.node.operands
    dim = step.given["dim"] % len(base.shape)
    place, fact = step.place(base, dim), step.fact(base)
    if place is None:
        return step.follow()
    if "index" in step.given:
        index = step.given["index"]
        if not isinstance(index, int) or index < 0 or step.fact(part).places != _without(fact, dim).places:
            raise StuckError("writes at a place that is counted from its end")
        step.sizes.at_least(index + 1 - place.more)
        return [Fact(fact.places, {region: known for region, known in fact.ranges.items() if dim in region})]
    start, own = step.given["start"] or 0, step.place(part, dim)
    last = _from_the_end(step, step.given["end"], place.more)
    fits = own is not None and own.more == place.more - start and last == place.more and step.given["step"] == 1
    if not isinstance(start, int) or start < 0 or not fits:
        raise StuckError("writes at a place that is counted from its end")
    return [Fact(fact.places, {r: known for r, known in step.fact(part).ranges.items() if dim in r})]


def differences(step: Step) -> list[Fact]:
    """Of neighbours, after what is put before them."""
    source, dim = step.node.operands[0], step.given["dim"] % len(step.node.results[0].shape)
    place, prepend = step.place(source, dim), step.given["prepend"]
    if place is None:
        return step.follow()
    first = prepend.shape[dim] if isinstance(prepend, Value) else 0
    if step.given["n"] != 1 or step.given["append"] is not None or not isinstance(first, int):
        raise StuckError("adds to its end")
    return [Fact({**step.fact(source).places, dim: replace(place, more=place.more + first - 1)})]


# -- places that are computed -------------------------------------------------------------------------


def looked_up(step: Step) -> list[Fact]:
    """Elements of operand 0 at places that other operands say: they have to be known to be before the length."""
    source, structure = step.node.operands[0], step.rule.signature(step.node) if step.rule else None
    if not isinstance(structure, Signature):
        return step.follow()
    at = {d: index for d, index in _indices(step, len(source.shape)).items() if d in step.fact(source).places}
    (fact,) = step.follow(frozenset(letter for d in at for letter in structure.operands[0][d]))
    known: dict[Region, Range] = {}
    for region in fact.regions:
        inside = {letter for d in region for letter in structure.results[0][d]}
        sides: dict[int, bool | None] = {}
        for d, index in at.items():
            letters = structure.operands[step.node.operands.index(index, 1)]
            own = frozenset(i for i in step.fact(index).places if inside.intersection(letters[i]))
            sides[d] = _side(step.place(source, d), step.range(index, own))
        if None in sides.values():
            if not region:
                raise StuckError("looks up places that may be past its end")
        elif set(step.fact(source).places) == set(at):
            known[region] = step.range(source, frozenset(d for d, past in sides.items() if past))
    return [Fact(fact.places, known)]


def _indices(step: Step, rank: int) -> Mapping[int, Value]:
    """The operand that tells the places in a dim."""
    listed = step.given.get("indices")
    if isinstance(listed, Sequence):
        return {dim: index for dim, index in enumerate(listed) if index is not None}
    return {step.given["dim"] % max(rank, 1): step.given["index"]}


def _side(place: Place | None, known: Range) -> bool | None:
    """Whether places are past the length (True), before it (False), or it is not known (None)."""
    assert place is not None
    if NO.low.at_most(known.low) and known.high.at_most(Bound(given=1, more=place.more - 1)):
        return False
    return True if Bound(given=1, more=place.more).at_most(known.low) else None


def embedded(step: Step) -> list[Fact]:
    """Rows of a table: a place that grows with the length has to be one."""
    table, indices = step.node.operands
    rows = step.given.get("size") or table.shape[0]
    for region in step.fact(indices).regions:
        known = step.range(indices, region)
        if known.constant is not None and not 0 <= known.constant < rows:
            raise StuckError(f"has no row {known.constant:g}")
        if known.high.padded == 1 and known.high.given == 0:
            step.sizes.at_most(int(rows) - known.high.more - 1)
        elif known.high.padded > 0:
            raise StuckError("looks up places that may be past the end of a table")
    return step.follow()


# -- ops that mask ------------------------------------------------------------------------------------


def masked_softmax(step: Step) -> list[Fact]:
    """Softmax over it: minus infinity past the length is as if it were not there, and gives zeros."""
    source = step.node.operands[0]
    dim = step.given["dim"] % max(len(source.shape), 1)
    if step.place(source, dim) is None:
        return step.follow()
    if step.range(source, frozenset({dim})).constant != -INFINITY:
        raise StuckError("looks along all of it, with no mask that says -inf past its end", (source,), (0, 1))
    (fact,) = step.follow(frozenset({f"d{dim}"}))
    return [Fact(fact.places, {frozenset({dim}): NO})]


def attended(step: Step) -> list[Fact]:
    """Attention sees the keys up to a query's own place, or those that a mask or a mark of theirs has, or is told."""
    _, keys = _tokens(step)
    if step.given["dropout_p"]:
        _check_drawn(step.fact(step.given["query"]).places)
    if keys is None:  # rows that only pad
        return step.follow(frozenset("q"))
    mask = next(iter(_truths(step)), step.given.get("attn_mask"))
    if isinstance(mask, Value) and not step.tells and told(step):
        why = "sees keys past the end of what was given: nothing says that its mask hides them"
        raise StuckError(why, (mask,), (0, 1), tells=True)
    return step.follow(frozenset("qk"))


def told(step: Step) -> bool:
    """Whether the runtime is told how many keys there are: it is attention, and nothing else hides the others."""
    if step.rule is None or step.rule.past is not attended:
        return False
    queries, keys = _tokens(step)
    if keys is None:
        return False
    right = bounds(step.node)[1]
    if right is not None and queries is not None and queries.more + right <= keys.more:
        return False
    mask = step.given.get("attn_mask")
    hides = isinstance(mask, Value) and _last(step, mask) == (-INFINITY if mask.dtype.is_floating_point else 0)
    return not hides and all(_last(step, mark) != 0 for mark in _truths(step))


def _tokens(step: Step) -> tuple[Place | None, Place | None]:
    """Of the queries and of the keys of attention."""
    dim = len(step.node.results[0].shape) - 2
    return step.place(step.given["query"], dim), step.place(step.given["key"], dim)


def _truths(step: Step) -> Sequence[Value]:
    """The marks of keys alone that attention looks at."""
    return step.given.get("of_key", ())[len(step.given.get("compare", ())) :]


def _last(step: Step, mask: Value) -> float | None:
    """What stands past the end of a mask's last dim, where that is one number."""
    at = frozenset({len(mask.shape) - 1})
    return step.range(mask, at).constant if at <= set(step.fact(mask).places) else None


def dropped(step: Step) -> list[Fact]:
    """Dropout: the runtime is told which dims are longer, and counts elements as if they were not."""
    _check_drawn(step.fact(step.node.operands[0]).places)
    return [Fact(fact.places) for fact in step.follow()]


def drawn(step: Step) -> tuple[int, ...]:
    """The dims that are longer of what a node draws random numbers for: () where it draws none."""
    probability = step.given.get("p", step.given.get("dropout_p"))
    if not draws_numbers(step.node.op) or probability == 0:
        return ()
    if "dropout_p" not in step.given:
        return tuple(step.fact(step.node.operands[0]).places)
    rank = len(step.node.results[0].shape)  # of the probabilities too: [..., queries, keys]
    places = {rank - 2: step.given["query"], rank - 1: step.given["key"]}
    return tuple(dim for dim, value in places.items() if rank - 2 in step.fact(value).places)


def _check_drawn(places: Mapping[int, Place]) -> None:
    if not all(place.alone for place in places.values()):
        raise StuckError("draws random numbers for a dim that it is merged in")


def counted(step: Step) -> list[Fact]:
    """Cross entropy over tokens: what is past the length must be targets that it ignores."""
    target = step.node.operands[1]
    if target.dtype.is_floating_point or step.given["reduction"] == 0:
        return step.follow()
    ignored = step.given["ignore_index"]
    fact = step.fact(target)
    for region in fact.regions:
        if region and step.range(target, region).constant != ignored:
            why = f"counts targets past the end of what was given: nothing says that they are {ignored}"
            raise StuckError(why, (target,), (ignored,))
    return step.follow(frozenset(letter for letter in _letters_of(step) if letter.startswith("t")))


def _letters_of(step: Step) -> frozenset[str]:
    structure = step.rule.signature(step.node) if step.rule else None
    return frozenset(getattr(structure, "letters", ()))


# -- tensors of sizes ---------------------------------------------------------------------------------


def created(step: Step) -> list[Fact]:
    """A tensor that is made of numbers: the same one to an end, or the places themselves."""
    name, given = schema_name(step.node.op)[1], step.given
    (result,) = step.node.results
    places: dict[int, Place] = {}
    for dim, size in enumerate(result.shape):
        if step.sizes.depends(size):
            more = step.sizes.more(size)
            if more is None:
                raise StuckError(f"makes a dim of {size} elements of it")
            places[dim] = Place(more=more)
    fact = Fact(places)
    if name in _FILLED:
        value = given["fill_value"] if name == "full" else _FILLED[name]
        if any(map(step.sizes.depends, leaves(value))):
            raise StuckError("computes with the length as a number")
        known = isinstance(value, bool | int | float)
        return [Fact(places, dict.fromkeys(fact.regions, number(value)))] if known else [fact]
    if name == "arange":
        return [_counting(step, fact)]
    if places or any(map(step.sizes.depends, leaves(list(given.values())))):
        raise StuckError("makes a tensor of it that no one knows")
    return [NOTHING]


_FILLED = {"full": 0, "zeros": 0, "ones": 1}


def _counting(step: Step, fact: Fact) -> Fact:
    """``arange``: from a number, by ones."""
    start, by = step.given.get("start", 0), step.given.get("step", 1)
    if any(map(step.sizes.depends, (start, by))):
        raise StuckError("computes with the length as a number")
    if not fact.places:
        return fact
    if not isinstance(start, int) or by != 1:
        return fact
    end = start + fact.places[0].more
    first, last, all_ = Bound(more=start), Bound(given=1, more=end - 1), Bound(padded=1, more=end - 1)
    past = Range(Bound(given=1, more=end), all_)
    return Fact(fact.places, {frozenset(): Range(first, last), frozenset({0}): past})
