"""A plan as nested calls: which module each conversion stands in, and what every module takes and returns.

Ops keep the module they were captured in. A conversion that ends a partial sum stands at the exit of the
outermost module that its consumers lie outside of, so that modules return whole values; every other one
stands before its first consumer, in the innermost module that has all of them. Modules without children
(``Linear``) stay free of conversions of their callers' values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from placement.graph.ir import Call, Node, Output, Value
from placement.solver.plan import Plan, Step, Version
from placement.types import Kind

Stack = tuple[Call, ...]


@dataclass(slots=True, eq=False)
class Block:
    """One call of one module: ops, conversions and calls of children, in order."""

    call: Call
    entries: list[Node | Step | Block] = field(default_factory=list)
    takes: list[Version] = field(default_factory=list)
    gives: list[Version] = field(default_factory=list)

    @property
    def path(self) -> str:
        """The module's dotted path, '' for the root."""
        return self.call.path

    def walk(self) -> Iterator[Block]:
        """This block and all inside it."""
        yield self
        for entry in self.entries:
            if isinstance(entry, Block):
                yield from entry.walk()


ROOT = Call("")


def nested(plan: Plan, inlined: frozenset[Call] = frozenset()) -> Block:
    """The plan as a tree of blocks; calls in ``inlined``, and calls that come apart, are part of their callers."""
    while True:
        root, torn = _tree(_ordered(plan, inlined))
        if not torn:
            break
        inlined |= torn
    _interfaces(plan, root)
    return root


# -- order --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Placed:
    key: tuple[int, int, int, int]  # where: an op, before or after it, outer modules first or last, the number
    stack: Stack
    item: Node | Step


def _common(left: Stack, right: Stack) -> Stack:
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return left[:count]


def _ordered(plan: Plan, inlined: frozenset[Call]) -> list[_Placed]:
    nodes = plan.graph.nodes
    stacks = [tuple(c for c in node.stack if c not in inlined) for node in nodes]
    index = {node: i for i, node in enumerate(nodes)}
    placed = [_Placed((i, 0, 0, 0), stacks[i], node) for i, node in enumerate(nodes)]
    parameters = {p.value: p.names for p in plan.graph.parameters}
    leaves = _leaf_modules(plan)
    made_at: dict[Version, tuple[int, Stack]] = {
        Version(v, plan.produced[v]): (index[node], stacks[index[node]]) for node in nodes for v in node.results
    }
    converted: set[Version] = set()  # made right before their first consumer, so there is nothing to follow
    for number, step in enumerate(plan.steps):
        at, own = made_at.get(step.source, (-1, ()))
        users = sorted(index[u] for u in step.consumers if isinstance(u, Node))
        everywhere = [stacks[u] for u in users] + [() for u in step.consumers if isinstance(u, Output)]
        shared = everywhere[0] if everywhere else ()
        for stack in everywhere[1:]:
            shared = _common(shared, stack)
        made_here = at in users and step.source not in converted
        nearest = _common(own, stacks[users[0]]) if users and not made_here else ()
        if step.value in parameters:
            location, after = shared, False
            while location and owned(parameters[step.value], location[-1].path) is None:
                location = location[:-1]  # hooks are by name, and only what owns the parameter has one for it
        elif made_here:  # what its own line of the spec turns it into, before anyone reads it
            location, after = own, True
        elif step.conversion.source is Kind.P and at >= 0 and step.source not in converted:
            outside = _common(own, shared)
            location, after = own[: len(outside) + 1], True
        else:
            location, after = shared, False
        if len(nearest) > len(location):
            location = nearest
        while (
            step.value not in parameters and location and len(location) > len(nearest) and location[-1].path in leaves
        ):
            location = location[:-1]
        key = _after(stacks, at, location, number) if after else _before(stacks, users, location, number, len(nodes))
        placed.append(_Placed(key, location, step))
        made_at[step.target] = (at, location) if after else (key[0], location)
        converted |= set() if after else {step.target}
    return sorted(placed, key=lambda p: p.key)


def _after(stacks: Sequence[Stack], at: int, location: Stack, number: int) -> tuple[int, int, int, int]:
    """Right after the part of ``location`` that makes the value."""
    depth = len(location) + 1
    last = at
    while len(stacks[at]) >= depth and last + 1 < len(stacks) and stacks[last + 1][:depth] == stacks[at][:depth]:
        last += 1
    return (last, 1, -depth, number)


