"""A decoder as a problem of the solver, without a model: for tests of the solver alone.

It is made with the algebra, the cost model and the conversion tables of the package: 68 variables a layer, the ops that
torch.export gives for a Llama-style decoder and its parameters, 5 strategies each on average; rotary cos and sin and
the mask are consumed by every layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import permutations

import numpy as np

from placement.solver.cost import Machine
from placement.solver.problem import Net, Problem, Variable
from placement.solver.steiner import conversions
from placement.types import I, Kind, P, R, S, Type, conversion

BATCH, SEQ, HIDDEN, HEADS, KV, HEAD, FFN, VOCAB = 1, 4096, 8192, 64, 8, 128, 28672, 128256
SIZES = {"b": BATCH, "s": SEQ, "t": SEQ, "d": HIDDEN, "h": HEADS, "g": KV, "k": HEAD, "f": FFN, "v": VOCAB}
SHARDED = "sdhgfvk"  # factors that an axis of 8 divides; batch is 1


@dataclass
class Decoder:
    """Builds a problem op by op. A value is a string of factors, one letter a dim."""

    machine: Machine
    variables: list[Variable] = field(default_factory=list)
    values: list[tuple[str, str, list[Type], list[Type], list[tuple[int, list[Type]]]]] = field(default_factory=list)

    def types(self, factors: str, *, gradient: bool = True) -> list[Type]:
        """The types that a value of these factors may have."""
        shards = [S(f) for f in factors if f in SHARDED]
        return [I, R, P, *shards] if gradient else [R, *shards]

    def leaf(self, name: str, factors: str, at: list[Type] | None = None, *, gradient: bool = True) -> int:
        """An input or parameter: any of its types at no cost, or those in ``at``."""
        kinds = at or [t for t in self.types(factors, gradient=gradient) if t.kind is not Kind.P]
        return self._add(name, factors, [((), out, 0) for out in kinds], (), gradient=gradient)

    def op(self, name: str, out: str, *args: int, contracted: str = "", blocked: str = "", linear: bool = False) -> int:
        """An op whose strategies follow from the factors that its operands and result share."""
        ins = [self.values[a][1] for a in args]
        grads = [I in self.values[a][2] for a in args]
        n = self.machine.n
        work = 2 * np.prod([SIZES[f] for f in {*out, *contracted}], dtype=object) if contracted else 0
        traffic = 6 * sum(int(np.prod([SIZES[f] for f in v], dtype=object)) for v in (out, *ins))
        whole = self.machine.compute(int(work), traffic, "bfloat16")
        cut = self.machine.compute(int(work) // n, traffic // n, "bfloat16")
        found: list[tuple[tuple[Type, ...], Type, int]] = [
            (tuple(I if g else R for g in grads), I, whole),
            (tuple(R for _ in args), R, whole),
        ]
        for f in dict.fromkeys((*out, *contracted)):
            if f in SHARDED and f not in blocked:
                result = P if f in contracted else S(f)
                found.append((tuple(S(f) if f in v else R for v in ins), result, cut))
        if linear:
            found += [
                (tuple(P if i == j else R for i in range(len(ins))), P, whole) for j in range(len(ins)) if grads[j]
            ]
        if name.endswith("add"):
            found.append((tuple(P for _ in args), P, whole))
        return self._add(name, out, found, args)

    def _add(
        self,
        name: str,
        out: str,
        found: list[tuple[tuple[Type, ...], Type, int]],
        args: tuple[int, ...],
        *,
        gradient: bool = True,
    ) -> int:
        index = len(self.variables)
        costs = np.zeros((3, len(found)), dtype=np.int64)
        costs[0] = [cost for *_, cost in found]
        costs[1] = [
            int(np.prod([SIZES[f] for f in out])) // (1 if made.kind is not Kind.S else self.machine.n)
            for _, made, _ in found
        ]
        self.variables.append(Variable(name, costs))
        self.values.append((name, out, self.types(out, gradient=gradient), [made for _, made, _ in found], []))
        for at, arg in enumerate(args):
            self.values[arg][4].append((index, [wants[at] for wants, *_ in found]))
        return index

    def problem(self) -> Problem:
        """What was built so far."""
        nets = [
            self._net(index, name, factors, types, made, consumers)
            for index, (name, factors, types, made, consumers) in enumerate(self.values)
            if consumers
        ]
        return Problem(tuple(self.variables), tuple(nets))

    def _net(self, index: int, name: str, factors: str, types: list[Type], made: list[Type], consumers: list) -> Net:
        nbytes = 2 * int(np.prod([SIZES[f] for f in factors]))

        prices: dict[tuple[int, int], tuple[int, int, int]] = {}
        for a, b in permutations(range(len(types)), 2):
            row = conversion(types[a], types[b], gradient=I in types)
            if row is not None:
                both = (row.forward, row.backward)
                prices[a, b] = (
                    sum(self.machine.collective(action, nbytes) for action in both),
                    0,
                    sum(self.machine.launches(action) for action in both),
                )
        every = tuple(range(len(types)))
        table = conversions(len(types), prices, every).table(every, np.arange(1 << len(types)))

        def ids(wanted: list[Type]) -> np.ndarray:
            return np.array([types.index(t) for t in wanted], dtype=np.int64)

        return Net(name, index, ids(made), tuple((v, ids(wants)) for v, wants in consumers), table)


def decoder(layers: int, *, placed: bool, machine: Machine) -> Problem:
    """A decoder with every layer's ops. placed: weights are placed as for tensor parallelism."""
    d = Decoder(machine)

    def weight(name: str, factors: str, at: Type) -> int:
        return d.leaf(name, factors, [at, *([R, I] if at is R else [])] if placed else None)

    def norm(x: int, at: str) -> int:
        wide = d.op(f"{at}.to", "bsd", x)
        square = d.op(f"{at}.pow", "bsd", wide)
        mean = d.op(f"{at}.mean", "bs", square, contracted="d")
        rsqrt = d.op(f"{at}.rsqrt", "bs", d.op(f"{at}.eps", "bs", mean))
        scaled = d.op(f"{at}.to", "bsd", d.op(f"{at}.mul", "bsd", wide, rsqrt))
        return d.op(f"{at}.scale", "bsd", weight(f"{at}.weight", "d", R), scaled)

    def rotate(x: int, h: str, at: str) -> int:
        halves = [d.op(f"{at}.slice", f"b{h}sk", x, blocked="k", linear=True) for _ in range(2)]
        turned = d.op(
            f"{at}.cat", f"b{h}sk", d.op(f"{at}.neg", f"b{h}sk", halves[1], linear=True), halves[0], blocked="k"
        )
        one = d.op(f"{at}.cos", f"b{h}sk", x, cos, linear=True)
        return d.op(f"{at}.add", f"b{h}sk", one, d.op(f"{at}.sin", f"b{h}sk", turned, sin, linear=True))

    ids = d.leaf("input_ids", "bs", [R], gradient=False)
    positions = d.leaf("positions", "s", gradient=False)
    cos = d.leaf("cos", "sk", gradient=False)
    sin = d.leaf("sin", "sk", gradient=False)
    mask = d.leaf("mask", "st", gradient=False)
    del positions
    x = d.op("embed", "bsd", ids, weight("embed.weight", "vd", S("v")))
    for layer in range(layers):
        at = f"{layer}"
        y = norm(x, f"{at}.norm1")
        heads = {}
        for part, h in (("q", "h"), ("k", "g"), ("v", "g")):
            made = d.op(
                f"{at}.{part}", f"bs{h}k", y, weight(f"{at}.{part}.weight", f"{h}kd", S(h)), contracted="d", linear=True
            )
            viewed = d.op(f"{at}.{part}.view", f"bs{h}k", made, linear=True)
            heads[part] = d.op(f"{at}.{part}.transpose", f"b{h}sk", viewed, linear=True)
        q, k = rotate(heads["q"], "h", f"{at}.q"), rotate(heads["k"], "g", f"{at}.k")
        wide = []
        for part, z in (("k", k), ("v", heads["v"])):
            z = d.op(f"{at}.{part}.unsqueeze", "bgsk", z, linear=True)
            z = d.op(f"{at}.{part}.expand", "bgsk", z, linear=True)
            wide.append(d.op(f"{at}.{part}.reshape", "bgsk", z, linear=True))
        part_mask = d.op(f"{at}.mask.slice", "st", mask, blocked="t")
        heads_q = d.op(f"{at}.q.group", "bgsk", q, linear=True)
        a = d.op(f"{at}.sdpa", "bgsk", heads_q, *wide, part_mask, blocked="stk")
        a = d.op(f"{at}.contiguous", "bsgk", d.op(f"{at}.transpose", "bsgk", a, linear=True), linear=True)
        a = d.op(
            f"{at}.o",
            "bsd",
            d.op(f"{at}.view", "bsgk", a, linear=True),
            weight(f"{at}.o.weight", "dgk", S("g")),
            contracted="gk",
            linear=True,
        )
        x = d.op(f"{at}.attention.add", "bsd", x, a)
        y = norm(x, f"{at}.norm2")
        gate = d.op(
            f"{at}.silu",
            "bsf",
            d.op(f"{at}.gate", "bsf", y, weight(f"{at}.gate.weight", "fd", S("f")), contracted="d", linear=True),
        )
        up = d.op(f"{at}.up", "bsf", y, weight(f"{at}.up.weight", "fd", S("f")), contracted="d", linear=True)
        y = d.op(f"{at}.mul", "bsf", gate, up, linear=True)
        y = d.op(f"{at}.down", "bsd", y, weight(f"{at}.down.weight", "df", S("f")), contracted="f", linear=True)
        x = d.op(f"{at}.mlp.add", "bsd", x, y)
    y = norm(x, "norm")
    y = d.op("head", "bsv", y, weight("head.weight", "vd", S("v")), contracted="d", linear=True)
    d.op("loss", "bs", y, ids, blocked="v")
    return d.problem()
