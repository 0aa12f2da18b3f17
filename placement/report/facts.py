"""Everything an explanation says, gathered from a plan once: the formats only lay it out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from placement.graph.ir import Node, Output, Value
from placement.report.balance import Balance, balances
from placement.report.names import Names, common, operation, shared, visible
from placement.solver.memory import Memory, memory
from placement.solver.overlap import cuts
from placement.solver.states import chosen
from placement.solver.sums import SUMS
from placement.types import Action, Kind

if TYPE_CHECKING:
    from placement.lang.diagnostics import Diagnostic
    from placement.solver.plan import Plan, Step

Totals = Mapping[str, Mapping[str, Mapping[str, tuple[int, int]]]]
"""axis → phase → action → (launches, bytes)."""


@dataclass(frozen=True, slots=True)
class Converted:
    """A conversion, in words.

    module: the innermost module that contains all consumers. place: the module whose business it is: leaving
    a partial sum belongs where the sum is made as well as where it goes. users: names of the consumers, none where
    a ``value`` line has the value converted at once.
    user_modules: the module of each. source, target: the user's words, which do not tell I from R as ``source_type``
    and ``target_type`` do. nbytes: of the full value. position: of the conversion in program order. axis: the name of
    ``axes`` together. times: picoseconds forward and backward. again: how often a stored parameter is gathered once
    more in the backward; kept_by: for each time the position of the op that needs it then. summed: as nbytes, in the
    dtype that its sums are done in. overlap: how its collectives are cut beside layers, '' where in one piece; priced:
    since that is cheapest, where no line says it. launches: (phase, action, bytes) of each.
    """

    value: str
    home: str
    module: str
    place: str
    users: tuple[str, ...]
    user_modules: tuple[str, ...]
    axis: str
    axes: tuple[str, ...]
    source: str
    target: str
    source_type: Kind
    target_type: Kind
    forward: str
    backward: str
    nbytes: int
    cause: tuple[str, ...]
    position: tuple[int, int]
    times: tuple[int, int] = (0, 0)
    again: int = 0
    kept_by: tuple[int, ...] = ()
    stored: bool = False
    summed: int = 0
    overlap: str = ""
    priced: bool = False
    launches: tuple[tuple[str, str, int], ...] = ()

    def sent(self, action: str) -> int:
        """The bytes that one of its actions counts."""
        return self.summed if Action(action) in SUMS else self.nbytes


@dataclass(frozen=True, slots=True)
class Inside:
    """An op that communicates by itself. collectives: (phase, action, bytes) in the order of the rule."""

    op: str
    module: str
    name: str
    axis: str
    axes: tuple[str, ...]
    launches: tuple[tuple[str, str, int], ...]
    position: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Hooked:
    """A parameter that is replicated on axes, over which its gradient is summed. axis: the name of ``axes`` together.

    meets: the placements on these axes that it is used together with. time: picoseconds that its part of the flat
    reduction takes. bucket: which of the flat reductions that is.
    """

    parameter: str
    axis: str
    axes: tuple[str, ...]
    nbytes: int
    meets: tuple[str, ...]
    cause: tuple[str, ...]
    dtype: str
    time: int = 0
    bucket: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """Axes whose ranks communicate together. ranks: how many they are. link: the slowest of the axes'."""

    axes: tuple[str, ...]
    ranks: int
    link: str


@dataclass(frozen=True, slots=True)
class Facts:
    """A plan in words and numbers. Times and costs are picoseconds, sizes bytes, stages seconds.

    groups: those of several axes that something is sent in, by name. chosen: the parameters left to the solver.
    """

    files: tuple[str, ...]
    mesh: Mapping[str, int]
    device: str
    links: Mapping[str, str]
    groups: Mapping[str, Group]
    conversions: tuple[Converted, ...]
    inside: tuple[Inside, ...]
    hooks: tuple[Hooked, ...]
    params: Mapping[str, Mapping[str, str]]
    chosen: tuple[str, ...]
    values: Mapping[str, Mapping[str, str]]
    outputs: Mapping[str, Mapping[str, str]]
    totals: Totals
    params_bytes: int
    saved_bytes: int
    memory: Memory
    communication: int
    compute: int
    cost: int
    bound: int
    optimal: bool
    notes: tuple[str, ...]
    stages: Mapping[str, float]
    balances: tuple[Balance, ...] = ()


