"""Random masks that do not depend on where values lie.

Whether an element is dropped is a function of the program's seed, the step, the place of the op (module path and
site) and the element's index in the one-device value, and of nothing else. So ranks that hold the same value
drop the same elements of it, blocks are dropped as parts of one whole, no rank computes what others hold,
and CPUs and accelerators agree.

A step is a call of the program in training mode. Recomputation must repeat the masks of its own forward, even if
other calls have followed. What ``torch.utils.checkpoint`` restores for it is the state of torch's
generators; so during a call of the program the CPU generator is seeded with the step's *key*, and recomputation in
a backward pass reads it from there. A call of a program that draws takes one number from the CPU generator and else
leaves it as it was; other programs do not touch it, and have no steps. Recomputation without ``preserve_rng_state``
repeats the masks of the latest call.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from placement.runtime._torch import constant, eager, recomputing
from placement.runtime.cuts import places

if TYPE_CHECKING:
    from collections.abc import Mapping

    from placement.runtime.axis import Axis
    from placement.runtime.cuts import Cut
    from placement.runtime.lengths import Lengths

Site = int | str
Cuts = tuple[tuple["Axis", "Cut"], ...]

# The top bits of every key: a generator's seed that has them is a key.
_MARK, _MARK_SHIFT = 0x3B6D, 48
_REMEMBERED = 1024
_WHOLE = (1 << 64) - 1


class Random:
    """The random state of one program: ``seed``, and ``step``, the number of its calls in training mode."""

    def __init__(self, seed: int = 0, step: int = 0) -> None:
        self.seed = seed
        self.step = step
        self._latest = step
        self.now = _as_tensor(0)  # the key of the call that began last, as compiled graphs are given it
        self._entered: list[_Entry | None] = []
        # What each call drew -> its step: how a call that is itself recomputed knows which one it is.
        self._drawn: dict[int, int] = {}
        self._lengths: dict[int, Lengths] = {}  # by the call's key, from the first call on that has some

    @eager
    def begin(self, *, training: bool, lengths: Lengths | None = None) -> None:
        """A call of the program begins; ``lengths`` are those that are others inside than the caller's."""
        if not training:
            self._entered.append(None)
            return
        drawn = int(torch.randint(2**62, (), generator=torch.default_generator, device="cpu"))
        if recomputing():
            self._latest = self._drawn.get(drawn, self._latest)
        else:
            self._latest = self.step
            self.step += 1
            self._drawn[drawn] = self._latest
            if len(self._drawn) > _REMEMBERED:
                del self._drawn[next(iter(self._drawn))]
        if lengths or self._lengths:
            self._lengths[self._own_key()] = lengths or {}
            if len(self._lengths) > _REMEMBERED:
                del self._lengths[next(iter(self._lengths))]
        key = self._own_key()
        self.now = _as_tensor(key)
        self._entered.append(_ambient.enter(key))

    @eager
    def end(self) -> None:
        """The call that began last ends."""
        entry = self._entered.pop()
        if entry is not None:
            _ambient.leave(entry)

    def key(self, path: str, site: Site) -> Tensor | int:
        """64 bits for the op ``site`` of the module ``path`` in the running call; see ``place``."""
        if torch.compiler.is_compiling():
            return _mixed(_running(self.now) ^ _place_bits(path, site))
        return _mixed_number(self._call_key() ^ _place_bits(path, site) & _WHOLE)

    def spare(self, dims: Mapping[int, str]) -> dict[int, int]:
        """Of the named dims of a value, how much longer they are in the running call than its caller has them."""
        return self._spare(dims) if self._lengths else {}

    @eager
    def _spare(self, dims: Mapping[int, str]) -> dict[int, int]:
        lengths = self._lengths.get(self._call_key(), {})
        pairs = ((dim, lengths[name]) for dim, name in dims.items() if name in lengths)
        return {dim: inside - given for dim, (given, inside) in pairs}

    def _call_key(self) -> int:
        recomputed = _recomputed()
        return self._own_key() if recomputed is None else recomputed

    def _own_key(self) -> int:
        return _MARK << _MARK_SHIFT | _hashed(f"{self.seed}/{self._latest}") & (1 << _MARK_SHIFT) - 1


def place(path: str, site: Site) -> str:
    """The name of a random op: ``layers.0.drop:1`` is the second one that module ``layers.0.drop`` does.

    A number is that of the op in the module ``path``; a string starts with the rest of a path,
    ``drop:1`` in ``layers.0``, where a module has been made part of its caller.
    """
    if isinstance(site, int):
        return f"{path}:{site}"
    return f"{path}.{site}" if path else site


def seed(program: Any, value: int, step: int = 0) -> None:
    """Set the seed of a program's random masks, and the step of its next call in training mode.

    Until then the seed is 0: the ranks agree without asking each other, and ``torch.manual_seed`` has no part
    in it. Give the same numbers on every rank. To resume training, give what ``steps`` was.
    """
    for random in _states(program):
        random.seed, random.step = value, step


def steps(program: Any) -> int:
    """The step of a program's next call in training mode: how many it has had."""
    return _states(program)[0].step


def _states(program: Any) -> list[Random]:
    return [one._random for one in getattr(program, "programs", [program])]  # noqa: SLF001 - a module's own state


