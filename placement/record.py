"""``@record``: a frozen, slotted dataclass whose methods are written once, not compiled for each class.

The decorator of the standard library writes six methods for a class and compiles them when its module is imported.
That is a millisecond a class, and the classes of the language would be a fifth of what ``placement fmt`` may take to
start. A record is a dataclass all the same: ``fields``, ``replace`` and ``match`` take it. Making one takes a few
microseconds more, so what is made for every token is a NamedTuple instead.
"""

from __future__ import annotations

from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from operator import attrgetter
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """The class as a dataclass, frozen and with slots. Methods that it has itself stay.

    Of ``field``'s options it takes ``default``, ``default_factory``, ``compare`` and ``repr``.
    """
    for name, method in _METHODS.items():
        if name not in cls.__dict__:
            setattr(cls, name, method)
    made: Any = dataclass(init=False, repr=False, eq=False, slots=True)(cls)
    made.__compared__ = _getter(tuple(f.name for f in fields(made) if f.compare))
    made.__shown__ = tuple(f.name for f in fields(made) if f.repr)
    made.__defaults__ = {f.name: f.default for f in fields(made) if f.default is not MISSING}
    made.__factories__ = {f.name: f.default_factory for f in fields(made) if f.default_factory is not MISSING}
    return made


def _getter(names: tuple[str, ...]) -> Any:
    """What gives the values of these fields, to be compared and hashed."""
    return staticmethod(attrgetter(*names) if names else _no_fields)


def _no_fields(_: object) -> tuple[()]:
    return ()


def _init(self: Any, *args: Any, **named: Any) -> None:
    names = self.__match_args__
    given = dict(zip(names, args, strict=False))
    if len(args) > len(names) or not named.keys() <= set(names[len(args) :]):
        raise TypeError(f"{type(self).__name__} takes {', '.join(names)}, each once")
    given |= named
    for name in names:
        if name not in given:
            if name in self.__defaults__:
                given[name] = self.__defaults__[name]
            elif name in self.__factories__:
                given[name] = self.__factories__[name]()
            else:
                raise TypeError(f"{type(self).__name__} lacks {name!r}")
        object.__setattr__(self, name, given[name])
    if hasattr(self, "__post_init__"):
        self.__post_init__()


def _repr(self: Any) -> str:
    return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in self.__shown__)})"


def _eq(self: Any, other: object) -> Any:
    return self.__compared__(self) == self.__compared__(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash(self.__compared__(self))


def _setattr(self: Any, name: str, value: object) -> None:
    del self, value
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _delattr(self: Any, name: str) -> None:
    del self
    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _reduce(self: Any) -> tuple[Any, tuple[Any, ...]]:
    """So that copies and pickles are made by calling the class: nothing can be set afterwards."""
    return type(self), tuple(getattr(self, name) for name in self.__match_args__)


_METHODS = {
    "__init__": _init,
    "__repr__": _repr,
    "__eq__": _eq,
    "__hash__": _hash,
    "__setattr__": _setattr,
    "__delattr__": _delattr,
    "__reduce__": _reduce,
}
