"""What work and communication cost, in integer picoseconds.

One axis is priced at a time: a ``Machine`` is a device, the link between the ranks of the axis, and how
many they are. Work is a roofline (the slower of arithmetic and memory traffic); a collective is a constant
per launch plus the bytes a rank sends over the bandwidth. Every figure is one exact rational, rounded half
up once, so that the same input has the same price everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from placement.types import Action, volume

if TYPE_CHECKING:
    from collections.abc import Mapping

PICOSECONDS = 10**12
_TERA, _GIGA = 10**12, 10**9


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator.

    flops: flop/s by dtype name (``bfloat16``); a dtype that is not listed runs at the rate of float32.
    bandwidth: bytes/s to its own memory. capacity: bytes of that memory. sources: where the figures are from;
    of a device of one's own, the line that declares it (``net.plc:3``). apart: whether what is sent moves while it
    multiplies; the cores of a CPU do both.
    """

    name: str
    flops: Mapping[str, int]
    bandwidth: int
    capacity: int
    sources: str
    apart: bool = True

    def rate(self, dtype: str) -> int:
        """Flop/s at ``dtype``."""
        return self.flops.get(dtype, self.flops["float32"])


@dataclass(frozen=True, slots=True)
class Link:
    """What joins the ranks of an axis.

    bandwidth: bytes/s per rank and direction. latency: seconds per launch, all ring steps together.
    """

    name: str
    bandwidth: int
    latency: Fraction


def _rates(*, float64: int, float32: int, half: int, eighth: int = 0) -> dict[str, int]:
    """Flop/s by dtype name from Gflop/s: ``half`` for both 16-bit formats, ``eighth`` for both 8-bit ones."""
    rates = {"float64": float64, "float32": float32, "float16": half, "bfloat16": half}
    if eighth:
        rates |= {"float8_e4m3fn": eighth, "float8_e5m2": eighth}
    return {name: rate * _GIGA for name, rate in rates.items()}


# Dense figures, without 2:4 sparsity; float32 without TF32, as torch multiplies by default.
_H100 = Device(
    name="h100",
    flops=_rates(float64=34_000, float32=67_000, half=989_400, eighth=1_978_900),
    bandwidth=3_350 * _GIGA,
    capacity=80 * _GIGA,
    sources="NVIDIA H100 Tensor Core GPU data sheet and architecture white paper, SXM5, dense",
)
_H200 = replace(
    _H100,
    name="h200",
    bandwidth=4_800 * _GIGA,
    capacity=141 * _GIGA,
    sources="NVIDIA H200 Tensor Core GPU data sheet, SXM, dense; arithmetic as the H100's",
)
_A100 = Device(
    name="a100",
    flops=_rates(float64=9_700, float32=19_500, half=312_000),
    bandwidth=2_039 * _GIGA,
    capacity=80 * _GIGA,
    sources="NVIDIA A100 Tensor Core GPU data sheet, SXM4 with 80 GB, dense",
)
_B200 = Device(
    name="b200",
    flops=_rates(float64=37_000, float32=75_000, half=2_250_000, eighth=4_500_000),
    bandwidth=8_000 * _GIGA,
    capacity=180 * _GIGA,
    sources="NVIDIA HGX B200 data sheet, one eighth of the board, dense",
)
_CPU = Device(
    name="cpu",
    flops=_rates(float64=50, float32=100, half=50),
    bandwidth=20 * _GIGA,
    capacity=16 * _GIGA,
    sources="nominal: two cores with AVX2, one memory channel each; no vendor's figure",
    apart=False,
)
DEVICES: dict[str, Device] = {device.name: device for device in (_H100, _H200, _A100, _B200, _CPU)}

_MICRO = Fraction(1, 10**6)
# nvlink: 4th generation, 900 GB/s both ways together; NCCL's smallest all-reduce inside a node takes 6 us.
# ib: one NDR port of 400 Gb/s per rank. pcie: 5th generation, 16 lanes, 64 GB/s before encoding.
# host: gloo over the loopback device; nominal.
LINKS: dict[str, Link] = {
    "nvlink": Link("nvlink", 450 * _GIGA, 6 * _MICRO),
    "ib": Link("ib", 50 * _GIGA, 20 * _MICRO),
    "pcie": Link("pcie", 63 * _GIGA, 12 * _MICRO),
    "host": Link("host", 2 * _GIGA, 100 * _MICRO),
}
_NVLINK = {"a100": 300 * _GIGA, "b200": 900 * _GIGA}  # 3rd and 5th generation

_DEFAULTS = {"cpu": ("cpu", "host"), "cuda": ("h100", "nvlink")}


def known_link(name: str, device: Device) -> Link:
    """The built-in link ``name`` as ``device`` has it: NVLink's bandwidth goes with the generation.

    Raises KeyError on an unknown name.
    """
    link = LINKS[name]
    return replace(link, bandwidth=_NVLINK[device.name]) if name == "nvlink" and device.name in _NVLINK else link


def defaults(device_type: str) -> tuple[Device, Link]:
    """The device and link to assume for a mesh of ``device_type`` (``cpu``, ``cuda``) when the spec says nothing.

    Raises KeyError on a device type without defaults.
    """
    device, link = _DEFAULTS[device_type]
    return DEVICES[device], known_link(link, DEVICES[device])


def _half_up(numerator: int, denominator: int) -> int:
    return (2 * numerator + denominator) // (2 * denominator)


@dataclass(frozen=True, slots=True)
class Machine:
    """``n`` ranks of one axis, each a ``device``, joined by ``link``."""

    device: Device
    link: Link
    n: int

    def compute(self, flops: int, nbytes: int, dtype: str) -> int:
        """Picoseconds for one rank to do ``flops`` at ``dtype`` and move ``nbytes`` to and from its memory."""
        arithmetic = _half_up(flops * PICOSECONDS, self.device.rate(dtype))
        return max(arithmetic, self._memory(nbytes, 1))

    def collective(self, action: Action, nbytes_full: int) -> int:
        """Picoseconds of one action on a value of ``nbytes_full`` bytes before any split (0 on one rank).

        Collectives: latency + volume / bandwidth. Local actions: the memory traffic of the block that is
        read and written (split), of the block and the whole (pad), or of the zeros that are written (keep).
        """
        if self.n == 1 or action is Action.NONE:
            return 0
        if action is Action.KEEP:
            return self._memory(nbytes_full, 1)
        if action is Action.PAD:  # the block is read, the whole is written
            return self._memory((self.n + 1) * nbytes_full, self.n)
        if not action.communicates:
            return self._memory(2 * nbytes_full, self.n)
        sent, whole = volume(action, self.n)
        time = self.link.latency + Fraction(sent * nbytes_full, whole * self.link.bandwidth)
        return _half_up(time.numerator * PICOSECONDS, time.denominator)

    def launches(self, action: Action) -> int:
        """How many collectives the action launches."""
        return int(action.communicates and self.n > 1)

    def _memory(self, numerator: int, denominator: int) -> int:
        """Picoseconds to move numerator / denominator bytes."""
        return _half_up(numerator * PICOSECONDS, denominator * self.device.bandwidth)
