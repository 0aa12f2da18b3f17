"""Breadth: every family of the table is what one device computes, on 2 or 4 ranks, or is refused for a reason."""

from __future__ import annotations

import pytest

from placement import PlacementError
from tests.zoo.families import Family
from tests.zoo.parity import compiled, measured, one_capture
from tests.zoo.table import FAMILIES

_SIZES = {True: {"tp": 2, "sp": 4}, False: {"tp": 4, "sp": 2}}  # every other family the other way round; bench: all
_CHOSEN = [family for family in FAMILIES if family.refused is None and not family.alike]
_MODES = [pytest.param(family, _SIZES[index % 2 == 0], id=family.name) for index, family in enumerate(_CHOSEN)]


@pytest.mark.parametrize(("family", "sizes"), _MODES)
def test_parity(family: Family, sizes: dict[str, int]) -> None:
    model = family.build()
    with one_capture():
        problems = {f"{mode} = {sizes[mode]}": measured(family, model, mode, sizes[mode]) for mode in family.modes()}
    assert not any(problems.values()), problems


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
