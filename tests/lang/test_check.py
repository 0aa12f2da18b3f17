"""What shows without a model."""

import pytest

from placement.lang import PlacementError, check, parse, spec
from placement.lang.patterns import compile_pattern
from placement.solver import cost
from tests.counting import calls

HEAD = "mesh tp = 4\n"
TWO = "mesh tp = 4\nmesh dp = 2\n"

# text, then (code, line, column) of each fault
CASES = [
    (HEAD + "value a : Shard(out), Shard(out) @ tp", [("PLC207", 2, 23)]),
    (HEAD + "value a : auto @ dp", [("PLC101", 2, 18)]),
    (TWO + "value a : auto @ dp, auto @ tp", []),
    (TWO + "value a : auto", []),
    (TWO + "value a : Shard(0)", [("PLC113", 3, 11)]),
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
    (HEAD + "param a : Shard(0)\nparam a : Shard(0)", [("PLC119", 3, 1)]),
    (HEAD + "param a : Shard(0)\nparam a : Shard(0) @ tp", []),
    (HEAD + "param a : Shard(0), Shard(1), stored Shard(0)", [("PLC207", 2, 21), ("PLC210", 2, 31)]),
    (TWO + "param a : Shard(0) @ tp, stored Shard(0) @ dp", []),
    (TWO + "param a : stored Shard(0) @ dp, stored auto @ dp, Replicate @ dp", [("PLC207", 3, 33)]),
    (TWO + "param a : stored Shard(0) @ dp\nparam a : stored Shard(1) @ dp", [("PLC201", 4, 11)]),
    (HEAD + "param a : stored Replicate, Shard(0)", [("PLC210", 2, 11)]),
    (HEAD + "param a : stored Partial", [("PLC205", 2, 11)]),
    (HEAD + "param a : Partial\ninput x : Partial\nvalue v : Partial", [("PLC205", 2, 11), ("PLC205", 3, 11)]),
    (HEAD + "value a : stored Shard(0)\ninput x : stored auto", [("PLC209", 2, 11), ("PLC209", 3, 11)]),
    (HEAD + "output o : stored Shard(0)", [("PLC209", 2, 12)]),
    (HEAD + "param a : Shard(0, zigzag)\nvalue v : Shard(out, zigzag)", [("PLC211", 2, 11), ("PLC211", 3, 11)]),
    (HEAD + "input x : [seq], Shard(seq, zigzag)\nvalue v : Shard(seq, zigzag)", []),
    # patterns that meet
    (HEAD + "param a.* : Shard(0)\nparam a.b : Shard(1)", [("PLC201", 3, 13)]),
    (HEAD + "param a.b : Shard(1)\nparam **.b : Shard(0)", [("PLC201", 3, 14)]),
    (HEAD + "param {a,b}.w : Shard(1)\nparam {b,c}.w : Shard(0)", [("PLC201", 3, 17)]),
    (HEAD + "param {a,b}.w : Shard(1)\nparam {b,a}.w : Shard(0)", [("PLC201", 3, 17)]),
    (HEAD + "param h.[0-3].w : Shard(1)\nparam h.2.w : Shard(0)\nparam h.4.w : Shard(0)", [("PLC201", 3, 15)]),
    (TWO + "param a.* : Shard(0) @ tp\nparam a.b : Shard(1) @ dp", []),
    (HEAD + "param a.* : Shard(0)\nparam a.b : Shard(0)", []),
    (HEAD + "value a.* : Shard(0)\nvalue a.b : Partial", [("PLC202", 3, 13)]),
    # links
    ("mesh tp over fast\nlink fast = 1 GB/s, 1 us", []),
    (HEAD + "link fast = 1 GB/s, 1 us", [("PLC114", 2, 6)]),
    ("mesh tp over ib\nlink ib = 1 GB/s, 1 us", [("PLC112", 2, 6)]),
    ("mesh tp over a\nlink a = 1 GB/s, 1 us\nlink a = 2 GB/s, 1 us", [("PLC112", 3, 6)]),
    # devices
    ("device a = 96 GB, 2 TB/s, 60 TFLOP/s float32", []),
    ("device a = 2 TB/s, 4 TFLOP/s float64", [("PLC120", 1, 8)]),
    ("device a = 4 TFLOP/s float_32, 9 GFLOP/s half, 2 TB/s, 6 GB", [("PLC120", 1, 22), ("PLC120", 1, 42)]),
    ("device a = 4 TFLOP/s float32, 6 GFLOP/s float32, 2 TB/s", [("PLC112", 1, 31)]),
    ("device a = 4 TFLOP/s float32, 2 TB/s, 6 GB, 6 MB, 3 GB/s", [("PLC112", 1, 45), ("PLC112", 1, 51)]),
    ("device b200 = 4 TFLOP/s float32, 2 TB/s, 6 GB", [("PLC112", 1, 8)]),
    # constraints
    ("limit memory 60 GB\nlimit memory 50 GB", [("PLC112", 2, 7)]),
    ("limit time 60 GB", [("PLC117", 1, 7)]),
    ("strategy a : ring @ cp", [("PLC111", 1, 14)]),
    (HEAD + "strategy a : ring @ cp", [("PLC101", 2, 21)]),
    (TWO + "strategy a : ring", [("PLC113", 3, 14)]),
    (TWO + "expect a : all_gather <= 2\nexpect a : all_gather @ x <= 2", [("PLC101", 4, 25)]),
    (HEAD + "expect a : gather <= 2", [("PLC116", 2, 12)]),
    (HEAD + "strategy a : ring\nstrategy a : ulysses @ tp", [("PLC304", 3, 14)]),
    (TWO + "strategy a : ring @ tp\nstrategy a : ulysses @ dp", []),
    (TWO + "strategy a : ring @ tp + ulysses @ dp", []),
    (TWO + "strategy a : ring @ tp + ulysses", [("PLC113", 3, 26)]),
    (TWO + "strategy a : ring @ tp + ulysses @ cp", [("PLC101", 3, 36)]),
    (TWO + "strategy a : ring @ tp + ulysses @ tp", [("PLC112", 3, 26)]),
    (HEAD + "strategy a : ring + ring @ tp", [("PLC112", 2, 21)]),
    (TWO + "strategy a : ring @ tp + gather @ dp\nstrategy a : ring @ dp", [("PLC304", 4, 14)]),
    ("lower a : overlap = ring, reduce = float32\nlower b : overlap = none", []),
    ("lower a : overlap = ring\nlower a : overlap = none", [("PLC304", 2, 21)]),
    ("lower a : overlap = ring, overlap = none", [("PLC112", 1, 27)]),
    ("lower a : overlap = 2, speed = ring", [("PLC115", 1, 21), ("PLC115", 1, 24)]),
    ("lower a : overlap = chunks\nlower b : overlap = chunks(2)", []),
    ("lower a : overlap = ring(2)\nlower b : overlap = chunks(1)", [("PLC115", 1, 21), ("PLC115", 2, 21)]),
    (HEAD + "expect a : all_gather <= 2\nexpect a : all_gather <= 2", [("PLC119", 3, 1)]),
    # dims
    ("input a : [x, y, x, x]", [("PLC118", 1, 18), ("PLC118", 1, 21)]),
    ("param a : [x, y]\nparam a : [y, x]\nparam b : [y, x]", [("PLC112", 2, 7)]),
    ("output o, o : auto", [("PLC112", 1, 11), ("PLC111", 1, 15)]),
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


@pytest.mark.parametrize(
    ("figures", "message", "hint"),
    [
        (
            "2 TB/s",
            "device 'a' has no capacity or rate for float32",
            "add what it has, as in 96 GB, 60 TFLOP/s float32",
        ),
        ("1 TFLOP/s float32, 2 GB", "device 'a' has no bandwidth", "add what it has, as in 2 TB/s"),
        (
            "1 TFLOP/s float32, 2 GB, 3 GB/s, 1 TFLOP/s flaot16",
            "unknown dtype 'flaot16'",
            "did you mean 'float16' or 'bfloat16'?",
        ),
        ("1 TFLOP/s float32, 2 GB, 3 GB/s, 1 TFLOP/s float32", "a second rate for float32", None),
    ],
)
def test_a_device_without_all_figures_is_told_what_it_lacks(figures, message, hint):
    (found,) = check(parse(f"device a = {figures}"))
    assert (found.message, found.hint) == (message, hint)


def test_the_devices_known_by_name_are_those_with_figures():
    assert tuple(cost.DEVICES) == spec.DEVICES
    assert set(spec.LINKS) == set(cost.LINKS)
    assert {dtype for device in cost.DEVICES.values() for dtype in device.flops} == set(spec.DTYPES)


def test_a_warning_is_no_error():
    (found,) = check(parse("mesh tp\nlink fast = 1 GB/s, 1 us"))
    assert (found.severity, found.message) == ("warning", "link 'fast' is never used")


def test_patterns_are_compared_in_linear_time(monkeypatch):
    """A path meets few patterns in practice; where it meets all, comparing ends and is left to the model."""
    tried = []
    monkeypatch.setattr(
        "placement.lang.conflicts.compile_pattern", lambda text: tried.append(text) or compile_pattern(text)
    )

    def comparisons(n, pattern):
        tried.clear()
        lines = [f"param {pattern.format(i)} : Shard(0)\nparam m{i}.w{i} : Shard(0)\n" for i in range(n)]
        check(parse("mesh tp\n" + "".join(lines)))
        return len(tried)

    assert comparisons(100, "m{0}.*.w{0}") == 100
    assert comparisons(1000, "m{0}.*.w{0}") == 1000
    assert comparisons(1000, "**.{{w{0},v{0}}}") == 1000
    assert comparisons(1000, "*.*w{0}") == 100_000


@pytest.mark.parametrize("line", ["param w{0} : Shard(out) @ tp\n", "param w{0} : Shard(o_{0}) @ tp\n"])
def test_dims_are_looked_up_in_linear_time(line):
    def work(n):
        spec = parse("mesh tp\n" + "".join(map(line.format, range(n))))
        return calls(lambda: check(spec))

    work(10)
    assert work(2000) < 4.5 * work(500)  # four times the lines; a square would be 16
