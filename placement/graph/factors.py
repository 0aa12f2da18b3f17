"""Dims as ordered products of factors, inferred over the whole graph.

Ops unify the factors of the dims that they align; a view that cuts a dim cuts its factor everywhere
(``q_proj.out`` becomes kv_heads · group · head_dim). So ``Shard(seq)`` means the same factor before and
after any transpose or reshape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from placement.graph.inference import Inference, MismatchError, Part, SignatureOf, Structure, size_of
from placement.graph.ir import Graph, Node, Value
from placement.graph.segments import Factor, Factors, extent, flattened, holds

_Places = dict[Factor, tuple[int, int, bool] | None]


@dataclass(frozen=True, slots=True, eq=False)
class Dims:
    """The factors of every dim of every value, of every letter of every node, and of every name."""

    values: Mapping[Value, tuple[Factors, ...]]
    letters: Mapping[Node, Mapping[str, Factors]]
    names: Mapping[str, Factors]
    opaque: frozenset[Node]  # nodes that no factor passes through: their regrouping cuts across factors
    signatures: Mapping[Node, Structure]
    _places: dict[Value, _Places] = field(default_factory=dict, init=False, repr=False)

    def signature(self, node: Node) -> Structure:
        """The index structure of ``node``, None where no rule knows it."""
        return self.signatures[node]

    def of(self, value: Value) -> tuple[Factors, ...]:
        """The factors of each dim of ``value``, outermost first."""
        return self.values[value]

    def locate(self, value: Value, run: Factors) -> tuple[int, Factors] | None:
        """The dim of ``value`` that holds ``run`` side by side and the factors before it in that dim.

        A run may lie in every segment of a sum; before it is then what is before the sum (see ``segments``). None
        where there is no such dim or a factor of the run occurs twice in the value.
        """
        place = self._place(value, run)
        return None if place is None else (place[0], self.values[value][place[0]][: place[1]])

    def segments(self, value: Value, run: Factors) -> tuple[tuple[Factors, int], ...]:
        """Where the run lies in a sum: what is before it in each segment, and the segment's size. () for no sum."""
        place = self._place(value, run)
        if place is None or not place[2]:
            return ()
        dim, position, _ = place
        found = self.values[value][dim][position].segments
        return tuple((one[: one.index(run[0])], int(extent(one))) for one in found)

    def _place(self, value: Value, run: Factors) -> tuple[int, int, bool] | None:
        """The dim, the position in it of the run or of the sum that it lies in, and whether it lies in a sum."""
        places = self._places.get(value)
        if places is None:
            places = self._places[value] = _places(self.values[value])
        first = places.get(run[0])
        if first is None or len(run) == 1:
            return first
        dim, start, inside = first
        if inside:
            segments = self.values[value][dim][start].segments
            fits = all(places.get(f) == first for f in run) and all(holds(one, run) for one in segments)
        else:
            fits = all(places.get(f) == (dim, start + offset, False) for offset, f in enumerate(run))
        return first if fits else None

    def describe(self, value: Value) -> str:
        """``batch | seq | heads·head_dim``."""
        return " | ".join("·".join(map(str, f)) or "1" for f in self.values[value]) or "scalar"


def _places(dims: Sequence[Factors]) -> _Places:
    """Where each factor stands: its dim and position, or those of the sum that has it in every segment.

    None for one that occurs twice, or in some segments only.
    """
    places: _Places = {}
    for dim, factors in enumerate(dims):
        for position, factor in enumerate(factors):
            places[factor] = None if factor in places else (dim, position, False)
            inside = dict.fromkeys(flattened(f for segment in factor.segments for f in segment))
            for inner in inside:
                everywhere = all(holds(segment, (inner,)) for segment in factor.segments)
                places[inner] = (dim, position, True) if everywhere and inner not in places else None
    return places


@dataclass(frozen=True, slots=True)
class NamedDims:
    """A statement that names the dims of a value; ``where`` goes into the error."""

    value: Value
    names: tuple[str, ...]
    where: object = None


class NameClashError(ValueError):
    """One name for dims that cannot be the same."""

    def __init__(self, name: str, value: Value, where: object) -> None:
        super().__init__(f"dim '{name}' of {value.name} does not fit an earlier dim of that name")
        self.name, self.value, self.where = name, value, where


def infer(graph: Graph, signature_of: SignatureOf, named: Sequence[NamedDims] = ()) -> Dims:
    """The factors of every value of ``graph``. Raises NameClashError where one name is given to unequal dims."""
    work = Inference(signature_of)
    for item in (*graph.inputs, *graph.parameters):
        work.values[item.value] = work.dims(item.value.shape)
    for node in graph.nodes:
        work.visit(node)
    work.join()
    names: dict[str, list[Part]] = {}
    for statement in named:
        for name, parts in zip(statement.names, work.values[statement.value], strict=True):
            try:
                if name in names:
                    work.unify(names[name], parts)
                names.setdefault(name, parts)
            except MismatchError as error:
                raise NameClashError(name, statement.value, statement.where) from error
    return _freeze(work, names)


def _freeze(work: Inference, names: Mapping[str, list[Part]]) -> Dims:
    label: dict[int, str] = {}
    for name, parts in names.items():
        resolved = work.resolve(parts)
        for index, part in enumerate(resolved):
            label.setdefault(part.id, name if len(resolved) == 1 else f"{name}.{index}")
    made: dict[int, Factor] = {}
    # What an op takes apart counts pieces of a dim only where the dim goes on after it.
    counting = {
        part.id for dims in work.values.values() for dim in dims for part in work.resolve(dim)[:-1] if part.piece
    }

    def freeze(parts: Iterable[Part]) -> Factors:
        result = []
        for part in work.resolve(parts):
            if part.id not in made:
                name, segments = label.get(part.id, f"f{part.id}"), tuple(map(freeze, work.leaves(part)))
                made[part.id] = Factor(part.id, size_of(part.size), name, part.id in counting, segments)
            result.append(made[part.id])
        return tuple(result)

    return Dims(
        values={value: tuple(map(freeze, dims)) for value, dims in work.values.items()},
        letters={node: {k: freeze(v) for k, v in letters.items()} for node, letters in work.letters.items()},
        names={name: freeze(parts) for name, parts in names.items()},
        opaque=frozenset(work.opaque),
        signatures=work.signatures,
    )
