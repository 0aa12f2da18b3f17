"""What a rule is, and the registry.

A rule states an op's index structure once; its strategies on any axis, forward and backward, follow
from it (``strategies``). A rule may add *implementations*: ways to compute the op that accept what its
plain form does not, with communication inside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from placement.graph._torch import op_of
from placement.graph.ir import Node, Size, Value, arguments, op_name
from placement.graph.segments import Factor
from placement.graph.signature import Regrouping, Signature, expand, parse
from placement.types import Action, Type

if TYPE_CHECKING:
    from placement.rules.bounds import Bounds
    from placement.rules.past import Past
    from placement.rules.strategies import Context

SignatureRule = Callable[[Node], Signature | Regrouping | None]
Code = str | Callable[[Mapping[str, str]], str]


@dataclass(frozen=True, slots=True)
class Collective:
    """A launch inside an implementation: ``nbytes`` of the full value, in one direction of the step.

    like: the operand that is cut, on other axes of the mesh, as what is sent is; None for what is never cut. but: it
    happens once for each rank of the axis but so many; None: once. behind: it runs behind the op's own work, of which
    there is as much for each rank. summed: the dtype of floating-point numbers that it sums, which a spec may have done
    in another; None for anything else.
    """

    action: Action
    nbytes: int
    phase: str  # "forward" or "backward"
    like: int | None = None
    but: int | None = None
    behind: bool = False
    summed: torch.dtype | None = None

    def times(self, n: int) -> int:
        """How often it is launched on an axis of ``n`` ranks."""
        return 1 if self.but is None else max(0, n - self.but)


@dataclass(frozen=True, slots=True)
class Form:
    """One way to run an op: the types it takes and gives, and what it sends meanwhile.

    code is a template over the op's argument names, ``{axis}`` and, for a sharded operand or result,
    ``{NAME_cut}`` (``dim, outer, segments=(2, 1, 1)``, as much of it as there is). whole: factors that no other axis
    may cut at the same time. met: operands, by position, of which a rank meets every block in turn.
    """

    operands: tuple[Type, ...]
    results: tuple[Type, ...]
    collectives: tuple[Collective, ...] = ()
    code: Code | None = None
    whole: tuple[Factor, ...] = ()
    met: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Implementation:
    """A named way to compute an op. ``forms`` lists what it offers for a node; it may offer nothing.

    On several axes of a mesh all may run it, as one group, where they cut the same run of factors, or any runs if
    it ``counts`` only. ``joins`` names other implementations that may run on other axes at the same time: this one's
    code gets their axes as fields of these names. ``joined``: it also runs where other ops become one with this.
    """

    name: str
    forms: Callable[[Node, Context], Iterable[Form]]
    counts: bool = False
    joins: tuple[str, ...] = ()
    joined: bool = False


@dataclass(frozen=True, slots=True)
class Way:
    """A way to run an op on an axis, by the name that a ``strategy`` line gives it.

    letters: it cuts one of these in operand 0. implementations: what then runs, '' for the plain form. refused: why a
    node cannot be run so on an axis, asked where it cannot.
    """

    name: str
    letters: tuple[str, ...]
    refused: Callable[[Node, Context], str]
    implementations: tuple[str, ...] = ("",)


@dataclass(frozen=True, slots=True)
class Rule:
    """Everything the compiler knows of one op.

    signature: the index structure for a node. flops: forward, from the local extent of each letter.
    code: how the call is written, a template over argument names; None writes the op itself.
    shape: the argument that holds the result's sizes; piece: the argument that holds a piece's size;
    pieces: the argument that lists the sizes of all pieces. along: arguments that are places in the dim ``dim`` of
    operand 0, or lengths along it. view: whether the op moves no data.
    saves: what the backward needs, as ``saved`` reads it; None where that follows from the signature. padded: the op
    that does the same with operand 0 made longer in a dim that no other tensor has, and is told its own ``size``.
    layer: whether the op multiplies the last dim of operand 0 with a weight [out, in], and does nothing else.
    finite: operands, by index, or True for all: where these hold numbers, whatever they are, the result does too.
    past: what an op that looks along a dim makes of one that is longer than it was given (see ``past``); None where
    that follows from the signature. bounds: which numbers the result may have, from those of the arguments.
    ways: what a ``strategy`` line may ask for.
    """

    signature: SignatureRule
    flops: Callable[[Mapping[str, int]], int] | None = None
    code: Code | None = None
    shape: str | None = None
    piece: str | None = None
    pieces: str | None = None
    along: tuple[str, ...] = ()
    view: bool = False
    implementations: tuple[Implementation, ...] = field(default=())
    saves: str | None = None
    padded: Any = None
    layer: bool = False
    finite: frozenset[int] | bool = False
    past: Past | None = None
    bounds: Bounds | None = None
    ways: tuple[Way, ...] = ()

    def keeps_finite(self, index: int) -> bool:
        """Whether the result is a number wherever operand ``index`` is one."""
        return self.finite if isinstance(self.finite, bool) else index in self.finite


_RULES: dict[Any, Rule] = {}
_PACKETS: dict[Any, Any] = {}  # by overload: torch takes its time to tell


def rule(
    op: Any,
    signature: str | SignatureRule,
    *,
    blocked: str = "",
    linear: Iterable[int] = (),
    additive: bool | Iterable[int] = False,
    flops: Callable[[Mapping[str, int]], int] | None = None,
    code: Code | None = None,
    shape: str | None = None,
    piece: str | None = None,
    pieces: str | None = None,
    along: Iterable[str] = (),
    view: bool = False,
    implementations: Iterable[Implementation] = (),
    saves: str | None = None,
    padded: Any = None,
    layer: bool = False,
    finite: Iterable[int] | bool = False,
    past: Past | None = None,
    bounds: Bounds | None = None,
    ways: Iterable[Way] = (),
) -> Rule:
    """Tell the compiler the index structure of an op; returns the registered rule.

    ``op`` is an overload (``torch.ops.aten.add.Tensor``), a packet (all its overloads), what
    ``torch.library.custom_op`` returns, or a list of such.
    ``signature`` is einsum-like: ``"* k, n k -> * n"``. Operands are the op's tensor arguments in order;
    ``*`` stands for any number of leading dims that align as in broadcasting, ``1`` for a dim of size one.
    A letter of operands that the result lacks is contracted (summed over) unless it is in ``blocked``,
    which lists letters that need their whole extent. ``linear`` lists the operands in which the op is
    linear by itself; ``additive`` those in which it is linear together, as a sum is (True: in all).
    Instead of text a function from the node to a ``Signature`` may be given. ``saves`` names the arguments that the
    backward needs (``"x, result"``), which the memory model counts. ``padded`` is an op with the same arguments and a
    ``size``, for operand 0 with zeros at the end of a dim that it alone has. ``layer``: the op is ``F.linear`` of two.
    ``finite``, ``past`` and ``bounds`` say what may stand beyond the end of a dim that is padded (see ``Rule``).
    ``ways`` are what a ``strategy`` line may ask for.

    An op that knows a weighted sum over tokens, ``mylib::pool(x[b, s, h], w[s]) -> [b, h]``:

        placement.rule(torch.ops.mylib.pool, "b s h, s -> b h", linear=(0, 1))

    lets batch and hidden be sharded, and the sequence too, with a partial result. A later rule for the
    same op replaces the earlier one. Raises ValueError where the text cannot be read or the options do not
    fit it, TypeError where ``op`` is no op.
    """
    made = Rule(
        signature=_from_text(signature, blocked, linear, additive) if isinstance(signature, str) else signature,
        flops=flops,
        code=code,
        shape=shape,
        piece=piece,
        pieces=pieces,
        along=tuple(along),
        view=view,
        implementations=tuple(implementations),
        saves=saves,
        padded=padded,
        layer=layer,
        finite=finite if isinstance(finite, bool) else frozenset(finite),
        past=past,
        bounds=bounds,
        ways=tuple(ways),
    )
    for one in op if isinstance(op, list | tuple) else (op,):
        known = op_of(one)
        if known is None:
            raise TypeError(f"{op_name(one)} is no op: give torch.ops.NAMESPACE.NAME, as captured programs call it")
        _RULES[known] = made
    return made


def _from_text(text: str, blocked: str, linear: Iterable[int], additive: bool | Iterable[int]) -> SignatureRule:
    needed, single = frozenset(blocked.split()), frozenset(linear)
    together = additive if isinstance(additive, bool) else frozenset(additive)
    _check_text(text, needed, single | (frozenset() if isinstance(together, bool) else together))

    def signature(node: Node) -> Signature | None:
        try:
            operands, results = expand(text, node)
        except ValueError:
            return None  # another overload, or optional operands that the text does not have
        joint = together if isinstance(together, frozenset) else frozenset(range(len(operands)) if together else ())
        return Signature(operands, results, needed, single, joint)

    return signature


def _check_text(text: str, blocked: frozenset[str], indices: frozenset[int]) -> None:
    operands, results = parse(text)
    dims = [dim for tensor in (*operands, *results) for dim in tensor]
    letters = {letter for dim in dims for letter in dim}
    for dim in dims:
        if len(dim) > 1:
            raise ValueError(f"{text!r} gives no sizes for ({' '.join(dim)}): give a function that returns a Signature")
    if not blocked <= letters:
        raise ValueError(f"{text!r} has no {', '.join(sorted(blocked - letters))} to block")
    if not indices <= set(range(len(operands))):
        raise ValueError(f"{text!r} has {len(operands)} operands, counted from 0")


def registered() -> tuple[Any, ...]:
    """Every op that has a rule, as it was registered: overloads and packets."""
    return tuple(_RULES)


def lookup(node: Node) -> Rule | None:
    """The rule for a node's op: of the overload, else of the packet."""
    found = _RULES.get(node.op)
    if found is not None:
        return found
    if node.op not in _PACKETS:
        _PACKETS[node.op] = getattr(node.op, "overloadpacket", None)
    return _RULES.get(_PACKETS[node.op])