def facts(plan: Plan) -> Facts:
    """Gather what there is to say about ``plan``."""
    names = Names(plan)
    files = files_of(plan)
    used = memory(plan)
    left = chosen(plan.bound)
    return Facts(
        files=tuple(files.values()),
        mesh=dict(plan.mesh.sizes),
        device=plan.mesh.device.name,
        links={axis.name: link.name for axis, link in zip(plan.mesh.axes, plan.mesh.links, strict=True)},
        groups=_groups(plan),
        conversions=tuple(_conversions(plan, names, files)),
        inside=tuple(_inside(plan, names)),
        hooks=tuple(_hooks(plan, names, files)),
        params={p.name: names.placements(p.value, plan.produced[p.value]) for p in plan.graph.parameters},
        chosen=tuple(p.name for p in plan.graph.parameters if p.value in left),
        values=_values(plan, names),
        outputs=_outputs(plan, names),
        totals=_totals(plan),
        params_bytes=used.rank.parameters,
        saved_bytes=used.rank.saved_bytes,
        memory=used,
        communication=plan.cost[0] - plan.compute,
        compute=plan.compute,
        cost=plan.cost[0],
        bound=plan.lower_bound[0],
        optimal=plan.cost == plan.lower_bound,
        notes=tuple(_note(note, files) for note in plan.bound.notes),
        stages=dict(plan.stages),
        balances=balances(plan),
    )


def told_files(files: Iterable[str]) -> dict[str, str]:
    """Files as they are told: without the folder that they share, which is another on every machine."""
    found = sorted(files)
    folder = shared([file.split("/")[:-1] for file in found])
    return {file: "/".join(file.split("/")[len(folder) :]) for file in found}


def files_of(plan: Plan) -> dict[str, str]:
    """How the files are told that the plan's statements lie in."""
    bound = plan.bound
    pins = (*bound.inputs.values(), *bound.parameters.values(), *bound.values.values(), *bound.outputs.values())
    return told_files({pin.span.file for pin in pins if pin is not None and pin.span is not None})


def told_causes(found: Iterable[str], files: Mapping[str, str]) -> tuple[str, ...]:
    """Causes, each ``file:line``, with the files as they are told."""
    parts = (cause.rpartition(":") for cause in found)
    return tuple(f"{files.get(file, file)}:{line}" for file, _, line in parts)


def _note(note: Diagnostic, files: Mapping[str, str]) -> str:
    span = note.span
    where = "" if span is None else f"{files.get(span.file, span.file)}:{span.line}:{span.column}: "
    return f"{where}{note.message}"


def _conversions(plan: Plan, names: Names, files: Mapping[str, str]) -> Iterable[Converted]:
    hooked = {hook.parameter.value for hook in plan.hooks}
    for step in plan.steps:
        if step.value in hooked and step.sums_gradient:
            continue  # the hook says it
        yield _converted(plan, names, step, files)


def _converted(plan: Plan, names: Names, step: Step, files: Mapping[str, str]) -> Converted:
    producer = names.producers.get(step.value)
    stacks = [names.stack(user) for user in step.consumers]
    users = [user for user in step.consumers if user is not producer]
    ops = sorted(names.order[user] for user in step.consumers if isinstance(user, Node))
    # A `value` line that converts what an op gives is carried out by that op's side: its producer is its consumer.
    leaving = producer is not None and (step.conversion.source is Kind.P or producer in step.consumers)
    n = plan.mesh.ranks(step.axes)
    actions = (step.conversion.forward, step.conversion.backward) if n > 1 else (Action.NONE, Action.NONE)
    return Converted(
        value=names.value(step.value),
        home=common([names.stack(producer)]),
        module=common(stacks),
        place=common([*stacks, names.stack(producer)]) if leaving else common(stacks),
        users=tuple(map(names.user, users)),
        user_modules=tuple(common([names.stack(user)]) for user in users),
        axis=step.axis,
        axes=names.axes(step.axes),
        source=names.placement(step.value, step.source.type[step.axes[0]], step.axes),
        target=names.placement(step.value, step.target.type[step.axes[0]], step.axes),
        source_type=step.conversion.source,
        target_type=step.conversion.target,
        forward=visible(actions[0]),
        backward=visible(actions[1]),
        nbytes=step.nbytes,
        cause=told_causes(step.cause, files),
        position=(names.order[producer], 1)
        if leaving and producer is not None
        else (min(ops, default=len(names.order)), 0),
        times=step.times,
        again=step.again,
        kept_by=tuple(ops[-1 - index % len(ops)] for index in range(step.again)),
        stored=step.source.type[step.axes[0]].stored,
        summed=step.summed,
        overlap=step.overlap if cuts(step.overlap) else "",
        priced=step.priced,
        launches=tuple((phase, action.value, size) for phase, action, size, _ in step.launches(n)),
    )