def dropped(x: Tensor, p: float, key: Tensor | int, cuts: Cuts = (), spare: Mapping[int, int] | None = None) -> Tensor:
    """``x`` with elements zeroed with probability ``p`` and the others divided by 1 - p.

    ``key`` names the mask of the whole value, of which ``x`` is the block that ``cuts`` leave, outermost first.
    ``spare``: by dim, how many elements at its end the whole value of one device does not have.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"a probability is between 0 and 1, not {p}")
    if p == 0:
        return x
    if p == 1:
        return x * 0
    return (x * (1 / (1 - p))).masked_fill(drop_mask(x, p, key, cuts, spare), 0)


def drop_mask(
    like: Tensor, p: float, key: Tensor | int, cuts: Cuts = (), spare: Mapping[int, int] | None = None
) -> Tensor:
    """Which elements ``dropped`` zeroes, for 0 <= p < 1."""
    return _bits(_indices(like, cuts, spare or {}), key) < int(p * 2**63)


class Dropping(NamedTuple):
    """The mask of probabilities [..., queries, keys] that are dropped, block by block; see ``dropped``.

    cuts and spare are those of the queries, whose keys are cut alike.
    """

    p: float
    key: Tensor | int
    cuts: Cuts
    spare: Mapping[int, int]

    @property
    def factor(self) -> float:
        """What the others are multiplied with."""
        return 1 / (1 - self.p) if self.p < 1 else 0.0

    def rows(self, query: Tensor) -> Tensor:
        """The place of each row of probabilities in the whole: int64 [..., queries]."""
        return _indices(query[..., 0], self.cuts, self.spare)

    def mask(self, rows: Tensor, keys: Tensor, count: int) -> Tensor:
        """Which are zeroed in these rows, at the places ``keys`` of ``count`` keys."""
        if self.p == 1:
            return torch.ones((), dtype=torch.bool, device=rows.device)
        return _bits(rows.unsqueeze(-1) * count + keys, self.key) < int(self.p * 2**63)


def _indices(like: Tensor, cuts: Cuts, spare: Mapping[int, int]) -> Tensor:
    """The place of each element of ``like`` in the whole value, counted in row-major order; of spare ones any."""
    index = torch.zeros((), dtype=torch.int64, device=like.device)
    for dim, size in enumerate(like.shape):
        along = torch.arange(size, device=like.device)
        for axis, cut in reversed(cuts):  # a place in the block of an inner axis is one in that of the outer axis
            if cut.dim % like.ndim == dim and (cut.segments or cut.zigzag):
                size *= axis.size
                along = places(size, cut, axis.size, axis.rank).to(along.device)[along]
            elif cut.dim % like.ndim == dim:
                part = size // cut.outer
                along = along + (along // max(part, 1) * (axis.size - 1) + axis.rank) * part
                size *= axis.size
        index = index.unsqueeze(-1) * (size - spare.get(dim, 0)) + along
    return index


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


_WEYL, _FIRST, _SECOND = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _bits(index: Tensor, key: Tensor | int) -> Tensor:
    """63 random bits for every index: the generator SplitMix64 at the state ``key`` + index · Weyl constant.

    ``index`` is overwritten.
    """
    return _mixed(index.mul_(_WEYL).add_(key if isinstance(key, Tensor) else _signed(key))).bitwise_and_((1 << 63) - 1)


def _mixed(z: Tensor) -> Tensor:
    """SplitMix64's output for the states ``z``, which are overwritten. 64-bit products wrap around on every device."""
    # torch's shifts keep the sign: the masks clear what it would fill in.
    z.bitwise_xor_((z >> 30) & ((1 << 34) - 1)).mul_(_FIRST)
    z.bitwise_xor_((z >> 27) & ((1 << 37) - 1)).mul_(_SECOND)
    return z.bitwise_xor_((z >> 31) & ((1 << 33) - 1))


def _mixed_number(z: int) -> int:
    """The same of a number of 64 bits, as one without sign."""
    z = (z ^ z >> 30) * _FIRST & _WHOLE
    z = (z ^ z >> 27) * _SECOND & _WHOLE
    return z ^ z >> 31


def _as_tensor(bits: int) -> Tensor:
    return torch.tensor(_signed(bits))


@constant
def _place_bits(path: str, site: Site) -> int:
    return _signed(_hashed(place(path, site)))


@torch.library.custom_op("placement::running_call", mutates_args=())
def _running(latest: Tensor) -> Tensor:
    """The key of the running call, given that of the latest: another one where a checkpoint recomputes an earlier call.

    A graph learns that when it runs.
    """
    recomputed = _recomputed()
    return latest.clone() if recomputed is None else _as_tensor(recomputed)


@_running.register_fake
def _(latest: Tensor) -> Tensor:
    return torch.empty_like(latest)


def _recomputed() -> int | None:
    """The key of the call that is being recomputed in a backward pass, None where none is."""
    ambient = torch.initial_seed()
    return ambient if recomputing() and ambient >> _MARK_SHIFT == _MARK else None


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class _Entry:
    """A call that has seeded the CPU generator, and the generator's state before."""

    def __init__(self) -> None:
        self.before = torch.default_generator.get_state()


class _Ambient:
    """The calls that hold the CPU generator of this process.

    They need not end in reverse order: simulated ranks' calls interleave. Then the state is put back when
    the last of them ends; all of one step have the same key meanwhile.
    """

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._first: _Entry | None = None

    def enter(self, key: int) -> _Entry:
        entry = _Entry()
        if not self._entries:
            self._first = entry
        self._entries.append(entry)
        torch.default_generator.manual_seed(key)
        return entry

    def leave(self, entry: _Entry) -> None:
        was_last = self._entries[-1] is entry
        self._entries.remove(entry)
        if not self._entries and self._first is not None:
            torch.default_generator.set_state(self._first.before)
            self._first = None
        elif was_last:
            torch.default_generator.set_state(entry.before)


_ambient = _Ambient()
