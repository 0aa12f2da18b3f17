"""What a comparison found: the worst error of each kind, and where it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from placement.report.units import plural

__all__ = ["Failure", "Parity", "Worst"]

_WIDTH = 80
_SHOWN = 8  # failures listed; the rest are counted
_LEFT = "{:<19} {:>5} {:>7}  {:>5}  "  # leaves room for `model.layers.0.self_attn.q_proj.weight`


@dataclass(frozen=True, slots=True)
class Worst:
    """The largest error of one kind: ``name`` is its tensor, '' where nothing could be compared.

    ``error`` is max|a - b| over the tensor, relative to max|b|, b being of one device; infinite where a value is
    missing or is not a number. ``tolerance`` is the largest that passes.
    """

    name: str
    error: float
    tolerance: float
    compared: int

    @property
    def ok(self) -> bool:
        """Whether everything of this kind is within the tolerance."""
        return self.error <= self.tolerance


@dataclass(frozen=True, slots=True)
class Failure:
    """One tensor past its tolerance."""

    kind: str
    name: str
    error: float
    tolerance: float


@dataclass(frozen=True, slots=True)
class Parity:
    """A distributed program against one device. ``str`` is a table of at most 80 columns.

    worst: by kind (outputs, layers, input gradients, parameter gradients, weights, replicas).
    layers: each compared module's error, in the order of the model.
    failures: every tensor past its tolerance, kind by kind.
    notes: what a reader has to know to judge the numbers.
    """

    title: str
    worst: Mapping[str, Worst]
    layers: Mapping[str, float]
    failures: tuple[Failure, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every tensor of every kind is within its tolerance."""
        return not self.failures

    def __str__(self) -> str:
        lines = [*_wrapped(self.title, ""), "", _LEFT.format("", "count", "worst", "limit") + "where"]
        for kind, worst in self.worst.items():
            lines.append(_row(kind, worst))
        if self.failures:
            lines += ["", *self._failed()]
        else:
            lines += ["", "ok: the program computes what one device computes"]
        for note in self.notes:
            lines += _wrapped(f"note: {note}", "      ")
        return "\n".join(lines)

    def _failed(self) -> list[str]:
        lines = [f"FAILED: {plural(len(self.failures), 'tensor')} past tolerance"]
        shown = self.failures[:_SHOWN]
        lines += [_cut(f"  {failure.error:>7.1e}  {failure.kind:<19}  ", failure.name) for failure in shown]
        if len(self.failures) > _SHOWN:
            lines.append(f"  and {len(self.failures) - _SHOWN} more")
        first = next((f for f in self.failures if f.kind == "layers"), None)
        if first is not None:
            lines.append(_cut("  the first module that differs: ", first.name))
        return lines


def _row(kind: str, worst: Worst) -> str:
    if not worst.compared:
        return _LEFT.format(kind, "none", "-", "").rstrip()
    limit = f"{worst.tolerance:.0e}" if worst.tolerance else "equal"
    if worst.error == 0:
        return _LEFT.format(kind, worst.compared, "equal", limit).rstrip()
    return _cut(_LEFT.format(kind, worst.compared, f"{worst.error:.1e}", limit), worst.name)


def _cut(left: str, name: str) -> str:
    """``left`` and a name, of which the end is kept: it is what tells names apart."""
    room = _WIDTH - len(left)
    return left + (name if len(name) <= room else f"...{name[-(room - 3) :]}")


def _wrapped(text: str, indent: str) -> list[str]:
    import textwrap  # noqa: PLC0415 - a few lines at the end of a long run

    return textwrap.wrap(text, _WIDTH, subsequent_indent=indent, break_on_hyphens=False)
