"""The explanation as text that fits a terminal: per module what is sent, how much, where, and because of which line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from placement.report import balance
from placement.report.facts import Facts, facts
from placement.report.fold import Block, Item, Row, Summed, blocks, causes, layer_sums, order, patterns, summed
from placement.report.names import told
from placement.report.page import Page
from placement.report.units import plural, show_bytes, show_time
from placement.solver.lengths import padded, parts

if TYPE_CHECKING:
    from placement.solver.plan import Plan

_ACTION, _BYTES = 14, 8  # `reduce_scatter`, `1023 KiB`
_SIDES = 4 + 2 + _ACTION + 2 + _BYTES + 2 + _ACTION  # a row's width without its first column


def explain_text(plan: Plan, width: int = 80, *, color: bool = False, verbose: bool = False) -> str:
    """The explanation for people, every line at most ``width`` characters (60 at least).

    ``color`` adds ANSI styles. ``verbose`` adds the placement of every parameter and the time of each stage.
    """
    return _Page(facts(plan), width, color=color).text(verbose=verbose, lengths=told_lengths(plan) if verbose else ())


class _Page(Page):
    def __init__(self, found: Facts, width: int, *, color: bool) -> None:
        super().__init__(width, color=color)
        self.facts = found
        self.blocks = blocks(found)
        rows = [row for block in self.blocks for item in block.items for row in item.rows]
        self.column = min(max([len(_what(row)) for row in rows], default=0), self.width - _SIDES)

    def text(self, *, verbose: bool, lengths: Sequence[str] = ()) -> str:
        sections: list[Iterable[str]] = [self.header(), *map(self.block, self.blocks), self.hooks(), self.totals()]
        if verbose:
            sections += [self.parameters("Parameters, as they are used", self.facts.params)]
        elif self.facts.chosen:
            sections += [self.parameters("Parameters that were left to the solver", self.facts.chosen)]
        sections += [self.costs(verbose=verbose), self.filled("Lengths", lengths), self.notes()]
        shown = ["\n".join(lines) for lines in map(list, sections) if lines]
        return "\n\n".join(shown) + "\n"

    # -- sections -------------------------------------------------------------------------------

    def header(self) -> Iterator[str]:
        yield from self.heading(self.facts)
        yield from self.groups(self.facts, self.facts.groups)
        if not self.blocks:
            yield ""
            yield "nothing is sent between modules"
            return
        yield ""
        yield from self.sides("  value -> where it goes", "statements", "dim", "dim")
        yield from self.row("conversion", "forward", "bytes", "backward", style="dim")

    def block(self, block: Block) -> Iterator[str]:
        count = len(block.modules)
        title = block.title or "(the model itself)"
        yield from self.sides(title, f"{count} alike, each:" if count > 1 else "", "bold", "dim")
        if block.is_layer:
            for phase in ("forward", "backward"):
                yield from self.summary(phase, layer_sums(block.items, phase))
        for item in block.items:
            yield from self.item(item)

    def summary(self, phase: str, sums: Mapping[str, tuple[int, int]]) -> Iterator[str]:
        """What one layer sends in one phase: ``forward   2 all_gather 128 MiB + 2 reduce_scatter 128 MiB``."""
        parts = [f"{count} {action} {show_bytes(nbytes)}" for action, (count, nbytes) in sums.items()] or ["nothing"]
        line = f"  {phase:<10}{parts[0]}"
        for part in parts[1:]:
            if len(line) + len(part) + 3 > self.width:
                yield self.paint(line, "dim")
                line = f"{'':<10}+ {part}"
            else:
                line += f" + {part}"
        yield self.paint(line, "dim")

    def item(self, item: Item) -> Iterator[str]:
        yield from self.arrow(item.source, item.target, causes(item.cause))
        for row in item.rows:
            sent = show_bytes(row.nbytes) if row.forward or row.backward else ""
            forward, backward = row.actions
            yield from self.row(_what(row), forward, sent, backward)

    def hooks(self) -> Iterator[str]:
        """A section for each axis or group that gradients are summed over."""
        groups: dict[str, list[Summed]] = {}
        for group in summed(self.facts, self.width - 16):
            groups.setdefault(group.members[0].axis, []).append(group)
        sections = ["\n".join(self.summed(axis, found)) for axis, found in groups.items()]
        yield from "\n\n".join(sections).splitlines()

    def summed(self, axis: str, groups: Sequence[Summed]) -> Iterator[str]:
        members = [hook for group in groups for hook in group.members]
        flat = dict.fromkeys(hook.bucket for hook in members)
        ranks = max(self.facts.mesh[name] for name in members[0].axes)
        nbytes = sum(hook.nbytes for hook in members)
        sent = f"{len(flat)} all_reduce {show_bytes(nbytes)}" if ranks > 1 else ""
        yield from self.sides(
            f"Gradients of {plural(len(members), 'parameter')} summed over {axis}", sent, "bold", "dim"
        )
        for group in groups:
            first, count = group.members[0], len(group.members)
            yield from self.sides(f"  {group.pattern}", causes(group.cause), right_style="dim")
            each = f"{count} x {show_bytes(first.nbytes)}" if count > 1 else show_bytes(first.nbytes)
            met = (
                f"replicated, meets {', '.join(first.meets)}" if first.meets else "replicated, its gradient is partial"
            )
            yield from self.sides(f"    {met}", each, "dim", "dim")

    def totals(self) -> Iterator[str]:
        yield from self.sides("One step", "launches      bytes", "bold", "dim")
        column = max(len(axis) for axis in self.facts.totals) + len(" backward ")
        for axis, phases in self.facts.totals.items():
            for phase, actions in phases.items():
                label = f"{axis} {phase}"
                for action in sorted(actions, key=order):
                    count, nbytes = actions[action]
                    yield from self.sides(
                        f"  {label:<{max(column, 16)}}{action}", f"{count:>8} {show_bytes(nbytes):>10}"
                    )
                    label = ""
                if not actions:
                    yield f"  {label:<{max(column, 16)}}nothing"

    def parameters(self, title: str, names: Iterable[str]) -> Iterator[str]:
        yield self.paint(title, "bold")
        groups: dict[str, list[str]] = {}
        for name in names:
            placed = self.facts.params[name]
            key = told(placed) if len(placed) > 1 else ", ".join(f"{p} @ {axis}" for axis, p in placed.items())
            groups.setdefault(key, []).append(name)
        for key, members in groups.items():
            for pattern in patterns(members, self.width - 20):
                yield from self.sides(f"  {pattern}", key)

    def costs(self, *, verbose: bool) -> Iterator[str]:
        found = self.facts
        if found.outputs:
            outputs = [f"{name} {told(placed)}" for name, placed in found.outputs.items()]
            yield from self.fill("Outputs", "; ".join(outputs))
        params, saved = show_bytes(found.params_bytes), show_bytes(found.saved_bytes)
        yield from self.fill("Memory", f"{params} of parameters, {saved} kept for backward, on one rank")
        compute, sent = show_time(found.compute), show_time(found.communication)
        yield from self.fill("Time", f"{compute} compute + {sent} communication, predicted")
        yield from self.filled("Balance", map(balance.told, found.balances))
        yield from self.fill("Proof", proof(found))
        if verbose:
            stages = [f"{name} {seconds:.2f} s" for name, seconds in found.stages.items()]
            yield from self.fill("Stages", ", ".join(stages) or "not timed")

    def notes(self) -> Iterator[str]:
        yield from self.filled("Note", self.facts.notes)

    def filled(self, title: str, texts: Iterable[str]) -> Iterator[str]:
        for text in texts:
            yield from self.fill(title, text)

    # -- lines ----------------------------------------------------------------------------------

    def row(self, what: str, forward: str, sent: str, backward: str, style: str = "") -> Iterator[str]:
        """The columns of a conversion; a first column that is too long has a line of its own."""
        lead = f"    {what}"
        if len(what) > self.column:
            yield from self.broken(lead)
            lead = ""
        line = f"{lead:<{4 + self.column}}  {forward:<{_ACTION}}  {sent:>{_BYTES}}  {backward}"
        if style:
            yield self.paint(line, style)
        else:
            yield self.paint(line[: 4 + self.column], "") + self.paint(line[4 + self.column :], "action")

    def arrow(self, source: str, target: str, right: str) -> Iterator[str]:
        """``source -> target`` and on the right what caused it; broken before the arrow where it is too long."""
        whole = f"  {source} -> {target}" if target else f"  {source}"
        if len(whole) <= self.width:
            yield from self.sides(whole, right, right_style="dim")
        else:
            yield self.shorten(source, "  ")
            yield from self.sides(self.shorten(target, "    -> "), right, right_style="dim")


def told_lengths(plan: Plan) -> list[str]:
    """What calls do where a length is no multiple of what it is cut in, for each dim that is cut."""
    blocks = {symbol.name: n for symbol, n in parts(plan).items()}
    found: list[str] = []
    for name, how in padded(plan).items():
        what = f"{name} is cut in {blocks[name]}: a call of another length is"
        found.append(f"{what} refused, as {how}" if isinstance(how, str) else f"{what} padded inside")
    return found


def _what(row: Row) -> str:
    return f"{row.what} @ {row.axis}"


def proof(found: Facts) -> str:
    """What is known of the optimum."""
    step = f"{show_time(found.cost)} a step ({found.cost} ps)"
    if found.optimal:
        return f"{step} is the optimum, proven"
    gap = 100 * (found.cost - found.bound) / found.bound if found.bound else 0.0
    more = f"{gap:.2g}" if gap < 100 else f"{gap:.0f}"
    return f"{step}, at most {more} % above the optimum: no plan takes less than {found.bound} ps"
