"""What shows without a model."""

import pytest

from placement.lang import PlacementError, check, parse

HEAD = "mesh tp = 4\n"
TWO = "mesh tp = 4\nmesh dp = 2\n"

# text, then (code, line, column) of each fault
CASES = [
    (HEAD + "value a : Shard(out), Shard(out) @ tp", [("PLC207", 2, 23)]),
    (HEAD + "value a : auto @ dp", [("PLC101", 2, 18)]),
    (TWO + "value a : auto @ dp, auto @ tp", []),
    (TWO + "value a : auto", [("PLC113", 3, 11)]),
    ("value a : auto\nvalue b : auto @ tp", [("PLC111", 1, 11)]),
    ("input a : [x]\ndevice h100", []),
    (HEAD + "mesh tp = 4", [("PLC112", 2, 6)]),
    (HEAD + "mesh tp\nvalue a : auto", [("PLC112", 2, 6)]),  # one axis, declared twice: no PLC113 on top
    ("device a\ndevice b\ndevice c", [("PLC112", 2, 8), ("PLC112", 3, 8)]),
    ("mesh tp over ether", [("PLC110", 1, 14)]),
    ("mesh tp over pcie", []),
    ("input a, a : [x]", [("PLC112", 1, 10)]),
    ("input a : [x, y]\ninput b, a : [x, y]", []),
    ("input a : [x, y]\ninput b, a : [y, x]", [("PLC112", 2, 10)]),
    ("input a : [x, y]\ninput a : [x]", [("PLC112", 2, 7)]),
    (HEAD + "input a : [x]\ninput a : Shard(x)", []),
    (HEAD + "input a : [x], Shard(x)\ninput a : Replicate", [("PLC202", 3, 11)]),
    (HEAD + "input a : [x], Shard(x)\ninput a : Shard(x) @ tp", []),
    (TWO + "input a : [x], Shard(x) @ tp\ninput a : Replicate @ dp", []),
    (HEAD + "output a, b : Partial\noutput b : Replicate", [("PLC202", 3, 12)]),
    (HEAD + "value a : Shard(0)\nvalue a : Shard(1)", [("PLC202", 3, 11)]),
    (HEAD + "value a : Shard(0)\nparam a : Shard(1)", []),
    (HEAD + "within a {\nparam b : Shard(0)\n}\nparam a.b : Shard(1)", [("PLC201", 5, 13)]),
    (HEAD + "param a : Shard(0)\nparam a : Shard(0)", []),
    (HEAD + "input a : [x], Shard(out)", [("PLC103", 2, 22)]),
    (HEAD + "param a : [x], Shard(out)", []),
    (HEAD + "param a : [x], Shard(y)\nvalue v : Shard(x)", [("PLC103", 2, 22)]),
    (HEAD + "input i : [batch]\noutput o : Shard(batch)\nvalue v : Shard(bacth)", [("PLC103", 4, 17)]),
    (HEAD + "param p : Shard(bacth)", [("PLC103", 2, 17)]),
    (HEAD + "param a : [x, y], Shard(2)", [("PLC204", 2, 25)]),
    (HEAD + "param a : [x, y], Shard(1)", []),
    (HEAD + "param a : Shard(7)", []),
    (TWO + "value a : Shard(no) @ no", [("PLC103", 3, 17), ("PLC101", 3, 23)]),
]


@pytest.mark.parametrize(("text", "expected"), CASES, ids=[repr(case[0]) for case in CASES])
def test_check(text, expected):
    try:
        found = check(parse(text))
    except PlacementError as error:
        found = error.diagnostics
    assert [(d.code, d.line, d.column) for d in found] == expected