def _before(
    stacks: Sequence[Stack], users: Sequence[int], location: Stack, number: int, end: int
) -> tuple[int, int, int, int]:
    """Right before the part of ``location`` that uses the value first."""
    if not users:
        return (end, -1, 0, number)
    depth = len(location) + 1
    first = users[0]
    while len(stacks[users[0]]) >= depth and first > 0 and stacks[first - 1][:depth] == stacks[users[0]][:depth]:
        first -= 1
    return (first, -1, depth, number)


def _leaf_modules(plan: Plan) -> frozenset[str]:
    paths = plan.graph.modules
    parents = {path.rpartition(".")[0] for path in paths}
    return frozenset(path for path in paths if path not in parents)


# -- tree ---------------------------------------------------------------------------------------


def _tree(items: Sequence[_Placed]) -> tuple[Block, frozenset[Call]]:
    """Blocks of consecutive items; calls of which there would be several blocks come back as torn."""
    torn: set[Call] = set()

    def build(call: Call, part: Sequence[_Placed], depth: int) -> Block:
        block = Block(call)
        seen: set[Call] = set()
        position = 0
        while position < len(part):
            stack = part[position].stack
            if len(stack) <= depth:
                block.entries.append(part[position].item)
                position += 1
                continue
            child, start = stack[depth], position
            while position < len(part) and len(part[position].stack) > depth and part[position].stack[depth] == child:
                position += 1
            if child in seen:
                torn.add(child)
            seen.add(child)
            block.entries.append(build(child, part[start:position], depth + 1))
        return block

    return build(ROOT, items, 0), frozenset(torn)


# -- interfaces ---------------------------------------------------------------------------------


def owned(names: Sequence[str], path: str) -> str | None:
    """A parameter's name relative to the module at ``path``, None where none of its names lies inside."""
    for name in names:
        if not path or name.startswith(path + "."):
            return name[len(path) + 1 :] if path else name
    return None


def _interfaces(plan: Plan, root: Block) -> None:
    """Fill in what every block takes from outside and gives to what comes after it."""
    names = {p.value: p.names for p in plan.graph.parameters}
    outputs = {plan.uses[o, 0] for o in plan.graph.outputs if o.value is not None}
    _takes(plan, root, names)
    _gives(plan, root, outputs)


def uses_of(plan: Plan, entry: Node | Step | Block) -> list[Version]:
    """The versions that an entry reads, in order, without repetition."""
    if isinstance(entry, Block):
        return entry.takes
    if isinstance(entry, Step):
        return [entry.source]
    return list(dict.fromkeys(plan.uses[entry, position] for position in range(len(entry.operands))))


def makes(plan: Plan, entry: Node | Step | Block) -> list[Version]:
    """The versions that an entry defines for its block."""
    if isinstance(entry, Block):
        return entry.gives
    if isinstance(entry, Step):
        return [entry.target]
    return [Version(v, plan.produced[v]) for v in entry.results]


def _takes(plan: Plan, block: Block, names: Mapping[Value, Sequence[str]]) -> set[Version]:
    """Set ``takes`` all the way down; returns what the block defines, inside and out."""
    defined: set[Version] = set()
    taken: dict[Version, None] = {}
    for entry in block.entries:
        inner = _takes(plan, entry, names) if isinstance(entry, Block) else set[Version]()
        for version in uses_of(plan, entry):
            parameter = names.get(version.value)
            raw = parameter is not None and version.stage == 0 and version.type == plan.produced[version.value]
            if version not in defined and not (raw and owned(parameter or (), block.path) is not None):
                taken[version] = None
        defined |= inner or set(makes(plan, entry))
    order = _argument_order(plan, block)
    block.takes = sorted(taken, key=lambda v: order.get(v.value, len(order)))
    return defined


def _argument_order(plan: Plan, block: Block) -> dict[Value, int]:
    info = plan.graph.modules.get(block.path)
    arguments = info.arguments.get(block.call.index, {}) if info else {}
    return {value: index for index, value in enumerate(arguments.values())}


def _gives(plan: Plan, block: Block, needed: set[Version]) -> None:
    """Set ``gives`` of the blocks inside, last first: ``needed`` is what is read after ``block``."""
    after = set(needed)
    for entry in reversed(block.entries):
        if isinstance(entry, Block):
            inside = [v for e in entry.walk() for x in e.entries if not isinstance(x, Block) for v in makes(plan, x)]
            info = plan.graph.modules.get(entry.path)
            returned = info.returned.get(entry.call.index, ()) if info else ()
            rank = {value: index for index, value in enumerate(returned)}
            given = [v for v in dict.fromkeys(inside) if v in after]
            entry.gives = sorted(given, key=lambda v: rank.get(v.value, len(rank)))
            _gives(plan, entry, after & set(inside))
        after.update(uses_of(plan, entry))
