"""Patterns match exactly the names they stand for; numbers are short and right."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.lang.patterns import compile_pattern
from placement.report.fold import causes, layer_of, patterns
from placement.report.units import plural, show_bytes, show_time

segments = st.sampled_from(["layers", "attn", "q", "k", "weight", "0", "1", "2", "3", "7", "10"])
names = st.lists(segments, min_size=1, max_size=4).map(".".join)


@given(st.sets(names, max_size=12), st.sets(names, max_size=12), st.integers(1, 60))
def test_patterns_match_each_name_once_and_no_other(chosen, others, limit):
    found = [compile_pattern(pattern) for pattern in patterns(sorted(chosen), limit)]
    for name in chosen | others:
        assert sum(pattern.fullmatch(name) is not None for pattern in found) == (name in chosen)


@pytest.mark.parametrize(
    ("given", "folded"),
    [
        ([], []),
        (["a.b"], ["a.b"]),
        ([f"m.{i}.w" for i in range(80)], ["m.[0-79].w"]),
        ([f"m.{i}.w" for i in (0, 1, 3, 5, 6)], ["m.{[0-1],3,[5-6]}.w"]),
        ([f"m.{i}.{k}.w" for i in range(3) for k in ("q", "k")], ["m.[0-2].{q,k}.w"]),
        (["m.0.w", "m.1.w", "m.1.b"], ["m.[0-1].w", "m.1.b"]),
        (["norm.w", "m.0.w"], ["norm.w", "m.0.w"]),
        (["a.0.b.1", "a.0.b.2", "a.1.b.1", "a.1.b.2"], ["a.[0-1].b.[1-2]"]),
    ],
)
def test_patterns(given, folded):
    assert patterns(given) == folded


def test_names_are_joined_only_while_they_fit():
    assert patterns(["m.first", "m.second"], limit=16) == ["m.{first,second}"]
    assert patterns(["m.first", "m.second"], limit=15) == ["m.first", "m.second"]
    assert patterns(["m.0.long", "m.1.long"], limit=1) == ["m.[0-1].long"]  # no longer than the names


@pytest.mark.parametrize(
    ("path", "layer"),
    [("", None), ("model.norm", None), ("model.layers.3", "model.layers.3"), ("h.0.experts.1.up", "h.0"), ("12", "12")],
)
def test_layers_are_the_outermost_numbered_modules(path, layer):
    assert layer_of(path) == layer


def test_causes_are_sorted_by_line_within_a_file():
    assert causes(["b.plc:12", "a.plc:3", "b.plc:9", "b.plc:12"]) == "b.plc:9,12 a.plc:3"
    assert causes(["dir:with/colon.plc:4"]) == "dir:with/colon.plc:4"
    assert causes([]) == ""


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (64 * 2**20, "64 MiB"),
        (2**20 - 1, "1 MiB"),
        (1023 * 2**10, "1023 KiB"),
        (int(99.96 * 2**30), "100 GiB"),
        (3 * 2**50, "3 PiB"),
        (5000 * 2**50, "5000 PiB"),
    ],
)
def test_bytes(count, shown):
    assert show_bytes(count) == shown


@given(st.integers(0, 2**60))
def test_bytes_are_short_and_near(count):
    shown = show_bytes(count)
    number, unit = shown.split()
    size = float(number) * 1024 ** ("B", "KiB", "MiB", "GiB", "TiB", "PiB").index(unit)
    assert abs(size - count) <= 0.05 * count
    assert len(shown) <= 8


@pytest.mark.parametrize(
    ("picoseconds", "shown"),
    [
        (0, "0 s"),
        (1, "1 ps"),
        (1500, "1.5 ns"),
        (3_500_000, "3.5 us"),
        (9_100_675_700, "9.1 ms"),
        (12 * 10**12, "12 s"),
    ],
)
def test_times(picoseconds, shown):
    assert show_time(picoseconds) == shown


def test_plurals():
    assert [plural(n, "parameter") for n in (0, 1, 2)] == ["0 parameters", "1 parameter", "2 parameters"]
