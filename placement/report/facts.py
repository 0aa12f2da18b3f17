"""Everything an explanation says, gathered from a plan once: the formats only lay it out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from placement.graph.ir import Node, Output, Parameter, Value
from placement.report.names import Names, common, operation, shared, visible
from placement.solver.memory import Memory, memory
from placement.types import Action, I, Kind, R

if TYPE_CHECKING:
    from placement.lang.diagnostics import Diagnostic
    from placement.solver.plan import Hook, Plan, Step

Totals = Mapping[str, Mapping[str, Mapping[str, tuple[int, int]]]]
"""axis → phase → action → (launches, bytes)."""


@dataclass(frozen=True, slots=True)
class Converted:
    """A conversion, in words.

    module: the innermost module that contains all consumers. place: the module whose business it is: leaving
    a partial sum belongs where the sum is made as well as where it goes. users: names of the consumers, none where
    a ``value`` line has the value converted at once.
    user_modules: the module of each. source, target: the user's words, which do not tell I from R as ``source_type``
    and ``target_type`` do. nbytes: of the full value. position: of the conversion in program order. times: picoseconds
    forward and backward.
    """

    value: str
    home: str
    module: str
    place: str
    users: tuple[str, ...]
    user_modules: tuple[str, ...]
    axis: str
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

    @property
    def launches(self) -> tuple[tuple[str, str, int], ...]:
        """(phase, action, bytes) of each collective."""
        both = (("forward", self.forward), ("backward", self.backward))
        return tuple((phase, action, self.nbytes) for phase, action in both if Action(action).communicates)


@dataclass(frozen=True, slots=True)
class Inside:
    """An op that communicates by itself. collectives: (phase, action, bytes) in the order of the rule."""

    op: str
    module: str
    name: str
    axis: str
    launches: tuple[tuple[str, str, int], ...]
    position: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Hooked:
    """A replicated parameter whose gradient is summed over axes. meets: the placements it is used together with.

    time: picoseconds that its part of the flat reduction takes.
    """

    parameter: str
    axes: tuple[str, ...]
    nbytes: int
    meets: tuple[str, ...]
    cause: tuple[str, ...]
    dtype: str
    time: int = 0


@dataclass(frozen=True, slots=True)
class Facts:
    """A plan in words and numbers. Times and costs are picoseconds, sizes bytes, stages seconds."""

    files: tuple[str, ...]
    mesh: Mapping[str, int]
    device: str
    link: str
    conversions: tuple[Converted, ...]
    inside: tuple[Inside, ...]
    hooks: tuple[Hooked, ...]
    params: Mapping[str, Mapping[str, str]]
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


def facts(plan: Plan) -> Facts:
    """Gather what there is to say about ``plan``."""
    names = Names(plan)
    axis = plan.axis.name
    files = files_of(plan)
    used = memory(plan)
    return Facts(
        files=tuple(files.values()),
        mesh={axis: plan.axis.n},
        device=plan.bound.machine.device.name,
        link=plan.bound.machine.link.name,
        conversions=tuple(_conversions(plan, names, files)),
        inside=tuple(_inside(plan, names)),
        hooks=tuple(_hooks(plan, names, files)),
        params={p.name: {axis: names.placement(p.value, plan.produced[p.value])} for p in plan.graph.parameters},
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
        if step.value in hooked and _is_hook(step):
            continue  # the hook says it
        yield _converted(plan, names, step, files)


def _is_hook(step: Step) -> bool:
    return step.source.type == I and step.target.type == R


def _converted(plan: Plan, names: Names, step: Step, files: Mapping[str, str]) -> Converted:
    producer = names.producers.get(step.value)
    stacks = [names.stack(user) for user in step.consumers]
    users = [user for user in step.consumers if user is not producer]
    uses = [names.order[user] for user in step.consumers if isinstance(user, Node)] or [len(names.order)]
    # A `value` line that converts what an op gives is carried out by that op's side: its producer is its consumer.
    leaving = producer is not None and (step.source.type.kind is Kind.P or producer in step.consumers)
    actions = (step.conversion.forward, step.conversion.backward) if plan.axis.n > 1 else (Action.NONE, Action.NONE)
    return Converted(
        value=names.value(step.value),
        home=common([names.stack(producer)]),
        module=common(stacks),
        place=common([*stacks, names.stack(producer)]) if leaving else common(stacks),
        users=tuple(map(names.user, users)),
        user_modules=tuple(common([names.stack(user)]) for user in users),
        axis=step.axis,
        source=names.placement(step.value, step.source.type),
        target=names.placement(step.value, step.target.type),
        source_type=step.source.type.kind,
        target_type=step.target.type.kind,
        forward=visible(actions[0]),
        backward=visible(actions[1]),
        nbytes=step.nbytes,
        cause=told_causes(step.cause, files),
        position=(names.order[producer], 1) if leaving and producer is not None else (min(uses), 0),
        times=step.times,
    )


def _inside(plan: Plan, names: Names) -> Iterable[Inside]:
    if plan.axis.n == 1:
        return
    for node, strategy in plan.strategies.items():
        if strategy.collectives:
            yield Inside(
                op=operation(node),
                module=common([node.stack]),
                name=strategy.implementation,
                axis=plan.axis.name,
                launches=tuple((c.phase, c.action.value, c.nbytes) for c in strategy.collectives),
                position=(names.order[node], 1),
            )


def _hooks(plan: Plan, names: Names, files: Mapping[str, str]) -> Iterable[Hooked]:
    by_parameter: dict[Parameter, list[Hook]] = {}
    for hook in plan.hooks:
        by_parameter.setdefault(hook.parameter, []).append(hook)
    meets = _meetings(plan, names, {p.value for p in by_parameter})
    times = {step.value: step.times[1] for step in plan.steps if _is_hook(step)}
    for parameter, found in by_parameter.items():
        yield Hooked(
            parameter=parameter.name,
            axes=tuple(hook.axis for hook in found),
            nbytes=found[0].nbytes,
            meets=tuple(meets.get(parameter.value, {})),
            cause=told_causes(dict.fromkeys(cause for hook in found for cause in hook.cause), files),
            dtype=str(parameter.value.dtype),
            time=times[parameter.value],
        )


def _meetings(plan: Plan, names: Names, parameters: set[Value]) -> dict[Value, dict[str, None]]:
    """What makes the ranks' gradients differ: the sharded and partial values that a parameter is used with."""
    found: dict[Value, dict[str, None]] = {}
    for (user, _), version in plan.uses.items():
        if version.value not in parameters or not isinstance(user, Node):
            continue
        strategy = plan.strategies[user]
        sides = (*zip(user.operands, strategy.operands, strict=True), *zip(user.results, strategy.results, strict=True))
        for value, kind in sides:
            if value is not version.value and kind.kind in (Kind.S, Kind.P):
                found.setdefault(version.value, {})[names.placement(value, kind)] = None
    return found


