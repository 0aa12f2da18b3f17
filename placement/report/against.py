"""What changes from one plan to another: two explanations compared, as they stand in version 1 of the JSON.

Either may be of a plan just made or one that was saved, so nothing here knows plans.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from placement.report.data import FORMAT_VERSION
from placement.report.names import join

Explanation = Mapping[str, Any]
Pair = tuple[Any, Any]
"""What it was and what it is; None where it is in one of the two alone."""

ADDED, REMOVED, MOVED, RESIZED = "added", "removed", "moved", "resized"
_KEYS = ("mesh", "conversions", "implementations", "hooks", "params", "values", "totals", "memory", "time", "proof")


class SavedPlanError(ValueError):
    """A file is no explanation that can be compared; the message says why."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A conversion, or the collectives of one op by itself, as an explanation has it."""

    value: str
    module: str
    axis: str
    what: str
    forward: str
    backward: str
    nbytes: int

    @property
    def communicates(self) -> bool:
        """Whether bytes leave the rank."""
        return not {self.forward, self.backward} <= {"none", "split"}


@dataclass(frozen=True, slots=True)
class Change:
    """One difference. ``sent`` is as it is now, or as it was where it is gone; ``before`` is the other one, if any."""

    kind: str
    sent: Sent
    before: Sent | None = None


@dataclass(frozen=True, slots=True)
class Against:
    """What changes from ``before`` to ``after``, which are the names of the two.

    placements: of parameters and of values, by name and axis. totals: axis → phase → action → (count, bytes) of
    each. numbers: memory (bytes) and time (picoseconds) by their names in the explanation. hooks: parameter and axis.
    """

    before: str
    after: str
    mesh: tuple[Mapping[str, int], Mapping[str, int]]
    changes: tuple[Change, ...]
    hooks_added: tuple[tuple[str, str], ...]
    hooks_removed: tuple[tuple[str, str], ...]
    params: Mapping[str, Mapping[str, Pair]]
    values: Mapping[str, Mapping[str, Pair]]
    totals: Mapping[str, Mapping[str, Mapping[str, tuple[tuple[int, int], tuple[int, int]]]]]
    memory: Mapping[str, tuple[int, int]]
    time: Mapping[str, tuple[int, int]]
    cost: tuple[int, int]

    @property
    def nothing(self) -> bool:
        """Whether the two are the same plan at the same price."""
        pairs = [*self.memory.values(), *self.time.values(), self.mesh, self.cost]
        pairs += [both for phases in self.totals.values() for actions in phases.values() for both in actions.values()]
        parts = (self.changes, self.hooks_added, self.hooks_removed, self.params, self.values)
        return not any(parts) and all(a == b for a, b in pairs)


def saved(path: str | Path) -> Explanation | None:
    """The explanation in a file, None where that is no JSON object (but a spec). Raises SavedPlanError, OSError."""
    content = Path(path).read_bytes()
    if not content.lstrip().startswith(b"{"):
        return None
    try:
        found = json.loads(content)
    except ValueError as error:
        raise SavedPlanError(f"{path} is no JSON: {error}") from error
    return checked(found, str(path))


def checked(found: Explanation, name: str) -> Explanation:
    """``found`` itself. Raises SavedPlanError where it is no explanation of this version."""
    version = found.get("format_version")
    missing = [key for key in _KEYS if key not in found]
    if version != FORMAT_VERSION:
        raise SavedPlanError(f"{name} has format_version {version!r}, not {FORMAT_VERSION}: save it anew")
    if missing:
        raise SavedPlanError(f"{name} is no whole explanation: it has no {missing[0]!r}")
    return found


def compare(old: Explanation, new: Explanation, before: str, after: str) -> Against:
    """What changes from ``old`` to ``new``, explanations of version 1, which are called ``before`` and ``after``."""
    hooks = [[(hook["param"], "_".join(hook["axes"])) for hook in each["hooks"]] for each in (old, new)]
    return Against(
        before=before,
        after=after,
        mesh=(old["mesh"], new["mesh"]),
        changes=tuple(_changes([*_sent(old)], [*_sent(new)])),
        hooks_added=tuple(name for name in hooks[1] if name not in hooks[0]),
        hooks_removed=tuple(name for name in hooks[0] if name not in hooks[1]),
        params=_placements(old["params"], new["params"]),
        values=_placements(old["values"], new["values"]),
        totals=_totals(old["totals"], new["totals"]),
        memory=_numbers(old["memory"], new["memory"]),
        time=_numbers(old["time"], new["time"]),
        cost=(old["proof"]["cost"], new["proof"]["cost"]),
    )


def _sent(found: Explanation) -> Iterator[Sent]:
    for made in found["conversions"]:
        what = _arrow(made["from"], made["to"], made["backward"])
        what += ", gathered again" if made.get("again") else ""
        nbytes = made.get("summed", made["bytes"])
        yield Sent(made["value"], made["module"], made["axis"], what, made["forward"], made["backward"], nbytes)
    for op in found["implementations"]:
        for sent in op["collectives"]:
            actions = [sent["action"] if sent["phase"] == phase else "none" for phase in ("forward", "backward")]
            name, what = join(op["module"], op["op"]), f"by {op['name']}"
            yield Sent(name, op["module"], op["axis"], what, actions[0], actions[1], sent["bytes"])


def _arrow(source: str, target: str, backward: str) -> str:
    """Between the two kinds of Replicate the backward tells which is which."""
    if source == target:
        source, target = ("Invariant", target) if backward == "all_reduce" else (source, "Invariant")
    return f"{source} -> {target}"


