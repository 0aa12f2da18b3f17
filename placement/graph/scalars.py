"""Functions of scalars, such as attention's ``mask_mod`` and ``score_mod``, on tensors that broadcast.

Elementwise functions of scalars, and the elements of tensors that are looked up at them, are the same whether they are
worked out one by one or all at once. What else a function may do with a scalar is refused: to ask for its size, to take
a part of it, to branch on it, to write to it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from placement.graph._torch import aten
from placement.lang.diagnostics import Diagnostic, PlacementError

_ELEMENTWISE = frozenset({
    "abs", "absolute", "add", "and", "bitwise_and", "bitwise_left_shift", "bitwise_not", "bitwise_or",
    "bitwise_right_shift", "bitwise_xor", "bool", "ceil", "clamp", "clamp_max", "clamp_min", "clip", "clone", "cos",
    "cosh", "detach", "div", "divide", "double", "eq", "erf", "exp", "exp2", "expm1", "float", "floor", "floor_divide",
    "floordiv", "fmod", "full_like", "ge", "greater", "greater_equal", "gt", "half", "int", "invert", "isfinite",
    "isinf", "isnan", "isneginf", "isposinf", "le", "less", "less_equal", "lerp", "log", "log10", "log1p", "log2",
    "logical_and", "logical_not", "logical_or", "logical_xor", "long", "lshift", "lt", "masked_fill", "maximum",
    "minimum", "mod", "mul", "multiply", "nan_to_num", "ne", "neg", "negative", "not_equal", "ones_like", "or", "pos",
    "positive", "pow", "rand", "rdiv", "reciprocal", "relu", "remainder", "rfloordiv", "rlshift", "rmod", "rmul",
    "ror", "round", "rpow", "rrshift", "rshift", "rsqrt", "rsub", "rtruediv", "rxor", "sgn", "short", "sigmoid",
    "sign", "sin", "sinh", "softplus", "sqrt", "square", "sub", "subtract", "tan", "tanh", "to", "true_divide",
    "truediv", "trunc", "type", "type_as", "where", "xor", "zeros_like",
})  # fmt: skip
_SIZELESS = frozenset({"is_complex", "is_floating_point", "new_empty", "new_full", "new_ones", "new_zeros"})
_BRANCHES = frozenset({"__bool__", "__float__", "__index__", "__int__"})
_ASKED = frozenset({"device", "dtype", "layout", "requires_grad", "is_cuda", "is_cpu", "is_meta"})
_INDICES = frozenset({torch.int8, torch.int16, torch.int32, torch.int64})


def evaluated(function: Callable[..., Any], scalars: Sequence[Tensor]) -> tuple[Tensor, frozenset[int]]:
    """What ``function`` gives, and the positions of the scalars that it has read.

    Raises PlacementError (PLC407) for what would not be the same of tensors.
    """
    watch = _Watch(scalars)
    with watch:
        result = function(*scalars)
    return watch.scalar(result), frozenset(watch.read)


def followed(
    function: Callable[..., Any], score: Tensor, scale: float, indices: Sequence[Tensor]
) -> tuple[Tensor, Scores | None]:
    """What ``function`` makes of scores that are ``x · scale``, and the form that it has; None for any other.

    Raises PlacementError (PLC407) for what would not be the same of tensors.
    """
    watch = _Watch((score, *indices))
    watch.forms[id(score)] = Scores(Fraction(scale))
    with watch:
        result = function(score, *indices)
    return watch.scalar(result), watch.forms.get(id(result))


@dataclasses.dataclass(frozen=True, slots=True)
class Scores:
    """``x · inner``, or ``outer · tanh(x · inner)``; plus what is ``added``, and -inf where not all of ``seen``."""

    inner: Fraction
    outer: Fraction | None = None
    added: tuple[Tensor, ...] = ()
    seen: tuple[Tensor, ...] = ()

    @property
    def scale(self) -> float:
        """As attention has it, which divides by the cap what it has scaled, and multiplies with it again."""
        return float(self.inner * (1 if self.outer is None else self.outer))

    @property
    def cap(self) -> float | None:
        """What they stay within before anything is added."""
        return None if self.outer is None else float(abs(self.outer))

    def after(self, name: str, given: Sequence[Any]) -> Scores | None:
        """What they are after a function, in whose arguments they stand as None; None for another form."""
        bare = not self.added and not self.seen
        match name, *given:
            case "tanh", None if bare and self.outer is None:
                return dataclasses.replace(self, outer=Fraction(1))
            case ("mul" | "multiply", None, int() | float() as factor) | (
                "mul" | "multiply",
                int() | float() as factor,
                None,
            ) if bare and _divides(factor):
                return self._times(Fraction(factor))
            case "div" | "divide" | "true_divide", None, int() | float() as divisor if bare and _divides(divisor):
                return self._times(1 / Fraction(divisor))
            case ("add", None, Tensor() as more) | ("add", Tensor() as more, None) if more.ndim:
                return dataclasses.replace(self, added=(*self.added, more))
            case "sub" | "subtract", None, Tensor() as less if less.ndim:
                return dataclasses.replace(self, added=(*self.added, -less))
            case "where", Tensor() as seen, None, float() as least if least == -math.inf and seen.ndim:
                return dataclasses.replace(self, seen=(*self.seen, seen))
            case ("where", Tensor() as hidden, float() as least, None) | (
                "masked_fill",
                None,
                Tensor() as hidden,
                float() as least,
            ) if least == -math.inf and hidden.ndim:
                return dataclasses.replace(self, seen=(*self.seen, ~hidden))
            case _:
                return None

    def _times(self, factor: Fraction) -> Scores:
        if self.outer is None:
            return dataclasses.replace(self, inner=self.inner * factor)
        return dataclasses.replace(self, outer=self.outer * factor)


def _divides(number: float) -> bool:
    return math.isfinite(number) and number != 0


@dataclasses.dataclass(frozen=True, slots=True)
class _Rows:
    """A tensor of which some dims have been looked up: ``table[batch]``, of which ``[query]`` is asked next."""

    table: Tensor
    at: tuple[Any, ...]

    def __getitem__(self, at: Any) -> Any:
        return self.table[(*self.at, *(at if isinstance(at, tuple) else (at,)))]

    def __getattr__(self, name: str) -> Any:
        raise _refused(f"'{name}' of a row")

    @classmethod
    def __torch_function__(cls, func: Any, _: Any, __: Any = (), ___: Any = None) -> Any:
        raise _refused(f"'{getattr(func, '__name__', func)}' of a row")


class _Watch(TorchFunctionMode):
    """Refuses what is not the same of scalars, and follows what becomes of scores."""

    def __init__(self, scalars: Sequence[Tensor]) -> None:
        super().__init__()
        self.positions = {id(scalar): position for position, scalar in enumerate(scalars)}
        self.scalars = {id(scalar): scalar for scalar in scalars}  # kept, so that no other tensor has their ids
        self.forms: dict[int, Scores] = {}
        self.read: set[int] = set()

    def scalar(self, result: Any) -> Tensor:
        """The function's result, which is a scalar too."""
        if not isinstance(result, Tensor) or (id(result) not in self.scalars and result.ndim):
            raise _refused("what it gives")
        if id(result) in self.positions:
            self.read.add(self.positions[id(result)])
        return result

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(_leaves((args, kwargs)))
        mine = [one for one in given if id(one) in self.scalars]
        if not mine:
            return func(*args, **kwargs)
        self.read.update(self.positions[id(one)] for one in mine if id(one) in self.positions)
        name = func.__name__
        if name == "__get__" and func.__self__.__name__ in _ASKED:
            return func(*args, **kwargs)
        if name == "__getitem__":
            return self._looked_up(*args)
        if name in _SIZELESS and given[0] is mine[0]:
            return func(*args, **kwargs)
        plain = name.strip("_") if name.startswith("__") else name
        if name in _BRANCHES or plain not in _ELEMENTWISE or "out" in kwargs:
            raise _refused(f"'{func.__self__.__name__ if name == '__get__' else plain}'")
        return self._elementwise(func, plain, args, kwargs, mine)

    def _elementwise(self, func: Any, name: str, args: Any, kwargs: Any, mine: Sequence[Tensor]) -> Any:
        others = [one for one in _leaves((args, kwargs)) if isinstance(one, Tensor) and id(one) not in self.scalars]
        if any(one.ndim for one in others):
            raise _refused(f"'{name}' with all of another tensor")
        # A number that is a tensor counts for the result's dtype where the others are tensors of no dims as well.
        wide = {id(one): one.unsqueeze(0) for one in others if {one.dtype} != {two.dtype for two in mine}}
        if wide:
            args = tuple(wide.get(id(one), one) for one in args)
            kwargs = {key: wide.get(id(one), one) for key, one in kwargs.items()}
        result = func(*args, **kwargs)
        if not any(result is one for one in mine):  # as ``to`` the dtype that it has
            self.scalars[id(result)] = result
            found = [self.forms[id(one)] for one in mine if id(one) in self.forms]
            if len(found) == 1 and not kwargs:
                form = found[0].after(name, [None if id(one) in self.forms else one for one in args])
                self.forms.update({id(result): form} if form is not None else {})
        return result

    def _looked_up(self, table: Any, at: Any) -> Any:
        places = at if isinstance(at, tuple) else (at,)
        if id(table) in self.scalars or not all(map(self._is_index, places)) or len(places) > table.ndim:
            raise _refused("a part that is looked up")
        if len(places) < table.ndim:
            return _Rows(table, places)
        for dim, place in reversed(list(enumerate(places))):
            if isinstance(place, int):
                table = table.select(dim, place)
        result = aten.index.Tensor(table, [place for place in places if isinstance(place, Tensor)])
        self.scalars[id(result)] = result
        return result

    def _is_index(self, at: Any) -> bool:
        if isinstance(at, Tensor):
            return at.dtype in _INDICES and (id(at) in self.scalars or not at.ndim)
        return isinstance(at, int) and not isinstance(at, bool)


def _leaves(tree: Any) -> Any:
    if isinstance(tree, tuple | list):
        for one in tree:
            yield from _leaves(one)
    elif isinstance(tree, Mapping):
        yield from _leaves(tuple(tree.values()))
    else:
        yield tree


def _refused(what: str) -> PlacementError:
    text = f"{what} cannot be captured in a function of flex_attention's scalars"
    hint = "use elementwise functions of the scalars, and look tensors up at one index for each of their dims"
    return PlacementError([Diagnostic("PLC407", text, hint=hint)])
