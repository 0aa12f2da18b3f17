"""What each call is held to: the sizes and kinds of inputs that the program was made for."""

from __future__ import annotations

import inspect
from math import ceil, floor
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from placement.runtime.axis import Axis, MeshAxis
from placement.runtime.cuts import Cut, local_shape
from placement.runtime.errors import SizeError
from placement.runtime.lengths import Padded, lengthened
from placement.runtime.outputs import mapped

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import CodeType

    from placement.runtime.lengths import Lengths

Spec = tuple[Any, ...]  # (dims, cut), (dims, cut, kind) or (dims, cut, kind, whether a gradient may be asked for)

_REMEMBERED = 64  # kinds of calls

_FUNCTIONS = {
    "min": min,
    "max": max,
    "abs": abs,
    "ceil": ceil,
    "floor": floor,
    "float": float,
}  # what a requirement on sizes may call


class Guard:
    """The inputs of a program, as checks."""

    def __init__(
        self,
        inputs: Mapping[str, Spec],
        divides: Mapping[str, int],
        signature: inspect.Signature,
        requires: tuple[str, ...] = (),
        axes: Mapping[str, int] | None = None,
        uneven: Mapping[str, Padded | str] | None = None,
        *,
        same_blocks: bool,
    ) -> None:
        self.inputs = inputs
        self.divides = divides
        self.signature = signature
        self.requires = tuple((text, compile(text, "<requires>", "eval")) for text in requires)
        self.axes = dict(axes or {})
        self.uneven = dict(uneven or {})
        self.same_blocks = same_blocks
        kinds = {parameter.kind for parameter in signature.parameters.values()}
        named = kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}
        told = {how.told for how in self.uneven.values() if isinstance(how, Padded)}  # by the runtime, not by a caller
        asked = [parameter for name, parameter in signature.parameters.items() if name not in told]
        self._asked = signature.replace(parameters=asked)
        # None: what is given has to be sorted out.
        self._names = frozenset(self._asked.parameters) if named else None
        self._accepted: dict[tuple[Any, ...], Lengths] = {}  # by all that the checks look at, what they found

    def __deepcopy__(self, memo: dict[int, Any]) -> Guard:
        return self  # what it checks is never changed

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The call's arguments by name."""
        if not args and kwargs.keys() == self._names:  # nothing to sort out
            return kwargs
        return dict(self._asked.bind(*args, **kwargs).arguments)

    def layout(self, name: str) -> tuple[tuple[Axis, Cut], ...]:
        """Where the input ``name`` is cut."""
        return self.inputs[name][1] if name in self.inputs else ()

    def check(self, arguments: Mapping[str, Any], *, local: bool) -> Lengths:
        """Refuse sizes or kinds that the program was not made for; ``local`` where inputs are this rank's blocks.

        Returns the dims that have to be longer inside, by name: how long they are, and how long they have to be.

        Raises:
            SizeError: names the input, dim, size and axis.
            TypeError: a tensor of another kind (int for float).
        """
        known = self._inputs(arguments)
        seen: list[Any] = [local, torch.is_grad_enabled()]
        for name, x in known.items():
            seen += name, x.shape, x.dtype, x.requires_grad
        key = tuple(seen)
        lengths = self._accepted.get(key)
        if lengths is None:
            for name, x in known.items():
                _check_kind(name, x, self.inputs[name])
        if local and self.same_blocks:
            self._compare_blocks(known)
        if lengths is None:
            if len(self._accepted) >= _REMEMBERED:
                self._accepted.clear()
            lengths = self._accepted[key] = self._fitting(known, local=local)
        return lengths

    def _inputs(self, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
        """The inputs among the arguments, by dotted name."""
        found: dict[str, Tensor] = {}
        for name, value in arguments.items():
            if isinstance(value, Tensor):
                found[name] = value
            elif isinstance(value, (dict, list, tuple)):
                mapped(lambda full, values: found.update({full: values[0]}), [value], name)
        return {name: x for name, x in found.items() if name in self.inputs}

    def _fitting(self, known: Mapping[str, Tensor], *, local: bool) -> Lengths:
        """Refuse sizes; of those that are fine, which have to be others inside."""
        sizes: dict[str, tuple[int, str]] = {}
        for name, x in known.items():
            self._check_sizes(name, self._global_shape(name, x, local=local), sizes)
        given = {name: size for name, (size, _) in sizes.items()}
        self._check_requirements(given)
        return self._lengths(given)

    def lengthened(self, arguments: Mapping[str, Any], lengths: Lengths) -> dict[str, Any]:
        """The arguments, padded as ``check`` has found that they have to be."""
        return lengthened(arguments, {name: spec[0] for name, spec in self.inputs.items()}, self.uneven, lengths)

    def _lengths(self, given: Mapping[str, int]) -> Lengths:
        found: dict[str, tuple[int, int]] = {}
        for name, by in self.divides.items():
            size = given.get(name, 0)
            if size % by == 0:
                continue
            inside, how = size + -size % by, self.uneven[name]
            assert isinstance(how, Padded)  # others have been refused
            if size < how.least or (how.most is not None and inside > how.most):
                limit = f"from {how.least} on" + (f" up to {how.most}" if how.most is not None else "")
                raise SizeError(f"{name} has size {size}, padded to {inside}, a multiple of {by}; it works {limit}")
            found[name] = size, inside
        if found:
            self._check_requirements({**given, **{name: inside for name, (_, inside) in found.items()}})
        return found

    def _global_shape(self, name: str, x: Tensor, *, local: bool) -> tuple[int, ...]:
        shape = list(x.shape)
        for axis, cut in self.layout(name):
            if local:
                shape[cut.dim] *= axis.size
            local_shape(tuple(shape), cut, axis.size, f"input {name!r} on axis {axis.name!r}")
        return tuple(shape)

    def _check_sizes(self, name: str, shape: tuple[int, ...], sizes: dict[str, tuple[int, str]]) -> None:
        for dim, (size, wanted) in enumerate(zip(shape, self.inputs[name][0], strict=True)):
            where = f"dim {dim} of input {name!r}"
            if isinstance(wanted, int) and size != wanted:
                raise SizeError(f"{where} has size {size}; the program was made for {wanted}")
            if not isinstance(wanted, str):
                continue
            first, place = sizes.setdefault(wanted, (size, where))
            if first != size:
                raise SizeError(f"{where} ({wanted}) has size {size}, but {place} ({wanted}) has {first}")
            how = self.uneven.get(wanted, "")
            if size % self.divides.get(wanted, 1) and not isinstance(how, Padded):
                by = self.divides[wanted]
                named = " and ".join(repr(axis) for axis, n in self.axes.items() if n > 1 and by % n == 0)
                on = f" (axis {named})" if named else ""
                raise SizeError(
                    f"{where} ({wanted}) has size {size}, not a multiple of {by}{on}"
                    + (how and f", and cannot be padded: {how}")
                )

    def _check_requirements(self, sizes: Mapping[str, int]) -> None:
        for text, code in self.requires:
            names = [name for name in code.co_names if name not in _FUNCTIONS]
            if set(names) <= set(sizes) and not _holds(code, sizes):
                given = ", ".join(f"{name} = {sizes[name]}" for name in names)
                raise SizeError(f"the model branches on sizes, and was captured where {text}; here {given}")

    def _compare_blocks(self, tensors: Mapping[str, Tensor]) -> None:
        """Gather the sizes of sharded inputs on their axis: unequal ones would hang in a collective."""
        axes = {axis for name in tensors for axis, _ in self.layout(name) if isinstance(axis, MeshAxis)}
        for axis in sorted(axes, key=lambda axis: axis.name):
            names = [name for name in tensors if any(a is axis for a, _ in self.layout(name))]
            own = torch.tensor([size for name in names for size in tensors[name].shape], device=axis.device)
            every = own.new_empty(axis.size * own.numel())
            # Straight to torch.distributed: a check is no part of the program's recorded communication.
            dist.all_gather_single(every, own, group=axis.group)
            shapes = every.view(axis.size, -1).tolist()
            if any(row != shapes[0] for row in shapes):
                shown = "; ".join(f"rank {rank}: {row}" for rank, row in enumerate(shapes))
                raise SizeError(f"blocks of {', '.join(map(repr, names))} differ on axis {axis.name!r}: {shown}")


def _holds(code: CodeType, sizes: Mapping[str, int]) -> bool:
    """Whether a requirement holds; one that divides by a size of 0 does not."""
    try:
        return bool(eval(code, {"__builtins__": _FUNCTIONS}, dict(sizes)))  # noqa: S307 - our own text
    except ZeroDivisionError:
        return False


def _check_kind(name: str, x: Tensor, spec: Spec) -> None:
    if x.ndim != len(spec[0]):
        dims = ", ".join(map(str, spec[0]))
        raise SizeError(f"input {name!r} has shape {list(x.shape)}; the program was made for dims [{dims}]")
    if len(spec) > 2 and spec[2] is not None and kind(x.dtype) != spec[2]:
        raise TypeError(f"input {name!r} is {x.dtype}; the program was made for {spec[2]}")
    if len(spec) > 3 and not spec[3] and x.requires_grad and torch.is_grad_enabled():
        raise TypeError(
            f"input {name!r} requires a gradient, which the program was not made to give: "
            "compile with an example that requires it, or detach the input"
        )


def kind(dtype: torch.dtype) -> str:
    """The kind of a dtype: bool, int, float or complex."""
    if dtype.is_floating_point:
        return "float"
    if dtype.is_complex:
        return "complex"
    return "bool" if dtype is torch.bool else "int"
