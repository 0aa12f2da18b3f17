"""The cost model: exact, rounded once, and the figures of the design."""

from fractions import Fraction

import pytest

from placement.solver.cost import DEVICES, LINKS, Device, Link, Machine, defaults, known_link
from placement.types import Action

LAYER = 4096 * 8192 * 2  # bytes of a [4096, 8192] bfloat16 activation
TP8 = Machine(DEVICES["h100"], LINKS["nvlink"], 8)


def plain(action: Action, nbytes: int, n: int, link: Link) -> Fraction:
    """The ring formulas, spelt out once more."""
    block = Fraction(nbytes, n)
    sent = {
        Action.ALL_REDUCE: 2 * (n - 1) * block,
        Action.ALL_GATHER: (n - 1) * block,
        Action.REDUCE_SCATTER: (n - 1) * block,
        Action.ALL_TO_ALL: (n - 1) * block / n,
        Action.SEND_RECV: block,
    }[action]
    return (link.latency + sent / link.bandwidth) * 10**12


def test_all_reduce_of_a_70b_layer() -> None:
    # 2 * 7/8 * 67,108,864 B / 450 GB/s = 260.978... us, and 6 us for the launch.
    assert TP8.collective(Action.ALL_REDUCE, LAYER) == 6_000_000 + 260_978_916
    assert (
        TP8.collective(Action.ALL_GATHER, LAYER)
        == TP8.collective(Action.REDUCE_SCATTER, LAYER)
        == 6_000_000 + 130_489_458
    )


@pytest.mark.parametrize("action", [action for action in Action if action.communicates])
@pytest.mark.parametrize("n", [2, 3, 7, 8])
@pytest.mark.parametrize("nbytes", [0, 1, 1001, LAYER])
def test_collectives_are_the_exact_rational_rounded_half_up(action: Action, n: int, nbytes: int) -> None:
    link = LINKS["ib"]
    exact = plain(action, nbytes, n, link)
    price = Machine(DEVICES["h100"], link, n).collective(action, nbytes)
    assert Fraction(-1, 2) < price - exact <= Fraction(1, 2)


def test_rounding_is_half_up() -> None:
    slow = Device("slow", {"float32": 8 * 10**12}, 8 * 10**12, 1, "test")
    machine = Machine(slow, LINKS["host"], 2)
    assert [machine.compute(flops, 0, "float32") for flops in (0, 3, 4, 5, 12)] == [0, 0, 1, 1, 2]
    assert [machine.compute(0, nbytes, "float32") for nbytes in (0, 3, 4, 5, 12)] == [0, 0, 1, 1, 2]


def test_compute_is_the_slower_of_arithmetic_and_memory() -> None:
    flops, nbytes = 2 * 4096 * 8192 * 1024, 2 * (4096 * 8192 + 8192 * 1024 + 4096 * 1024)
    arithmetic = Fraction(flops * 10**12, 989_400 * 10**9)
    assert abs(TP8.compute(flops, nbytes, "bfloat16") - arithmetic) <= Fraction(1, 2)
    assert TP8.compute(1, nbytes, "bfloat16") == TP8.compute(0, nbytes, "bfloat16") > 0
    assert TP8.compute(0, 0, "bfloat16") == 0
    assert TP8.compute(flops, 0, "int64") == TP8.compute(flops, 0, "float32") > TP8.compute(flops, 0, "bfloat16")


def test_local_actions_cost_memory_traffic_and_no_launch() -> None:
    split, pad, keep = (TP8.collective(action, LAYER) for action in (Action.SPLIT, Action.PAD, Action.KEEP))
    assert split == round(Fraction(2 * LAYER * 10**12, 8 * 3_350 * 10**9))
    assert pad == round(Fraction(9 * LAYER * 10**12, 8 * 3_350 * 10**9))
    assert keep == round(Fraction(LAYER * 10**12, 3_350 * 10**9))
    assert TP8.collective(Action.NONE, LAYER) == 0
    assert {action: TP8.launches(action) for action in Action} == {
        action: int(action.communicates) for action in Action
    }


def test_one_rank_pays_nothing_to_convert() -> None:
    alone = Machine(DEVICES["h100"], LINKS["nvlink"], 1)
    assert all(alone.collective(action, LAYER) == alone.launches(action) == 0 for action in Action)


def test_defaults_by_device_type() -> None:
    assert [part.name for part in defaults("cpu")] == ["cpu", "host"]
    assert [part.name for part in defaults("cuda")] == ["h100", "nvlink"]
    with pytest.raises(KeyError):
        defaults("abacus")


def test_nvlink_goes_with_the_generation() -> None:
    assert [known_link("nvlink", DEVICES[name]).bandwidth for name in ("a100", "h100", "h200", "b200")] == [
        300 * 10**9,
        450 * 10**9,
        450 * 10**9,
        900 * 10**9,
    ]
    assert known_link("ib", DEVICES["b200"]) == LINKS["ib"]


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_every_device_states_its_figures(device: Device) -> None:
    assert device.sources
    assert device.rate("bfloat16") > 0 < device.rate("float64") <= device.rate("float32")
    assert device.capacity > 0
    assert device.bandwidth > 0
