"""Breadth: every family of the table is what one device computes, on 2 or 4 ranks, or is refused for a reason."""

from __future__ import annotations

import pytest

from placement import PlacementError
from tests.zoo.families import Family
from tests.zoo.parity import compiled, measured
from tests.zoo.table import FAMILIES

_CHOSEN = [family for family in FAMILIES if family.refused is None and not family.alike]
# Modes and numbers of ranks take turns; bench/zoo.py has all of them for each.
_TURNS = (("sp", 2), ("tp", 4), ("sp", 4), ("tp", 2))


def _turn(index: int, family: Family) -> tuple[str, int]:
    mode, n = _TURNS[index % len(_TURNS)]
    return (mode if mode in family.modes() else family.modes()[0]), n


@pytest.mark.parametrize(
    ("family", "mode", "n"), [pytest.param(f, *_turn(i, f), id=f.name) for i, f in enumerate(_CHOSEN)]
)
def test_parity(family: Family, mode: str, n: int) -> None:
    assert not measured(family, family.build(), mode, n)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.refused], ids=lambda family: family.name)
def test_refusal(family: Family) -> None:
    assert family.refused is not None
    code, words = family.refused
    with pytest.raises(PlacementError) as raised:
        compiled(family, family.build(), "tp", 2)
    first = raised.value.diagnostics[0]
    assert (first.code, words in first.message, bool(first.model_line), bool(first.hint)) == (code, True, True, True)


def test_the_table_is_as_broad_as_it_says() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES) >= 30
    assert len(_CHOSEN) >= 30
    assert {family.alike for family in FAMILIES} - {""} <= {family.name for family in _CHOSEN}
