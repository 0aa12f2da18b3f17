"""The placement algebra: types, duals and the table of conversions on one mesh axis, and types on several.

A *type* says what each of the n ranks of one mesh axis holds of a value:

====  ===========  ==================================================  ==============
type  name         every rank holds                                    cotangent type
====  ===========  ==================================================  ==============
I     invariant    the same value; every rank does the same work       I
R     replicated   the same value; each rank may use it differently    P
P     partial      a term; the value is the sum over the ranks         R
S(f)  sharded      its own block of the run of factors ``f``           S(f)
====  ===========  ==================================================  ==============

A *conversion* joins two types of one value. Its backward is not chosen: it is the conversion from
the dual of the target to the dual of the source. ``CONVERSIONS`` lists both as *actions*, which are
what the ranks do. Everything here is a table or a lookup in one; nothing knows torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable


class Kind(str, Enum):
    """The four kinds of type."""

    I = "I"  # noqa: E741 - the algebra's own name
    R = "R"
    P = "P"
    S = "S"

    def __repr__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Type:
    """A type on one axis; ``over`` is the run of factors that a shard cuts, outermost first.

    ``stored``: a shard that is kept and not computed with. It is gathered for use, and lies inside all others.
    """

    kind: Kind
    over: tuple[Hashable, ...] = ()
    stored: bool = False

    def __post_init__(self) -> None:
        if (self.kind is Kind.S) != bool(self.over):
            raise ValueError(f"{self.kind.value} over {self.over!r}: a shard, and only a shard, has factors")

    def __repr__(self) -> str:
        text = self.kind.value if self.kind is not Kind.S else f"S({'·'.join(map(str, self.over))})"
        return f"stored {text}" if self.stored else text


I = Type(Kind.I)  # noqa: E741 - the algebra's own name
R = Type(Kind.R)
P = Type(Kind.P)


def S(*over: Hashable) -> Type:  # noqa: N802 - the algebra's own name
    """The shard over a run of factors."""
    return Type(Kind.S, over)


class Joint(tuple[Type, ...]):
    """The types of one value on all axes of a mesh, in mesh order.

    Where several axes cut one run of factors, the later axis cuts the blocks of the earlier one; a stored shard is
    innermost wherever its axis stands.
    """

    __slots__ = ()

    @property
    def over(self) -> tuple[Hashable, ...]:
        """The factors that any axis cuts."""
        return tuple(factor for kind in self for factor in kind.over)

    @property
    def order(self) -> tuple[int, ...]:
        """The axes from the outermost to the innermost."""
        return tuple(sorted(range(len(self)), key=lambda index: (self[index].stored, index)))

    def replaced(self, axes: Iterable[int], kind: Type) -> Joint:
        """With another type on these axes."""
        at = frozenset(axes)
        return Joint(kind if index in at else own for index, own in enumerate(self))

    def __repr__(self) -> str:
        return ", ".join(map(repr, self))


_DUAL = {Kind.I: I, Kind.R: P, Kind.P: R}


def dual(of: Type) -> Type:
    """The type of the cotangent of a value of type ``of``."""
    return _DUAL.get(of.kind, of)


class Action(str, Enum):
    """What the ranks of an axis do to go from one type to another."""

    NONE = "none"  # nothing
    ALL_REDUCE = "all_reduce"  # sum over the ranks, result everywhere
    ALL_GATHER = "all_gather"  # blocks of all ranks, joined, everywhere
    REDUCE_SCATTER = "reduce_scatter"  # sum over the ranks, each keeps its block
    ALL_TO_ALL = "all_to_all"  # blocks of one factor for blocks of another
    SEND_RECV = "send_recv"  # the own block to the next rank; inside an op only: it joins no two types
    SPLIT = "split"  # keep the own block; local
    KEEP = "keep"  # the first rank keeps its value, the others take zeros; local
    PAD = "pad"  # zeros in place of the other ranks' blocks; local

    @property
    def communicates(self) -> bool:
        """Whether bytes leave the rank."""
        return self in _VOLUME


_VOLUME = {
    Action.ALL_REDUCE: lambda n: (2 * (n - 1), n),
    Action.ALL_GATHER: lambda n: (n - 1, n),
    Action.REDUCE_SCATTER: lambda n: (n - 1, n),
    Action.ALL_TO_ALL: lambda n: (n - 1, n * n),
    Action.SEND_RECV: lambda n: (1, n),
}


def volume(action: Action, n: int) -> tuple[int, int]:
    """Bytes a rank sends, as a fraction (numerator, denominator) of the full value's bytes.

    Ring algorithms: all-gather and reduce-scatter send (n-1)/n of the value, all-reduce is the two in
    turn, all-to-all sends (n-1)/n of the rank's own block, send-recv that block. Local actions send nothing.
    """
    return _VOLUME[action](n) if action in _VOLUME else (0, 1)


@dataclass(frozen=True, slots=True)
class Conversion:
    """One row of the table: an arrow between kinds, with what it does forward and backward."""

    source: Kind
    target: Kind
    forward: Action
    backward: Action
    note: str


_ROWS = (
    Conversion(Kind.I, Kind.R, Action.NONE, Action.ALL_REDUCE, "Megatron's f; on a parameter the gradient hook"),
    Conversion(Kind.R, Kind.I, Action.NONE, Action.KEEP, "the cotangent stays on one rank"),
    Conversion(Kind.P, Kind.I, Action.ALL_REDUCE, Action.NONE, "Megatron's g"),
    Conversion(Kind.P, Kind.S, Action.REDUCE_SCATTER, Action.ALL_GATHER, "leaving a tensor-parallel region"),
    Conversion(Kind.S, Kind.R, Action.ALL_GATHER, Action.REDUCE_SCATTER, "entering a tensor-parallel region"),
    Conversion(Kind.S, Kind.I, Action.ALL_GATHER, Action.SPLIT, "before invariant work"),
    Conversion(Kind.I, Kind.S, Action.SPLIT, Action.ALL_GATHER, "after invariant work"),
    Conversion(Kind.R, Kind.S, Action.SPLIT, Action.PAD, "local both ways"),
    Conversion(Kind.R, Kind.P, Action.KEEP, Action.KEEP, "joins a partial sum"),
    Conversion(Kind.I, Kind.P, Action.KEEP, Action.NONE, "joins a partial sum"),
    Conversion(Kind.S, Kind.P, Action.PAD, Action.SPLIT, "joins a partial sum"),
    Conversion(Kind.S, Kind.S, Action.ALL_TO_ALL, Action.ALL_TO_ALL, "another factor"),
)
CONVERSIONS: dict[tuple[Kind, Kind], Conversion] = {(row.source, row.target): row for row in _ROWS}

# A value that autograd does not reach has no I (it would equal R) and nothing runs backward.
_ROWS_WITHOUT_GRADIENT = (
    Conversion(Kind.P, Kind.R, Action.ALL_REDUCE, Action.NONE, "no gradient"),
    Conversion(Kind.P, Kind.S, Action.REDUCE_SCATTER, Action.NONE, "no gradient"),
    Conversion(Kind.S, Kind.R, Action.ALL_GATHER, Action.NONE, "no gradient"),
    Conversion(Kind.R, Kind.S, Action.SPLIT, Action.NONE, "no gradient"),
    Conversion(Kind.R, Kind.P, Action.KEEP, Action.NONE, "no gradient"),
    Conversion(Kind.S, Kind.P, Action.PAD, Action.NONE, "no gradient"),
    Conversion(Kind.S, Kind.S, Action.ALL_TO_ALL, Action.NONE, "no gradient"),
)
CONVERSIONS_WITHOUT_GRADIENT: dict[tuple[Kind, Kind], Conversion] = {
    (row.source, row.target): row for row in _ROWS_WITHOUT_GRADIENT
}


def conversion(source: Type, target: Type, *, gradient: bool = True) -> Conversion | None:
    """The direct conversion from ``source`` to ``target``, or None where there is none (or nothing to do)."""
    table = CONVERSIONS if gradient else CONVERSIONS_WITHOUT_GRADIENT
    return None if source == target else table.get((source.kind, target.kind))


Order = Literal["contiguous", "zigzag"]


@dataclass(frozen=True, slots=True)
class Replicate:
    """What users write for I or R: the solver picks by what the gradient needs."""

    def __repr__(self) -> str:
        return "Replicate"


@dataclass(frozen=True, slots=True)
class Partial:
    """What users write for P."""

    def __repr__(self) -> str:
        return "Partial"


@dataclass(frozen=True, slots=True)
class Shard:
    """What users write for S: a dim by name (``seq``, ``out``) or by index."""

    dim: str | int
    order: Order = "contiguous"

    def __repr__(self) -> str:
        return f"Shard({self.dim})" if self.order == "contiguous" else f"Shard({self.dim}, {self.order})"


@dataclass(frozen=True, slots=True)
class Auto:
    """What users write to leave the choice to the solver."""

    def __repr__(self) -> str:
        return "auto"


Placement = Replicate | Partial | Shard | Auto
