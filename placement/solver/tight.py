"""Charges for the conversions of one value that add up to their price at a reference.

The price J of a value's conversions depends on what each axis has: the type that the value is made in, and the set of
types that it is asked for in. Where an axis' own prices cannot tell, as where one axis converts the value while
another does not cut it, they add up to less than J at the reference r. Then J is charged to the axes in turn, as the
work of an op is: the first is charged what changing it alone changes, J(x1, r2, ..) - J(r); the next the least that is
left of J(x1, x2, r3, ..) whatever the first has; and so on. So charges add up to J at r, and nowhere to more.

A set of joint types is seen from each axis as a set of its types. Of several that look alike, or cover what is asked,
the cheapest counts: charges then rise with the set, and are never too much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from placement.solver.limbs import INFINITE, Ints
from placement.solver.problem import FORBIDDEN

if TYPE_CHECKING:
    from placement.solver.forms import Forms
    from placement.solver.pricing import NetForm

_MOST = 1 << 22  # numbers in a table of all axes' states

State = tuple[object, frozenset[object]]
"""What one axis has: the type made, and the types asked for; both in the numbers of the value's factors."""


@dataclass(frozen=True, slots=True, eq=False)
class Tight:
    """What each axis is charged, by what it has. constant: picoseconds that no axis is charged."""

    made: tuple[tuple[object, ...], ...]
    asked: tuple[tuple[frozenset[object], ...], ...]
    charges: tuple[Ints, ...]
    constant: int

    def table(self, axis: int, made: Sequence[object], asked: Sequence[frozenset[object]]) -> Ints:
        """Picoseconds for types made by sets asked for; FORBIDDEN for what no plan has. int64 [made, sets]."""
        rows = {kind: index for index, kind in enumerate(self.made[axis])}
        found = np.full((len(made), len(asked)), FORBIDDEN, dtype=np.int64)
        for column, wanted in enumerate(asked):
            covers = [index for index, own in enumerate(self.asked[axis]) if own >= wanted]
            if covers:
                least = self.charges[axis][:, covers].min(axis=1)
                for row, kind in enumerate(made):
                    if kind in rows:
                        found[row, column] = least[rows[kind]]
        return np.minimum(found, FORBIDDEN)


def tightened(forms: Forms, form: NetForm, at: Sequence[State], order: Sequence[int]) -> Tight | None:
    """The charges of the values of a form where the axes have ``at``, in the order in which they are charged.

    None where there are too many states for a table, or ``at`` is none of them.
    """
    joints = form.ways.joints
    axes = range(len(at))
    seen = [forms.kinds(form.value, joint) for joint in joints]
    made = [tuple(dict.fromkeys(seen[place][axis] for place in form.made)) for axis in axes]
    masks = [[seen[place] for bit, place in enumerate(form.ways.least.asked) if mask >> bit & 1] for mask in form.sets]
    sets = [[frozenset(kinds[axis] for kinds in mask) for mask in masks] for axis in axes]
    asked = [tuple(dict.fromkeys(own)) for own in sets]
    shape = [len(part[axis]) for axis in axes for part in (made, asked)]
    if prod(shape) > _MOST:
        return None
    whole = np.full(shape, INFINITE, dtype=np.int64)
    columns = [[asked[axis].index(one) for one in sets[axis]] for axis in axes]
    for row, place in enumerate(form.made):
        own = [made[axis].index(seen[place][axis]) for axis in axes]
        index = tuple(part for axis in axes for part in (own[axis], columns[axis]))
        np.minimum.at(whole, index, np.where(form.table[0, row] >= FORBIDDEN, INFINITE, form.table[0, row]))
    for axis in axes:
        whole = _covered(whole, 2 * axis + 1, asked[axis])
    if any(kind not in made[axis] or wanted not in asked[axis] for axis, (kind, wanted) in enumerate(at)):
        return None
    here = [made[axis].index(at[axis][0]) * len(asked[axis]) + asked[axis].index(at[axis][1]) for axis in axes]
    states = whole.reshape([len(made[axis]) * len(asked[axis]) for axis in axes])
    base = int(states[tuple(here)])
    if base >= INFINITE:
        return None
    charges, constant = _in_turn(states, here, order)
    shaped = tuple(own.reshape(len(made[axis]), len(asked[axis])) for axis, own in enumerate(charges))
    return Tight(tuple(made), tuple(asked), shaped, constant)


def _covered(whole: Ints, dim: int, asked: Sequence[frozenset[object]]) -> Ints:
    """Every set at the least price of those that cover it."""
    found = [
        whole.take([index for index, other in enumerate(asked) if other >= one], axis=dim).min(axis=dim)
        for one in asked
    ]
    return np.stack(found, axis=dim)


def _in_turn(states: Ints, here: Sequence[int], order: Sequence[int]) -> tuple[list[Ints], int]:
    """The charge of each axis by its state, the least of them 0, and what belongs to no axis."""
    rest = np.where(states >= INFINITE, INFINITE, states - states[tuple(here)])
    charged: list[int] = []
    found: dict[int, Ints] = {}
    for axis in order:
        charged.append(axis)
        others = tuple(k for k in range(states.ndim) if k != axis)
        waiting = [k for k in others if k not in charged]
        near = rest
        for k in waiting:
            near = near.take([here[k]], axis=k)
        own = near.min(axis=others)
        far = rest.min(axis=others)
        own = np.where(own >= _HOPELESS, far, own)  # it does not go with the reference
        found[axis] = own
        shape = [-1 if k == axis else 1 for k in range(states.ndim)]
        lower = np.where(own >= _HOPELESS, 0, own).reshape(shape)
        rest = np.where(rest >= _HOPELESS, INFINITE, rest - lower)
    least = {axis: int(own.min()) for axis, own in found.items()}
    charges = [np.where(own >= _HOPELESS, FORBIDDEN, own - least[axis]) for axis, own in sorted(found.items())]
    return charges, int(states[tuple(here)]) + sum(least.values())


_HOPELESS = INFINITE // 2  # what stays above was never possible, whatever was taken away