def _inside(plan: Plan, names: Names) -> Iterable[Inside]:
    for node, launched in plan.inside.items():
        for axes in dict.fromkeys(one.axes for one in launched):
            if plan.mesh.ranks(axes) == 1:
                continue
            own = [(one.collective, one.nbytes) for one in launched if one.axes == axes]
            yield Inside(
                op=operation(node),
                module=common([node.stack]),
                name=plan.strategies[node].parts[axes[0]].implementation,
                axis=plan.mesh.name(axes),
                axes=names.axes(axes),
                launches=tuple((c.phase, c.action.value, nbytes) for c, nbytes in own),
                position=(names.order[node], 1),
            )


def _hooks(plan: Plan, names: Names, files: Mapping[str, str]) -> Iterable[Hooked]:
    meets = _meetings(plan, names)
    times = {(step.value, step.axes): step.times[1] for step in plan.steps if step.sums_gradient}
    buckets = {hook: index for index, bucket in enumerate(plan.buckets()) for hook in bucket.hooks}
    for hook in plan.hooks:
        value = hook.parameter.value
        met = (meets.get((value, axis), {}) for axis in hook.axes)
        several = len(hook.axes) > 1
        yield Hooked(
            parameter=hook.parameter.name,
            axis=hook.axis,
            axes=names.axes(hook.axes),
            nbytes=hook.nbytes,
            meets=tuple(
                f"{placement} @ {plan.mesh.axes[axis].name}" if several else placement
                for axis, found in zip(hook.axes, met, strict=True)
                for placement in found
            ),
            cause=told_causes(hook.cause, files),
            dtype=str(value.dtype),
            time=times[value, hook.axes],
            bucket=buckets[hook],
        )


def _meetings(plan: Plan, names: Names) -> dict[tuple[Value, int], dict[str, None]]:
    """By parameter and axis what makes the ranks' gradients differ: sharded and partial values it is used with."""
    parameters = {hook.parameter.value for hook in plan.hooks}
    found: dict[tuple[Value, int], dict[str, None]] = {}
    for (user, _), version in plan.uses.items():
        if version.value not in parameters or not isinstance(user, Node):
            continue
        strategy = plan.strategies[user]
        sides = (*zip(user.operands, strategy.operands, strict=True), *zip(user.results, strategy.results, strict=True))
        for value, axis, kind in ((value, axis, kind) for value, joint in sides for axis, kind in enumerate(joint)):
            if value is not version.value and kind.kind in (Kind.S, Kind.P):
                found.setdefault((version.value, axis), {})[names.placement(value, kind, (axis,))] = None
    return found


def _values(plan: Plan, names: Names) -> dict[str, dict[str, str]]:
    """The first output of every call of every module, at the placement that a ``value`` line gave it, if one did."""
    placed = {s.value: s.target.type for s in plan.steps if s.source.stage == 0 and s.target.stage == 1}
    result: dict[str, dict[str, str]] = {}
    for path, info in plan.graph.modules.items():
        for index, returned in info.returned.items():
            if path and returned and returned[0] in plan.produced:  # what nothing uses is not computed
                value = returned[0]
                kind = placed.get(value, plan.produced[value])
                name = path if not index else f"{path}@{index}"
                result[name] = names.placements(value, kind)
    return result


def _outputs(plan: Plan, names: Names) -> dict[str, dict[str, str]]:
    uses = {user: version for (user, _), version in plan.uses.items() if isinstance(user, Output)}
    return {user.name: names.placements(v.value, v.type) for user, v in uses.items()}


def _totals(plan: Plan) -> dict[str, dict[str, dict[str, tuple[int, int]]]]:
    totals: dict[str, dict[str, dict[str, tuple[int, int]]]] = {
        axis.name: {"forward": {}, "backward": {}} for axis in plan.mesh.axes
    }
    for launch in plan.launches():
        actions = totals.setdefault(launch.axis, {"forward": {}, "backward": {}})[launch.phase]
        count, nbytes = actions.get(launch.action.value, (0, 0))
        actions[launch.action.value] = (count + 1, nbytes + launch.nbytes)
    return totals


def _groups(plan: Plan) -> dict[str, Group]:
    axes = [axis.name for axis in plan.mesh.axes]
    launched = {launch.axis for launch in plan.launches()}
    found: dict[str, Group] = {}
    for group in plan.mesh.groups:
        machine = plan.mesh.machine(group)
        if plan.mesh.name(group) in launched:
            found[plan.mesh.name(group)] = Group(tuple(axes[i] for i in group), machine.n, machine.link.name)
    return found