def _changes(old: Sequence[Sent], new: Sequence[Sent]) -> Iterator[Change]:
    """What is in one of the two, in program order of the new; what only moved or has another size is one change."""
    gone, here = _without(old, new), _without(new, old)
    paired: list[tuple[Sent, Change]] = []
    for kind, likeness in ((MOVED, _anywhere), (RESIZED, _of_any_size)):
        gone, here, found = _pairs(gone, here, kind, likeness)
        paired += found
    order = {sent: index for index, sent in reversed(list(enumerate(new)))}
    now = [*paired, *((sent, Change(ADDED, sent)) for sent in here)]
    yield from (Change(REMOVED, sent) for sent in gone)
    yield from (change for _, change in sorted(now, key=lambda item: order[item[0]]))


def _without(these: Sequence[Sent], those: Sequence[Sent]) -> list[Sent]:
    """Of ``these`` what is left when ``those`` are taken away, each as often as it occurs."""
    left = Counter(those)
    result: list[Sent] = []
    for sent in these:
        if left[sent]:
            left[sent] -= 1
        else:
            result.append(sent)
    return result


def _pairs(
    gone: Sequence[Sent], here: Sequence[Sent], kind: str, likeness: Callable[[Sent], Sent]
) -> tuple[list[Sent], list[Sent], list[tuple[Sent, Change]]]:
    """What is gone and what is here, without those alike, and the changes that these are."""
    waiting: dict[Sent, list[Sent]] = {}
    for sent in gone:
        waiting.setdefault(likeness(sent), []).append(sent)
    unpaired: list[Sent] = []
    found: list[tuple[Sent, Change]] = []
    for sent in here:
        alike = waiting.get(likeness(sent))
        if alike:
            found.append((sent, Change(kind, sent, alike.pop(0))))
        else:
            unpaired.append(sent)
    return _without(gone, [change.before for _, change in found if change.before]), unpaired, found


def _anywhere(sent: Sent) -> Sent:
    return replace(sent, module="")


def _of_any_size(sent: Sent) -> Sent:
    return replace(sent, nbytes=0)


def _placements(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, dict[str, Pair]]:
    """By name and axis where the two differ."""
    changed: dict[str, dict[str, Pair]] = {}
    for name in _union(new, old):
        was, now = old.get(name, {}), new.get(name, {})
        axes = {axis: (was.get(axis), now.get(axis)) for axis in _union(now, was) if was.get(axis) != now.get(axis)}
        if axes:
            changed[name] = axes
    return changed


def _totals(old: Any, new: Any) -> dict[str, dict[str, dict[str, tuple[tuple[int, int], tuple[int, int]]]]]:
    """Everything that either launches; what it does not launch counts 0."""

    def total(found: Any, axis: str, phase: str, action: str) -> tuple[int, int]:
        here = found.get(axis, {}).get(phase, {}).get(action)
        return (here["count"], here["bytes"]) if here else (0, 0)

    return {
        axis: {
            phase: {
                action: (total(old, axis, phase, action), total(new, axis, phase, action))
                for action in _union(new.get(axis, {}).get(phase, {}), old.get(axis, {}).get(phase, {}))
            }
            for phase in _union(new.get(axis, {}), old.get(axis, {}))
        }
        for axis in _union(new, old)
    }


def _numbers(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """The plain numbers that both have: a later version may add some."""
    return {key: (old[key], new[key]) for key in new if isinstance(new[key], int) and isinstance(old.get(key), int)}


def _union(first: Iterable[str], second: Iterable[str]) -> list[str]:
    return list(dict.fromkeys([*first, *second]))


def against_data(found: Against) -> dict[str, Any]:
    """The changes as plain dicts, lists, strings and ints; a pair is [before, after]."""
    kinds = (ADDED, REMOVED, MOVED, RESIZED)
    return {
        "format_version": FORMAT_VERSION,
        "against": {
            "before": found.before,
            "after": found.after,
            "mesh": [dict(mesh) for mesh in found.mesh],
            "conversions": {kind: [_change(c) for c in found.changes if c.kind == kind] for kind in kinds},
            "hooks": {ADDED: _named(found.hooks_added), REMOVED: _named(found.hooks_removed)},
            "params": {name: {axis: list(pair) for axis, pair in axes.items()} for name, axes in found.params.items()},
            "values": {name: {axis: list(pair) for axis, pair in axes.items()} for name, axes in found.values.items()},
            "totals": {
                axis: {
                    phase: {action: _total(*both) for action, both in actions.items()}
                    for phase, actions in phases.items()
                }
                for axis, phases in found.totals.items()
            },
            "memory": {key: list(pair) for key, pair in found.memory.items()},
            "time": {key: list(pair) for key, pair in found.time.items()},
            "cost": list(found.cost),
        },
    }


def _named(hooks: Iterable[tuple[str, str]]) -> list[str]:
    return list(dict.fromkeys(name for name, _ in hooks))


def _total(was: tuple[int, int], now: tuple[int, int]) -> dict[str, list[int]]:
    return {"count": [was[0], now[0]], "bytes": [was[1], now[1]]}


def _change(change: Change) -> dict[str, Any]:
    sent, before = change.sent, change.before
    return {
        "value": sent.value,
        "module": [before.module, sent.module] if change.kind == MOVED and before else sent.module,
        "axis": sent.axis,
        "what": sent.what,
        "forward": sent.forward,
        "backward": sent.backward,
        "bytes": [before.nbytes, sent.nbytes] if change.kind == RESIZED and before else sent.nbytes,
    }
