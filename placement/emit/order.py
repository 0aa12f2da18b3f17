"""Which tensors lie in memory with their tokens outermost, so that blocks of tokens are sent and received as they are.

A pattern in a plan: values [batch, tokens, size] between conversions that cut the tokens. What is gathered, scattered
or looked up can lie in either order at no cost, pointwise ops and norms of rows keep the order of what they take, so
do views that leave batch and tokens as they are, and products that run with a conversion take and give both.
Everything else might copy. So values that only such ops tie together lie with their tokens outermost; where one of
them goes anywhere else, none does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from placement.graph._torch import schema_name
from placement.graph.attention import ATTENTION
from placement.graph.ir import Node, Output
from placement.rules import lookup
from placement.solver.mesh import Place
from placement.solver.plan import Plan, Step, Version
from placement.types import Action

aten = torch.ops.aten

# Beside pointwise ops: what gives its result in the memory order of its first operand.
_KEEPING = (aten.to.dtype, aten.rms_norm.default, aten.dropout.default)
# What takes its operands in any order, and gives one of its own.
_ANY = (aten.scaled_dot_product_attention.default, ATTENTION, aten.cat.default)
_TOKENS = 1  # the dim, of 3


@dataclass(frozen=True, slots=True)
class Orders:
    """What lies with its tokens outermost. steps: whose results do. lookups: ops that do, their indices as well."""

    steps: frozenset[Step] = frozenset()
    lookups: frozenset[Node] = frozenset()


def orders(plan: Plan, cut: Callable[[Version, Step], Place | None]) -> Orders:
    """The memory order of a plan. ``cut``: where a step cuts one of its versions."""
    ties = _Ties(plan, cut)
    steps = frozenset(step for step in plan.steps if ties.gives(step))
    # Of what is scattered, itself not the result of a step, the order is only worth something if it is sent so.
    rest = (step for step in plan.steps if step not in steps and step.product is None)
    ties.refuse(step.source for step in rest if step.conversion.forward is Action.REDUCE_SCATTER)
    lookups = frozenset(n for n in plan.graph.nodes if _looks_up(plan, n) and ties.free(ties.made(n)))
    return Orders(steps, lookups)


class _Ties:
    """Versions of one memory order, as a union-find; and those of whose sets some must be contiguous."""

    def __init__(self, plan: Plan, cut: Callable[[Version, Step], Place | None]) -> None:
        self.plan, self.cut = plan, cut
        self._parent: dict[Version, Version] = {}
        self._refused: set[Version] = set()
        self._moved: set[Version] = set()  # views of which no dims can be joined
        self._weights = {parameter.value for parameter in plan.graph.parameters}
        joined = {step.product for step in plan.steps if step.product is not None and self.turns(step)}
        layers = {node for step in plan.steps for node in step.layers}
        for node in plan.graph.nodes:
            self._tie(node, free=node in joined or node in layers)
        self.refuse(version for (user, _), version in plan.uses.items() if isinstance(user, Output))
        self.refuse(step.source for step in plan.steps if not self.turns(step))

    def _tie(self, node: Node, *, free: bool) -> None:
        """Tie what an op takes to what it gives, or refuse it."""
        if self.plan.strategies[node].leading or len(node.results) != 1:
            self.refuse(self._taken(node))
            return
        made, rule = self.made(node), lookup(node)
        shape = made.value.shape
        pointwise = torch.Tag.pointwise in getattr(node.op, "tags", ()) or node.op in _KEEPING
        for version in self._taken(node):
            grouped = version.value.shape[:2] == shape[:2] and len(shape) > 2 and version not in self._moved
            if pointwise and version.value.shape == shape:
                self._tie_to(made, version, moved=version in self._moved)
            elif rule is not None and rule.view and (node.op is not aten.reshape.default or grouped):
                self._tie_to(made, version, moved=node.op is not aten.reshape.default)
            elif not free and not pointwise and node.op not in _ANY:
                self._refused.add(version)

    def _taken(self, node: Node) -> Iterable[Version]:
        return (self.plan.uses[node, position] for position in range(len(node.operands)))

    def _tie_to(self, made: Version, version: Version, *, moved: bool) -> None:
        self._parent[self._root(version)] = self._root(made)
        if moved:
            self._moved.add(made)

    def made(self, node: Node) -> Version:
        """What an op gives."""
        return Version(node.results[0], self.plan.produced[node.results[0]])

    def _root(self, version: Version) -> Version:
        while (above := self._parent.get(version, version)) != version:
            version = above
        return version

    def refuse(self, versions: Iterable[Version]) -> None:
        """These are read by what wants them contiguous."""
        self._refused.update(versions)

    def free(self, version: Version) -> bool:
        """Whether nothing that is tied to the version has to be contiguous."""
        return self._root(version) not in {self._root(refused) for refused in self._refused}

    def turns(self, step: Step) -> bool:
        """Whether the step gathers or scatters whole tokens."""
        action = step.conversion.forward
        if action not in (Action.ALL_GATHER, Action.REDUCE_SCATTER) or len(step.value.shape) != 3:
            return False
        if step.value in self._weights:
            return False
        where = self.cut(step.source if action is Action.ALL_GATHER else step.target, step)
        return where is not None and where.dim == _TOKENS and where.whole

    def gives(self, step: Step) -> bool:
        """Whether what the step gives lies with its tokens outermost: its own result, or those of its layers."""
        if not self.turns(step):
            return False
        if step.layers:
            return all(self.free(self.made(node)) for node in step.layers)
        return self.free(step.target)


def _looks_up(plan: Plan, node: Node) -> bool:
    """Whether the op looks up rows in a table whose rows are cut, by indices [batch, tokens]."""
    return (
        schema_name(node.op)[1] == "embedding"
        and bool(plan.strategies[node].leading)
        and len(node.results[0].shape) == 3
    )
