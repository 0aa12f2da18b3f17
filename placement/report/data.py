"""The explanation as JSON, version 1; ``docs/explain.md`` describes every key."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from placement.report.facts import Converted, Hooked, Inside, facts
from placement.report.memory import memory_data

if TYPE_CHECKING:
    from placement.solver.plan import Plan

FORMAT_VERSION = 1


def explain_data(plan: Plan) -> dict[str, Any]:
    """The explanation as plain dicts, lists, strings and ints. Sizes are bytes, times and costs picoseconds."""
    found = facts(plan)
    return {
        "format_version": FORMAT_VERSION,
        "mesh": dict(found.mesh),
        "conversions": [_conversion(c) for c in found.conversions],
        "implementations": [_implementation(i) for i in found.inside],
        "hooks": [_hook(h) for h in found.hooks],
        "params": {name: dict(placed) for name, placed in found.params.items()},
        "values": {name: dict(placed) for name, placed in found.values.items()},
        "totals": {
            axis: {
                phase: {action: {"count": count, "bytes": nbytes} for action, (count, nbytes) in actions.items()}
                for phase, actions in phases.items()
            }
            for axis, phases in found.totals.items()
        },
        "memory": memory_data(found.memory),
        "time": {"communication": found.communication, "compute": found.compute},
        "proof": {"cost": found.cost, "bound": found.bound},
    }


def to_json(plan: Plan) -> str:
    """``explain_data`` as text: keys sorted, lists in program order, so that equal plans have equal texts."""
    return json.dumps(explain_data(plan), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _conversion(found: Converted) -> dict[str, Any]:
    return {
        "value": found.value,
        "module": found.module,
        "axis": found.axis,
        "from": found.source,
        "to": found.target,
        "forward": found.forward,
        "backward": found.backward,
        "bytes": found.nbytes,
        "again": found.again,
        "cause": list(found.cause),
    }


def _implementation(found: Inside) -> dict[str, Any]:
    return {
        "op": found.op,
        "module": found.module,
        "name": found.name,
        "axis": found.axis,
        "collectives": [
            {"phase": phase, "action": action, "bytes": nbytes} for phase, action, nbytes in found.launches
        ],
    }


def _hook(found: Hooked) -> dict[str, Any]:
    return {"param": found.parameter, "axes": list(found.axes), "reduction": "sum", "bytes": found.nbytes}