def _values(plan: Plan, names: Names) -> dict[str, dict[str, str]]:
    """The first output of every call of every module, at the placement that a ``value`` line gave it, if one did."""
    placed = {s.value: s.target.type for s in plan.steps if s.source.stage == 0 and s.target.stage == 1}
    result: dict[str, dict[str, str]] = {}
    for path, info in plan.graph.modules.items():
        for index, returned in info.returned.items():
            if path and returned:
                value = returned[0]
                kind = placed.get(value, plan.produced[value])
                name = path if not index else f"{path}@{index}"
                result[name] = {plan.axis.name: names.placement(value, kind)}
    return result


def _outputs(plan: Plan, names: Names) -> dict[str, dict[str, str]]:
    uses = {user: version for (user, _), version in plan.uses.items() if isinstance(user, Output)}
    return {user.name: {plan.axis.name: names.placement(v.value, v.type)} for user, v in uses.items()}


def _totals(plan: Plan) -> dict[str, dict[str, dict[str, tuple[int, int]]]]:
    totals: dict[str, dict[str, dict[str, tuple[int, int]]]] = {plan.axis.name: {"forward": {}, "backward": {}}}
    for launch in plan.launches():
        actions = totals[launch.axis][launch.phase]
        count, nbytes = actions.get(launch.action.value, (0, 0))
        actions[launch.action.value] = (count + 1, nbytes + launch.nbytes)
    return totals