def signature_of(node: Node) -> Signature | Regrouping | None:
    """The index structure of a node, None where no rule knows it."""
    found = lookup(node)
    return found.signature(node) if found else None


def sizes_on_rank(node: Node, operand: Sequence[Size], results: Sequence[Sequence[Size]]) -> dict[str, Any]:
    """The arguments that hold sizes, by name, on a rank where operand 0 and the results have these shapes."""
    found, given = lookup(node), arguments(node)
    local: dict[str, Any] = {}
    if found is None:
        return local
    if found.shape:
        asked, own = given[found.shape], tuple(results[0])
        keep = len(asked) == len(own)
        local[found.shape] = tuple(-1 if keep and asked[i] == -1 else s for i, s in enumerate(own))
    if found.piece:
        local[found.piece] = results[0][given["dim"]]
    dim = given.get("dim")
    if isinstance(dim, int) and (found.along or found.pieces):
        whole = node.operands[0].shape[dim]
        if isinstance(whole, int) and whole != operand[dim]:
            n = whole // int(operand[dim])
            if found.pieces:
                local[found.pieces] = tuple(size // n for size in given[found.pieces])
            local |= {name: _on_rank(given[name], whole, n) for name in found.along if given[name] is not None}
    return local


def _on_rank(place: int, whole: int, n: int) -> int:
    """A place in a dim of which a rank has an n-th; what lies past the end is left as it is."""
    return place if place >= whole else max(place + whole if place < 0 else place, 0) // n


def elementwise(
    node: Node, *, linear: Iterable[int] = (), additive: Iterable[int] = (), blocked: Iterable[int] = ()
) -> Signature:
    """All operands broadcast to the results' common shape; ``blocked`` lists result dims by index."""
    shape = node.results[0].shape
    rank = len(shape)

    def letters(value: Value) -> tuple[tuple[str, ...], ...]:
        offset = rank - len(value.shape)
        return tuple(
            () if size == 1 and shape[i + offset] != 1 else (f"d{i + offset}",) for i, size in enumerate(value.shape)
        )

    return Signature(
        operands=tuple(map(letters, node.operands)),
        results=tuple(map(letters, node.results)),
        blocked=frozenset(f"d{i % rank}" for i in blocked) if rank else frozenset(),
        linear=frozenset(linear),
        additive=frozenset(additive),
    )


def with_blocked(signature: Signature, blocked: Iterable[str]) -> Signature:
    """The signature with more letters blocked."""
    return dataclasses.replace(signature, blocked=signature.blocked | frozenset(blocked))


aten = torch.ops.aten
