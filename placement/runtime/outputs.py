"""What programs return, and how nested values are walked by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Output(dict[str, Any]):
    """Named results: ``out.loss``, ``out["loss"]``, ``out[0]``, and ``None`` for one that was not computed."""

    def __getattr__(self, name: str) -> Any:
        try:
            return dict.__getitem__(self, name)
        except KeyError:
            raise AttributeError(f"no output {name!r}: there are {', '.join(self)}") from None

    def __getitem__(self, key: str | int | slice) -> Any:
        return dict.__getitem__(self, key) if isinstance(key, str) else self.to_tuple()[key]

    def to_tuple(self) -> tuple[Any, ...]:
        """The results that were computed, in order."""
        return tuple(value for value in self.values() if value is not None)


def mapped(function: Callable[[str, list[Tensor]], Any], values: Sequence[Any], name: str = "") -> Any:
    """Map ``function(name, tensors)`` over values of one structure; ``tensors`` has one of each value.

    A tensor's name is its keys and indices joined with dots, ``output`` where it is the whole value.
    What is not a tensor or a container is kept as the first value has it.
    """
    first = values[0]
    if isinstance(first, Tensor):
        return function(name or "output", list(values))

    def child(key: Any) -> Any:
        return mapped(function, [value[key] for value in values], f"{name}.{key}" if name else str(key))

    if isinstance(first, dict):
        return type(first)({key: child(key) for key in first})
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*map(child, range(len(first))))
    if isinstance(first, (list, tuple)):
        return type(first)(map(child, range(len(first))))
    return first
