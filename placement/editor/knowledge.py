"""What is known of the model that a spec is for: plain data, sent by the process that has the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from placement.lang.diagnostics import Diagnostic


@dataclass(frozen=True, slots=True)
class Effect:
    """What follows from a statement: a conversion, or the sum of a gradient.

    where: the module, as a pattern; alike: how many modules it matches. what: ``Shard(seq) -> Replicate``.
    forward, backward: collectives, '' for none. cause: (file, line) of all the statements it follows from.
    """

    where: str
    alike: int
    source: str
    target: str
    what: str
    axis: str
    forward: str
    backward: str
    size: str
    cause: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Known:
    """A model's names, and what a plan says of them; placements are as users write them, ``Shard(out) @ tp``."""

    params: Mapping[str, str] = field(default_factory=dict[str, str])  # every name → its shape
    modules: Mapping[str, str] = field(default_factory=dict[str, str])  # path → class
    inputs: Mapping[str, str] = field(default_factory=dict[str, str])
    outputs: Mapping[str, str] = field(default_factory=dict[str, str])
    strategies: Sequence[str] = ()
    mesh: Mapping[str, int] = field(default_factory=dict[str, int])
    placed_params: Mapping[str, str] = field(default_factory=dict[str, str])
    placed_values: Mapping[str, str] = field(default_factory=dict[str, str])
    placed_inputs: Mapping[str, str] = field(default_factory=dict[str, str])
    effects: tuple[Effect, ...] = ()

    def caused_by(self, file: str, lines: range) -> list[Effect]:
        """The effects of the statement in ``lines`` of ``file``."""
        return [e for e in self.effects if any(f == file and line in lines for f, line in e.cause)]


@dataclass(frozen=True, slots=True)
class Request:
    """A spec to be held against the model. ``texts`` are the open documents by path; all else is read from disk."""

    file: str
    texts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """What is wrong, and what is known of the model, as far as the faults let it be known."""

    faults: tuple[Diagnostic, ...]
    known: Known
