"""The explanation as JSON, version 1; ``docs/explain.md`` describes every key."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from placement.report.balance import Balance
from placement.report.facts import Converted, Hooked, Inside, facts
from placement.report.memory import memory_data
from placement.types import Action

if TYPE_CHECKING:
    from placement.solver.plan import Plan

FORMAT_VERSION = 1


def explain_data(plan: Plan) -> dict[str, Any]:
    """The explanation as plain dicts, lists, strings and ints. Sizes are bytes, times and costs picoseconds."""
    found = facts(plan)
    balance = {"balance": [_balance(b) for b in found.balances]} if found.balances else {}
    return balance | {
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


def _balance(found: Balance) -> dict[str, Any]:
    marks = {"marks": found.marks, "sequences": found.sequences} if found.marks else {}
    return marks | {
        "modules": list(found.modules),
        "axes": list(found.axes),
        "order": "zigzag" if found.zigzag else "contiguous",
        "pairs": list(found.pairs),
        "bounds": list(found.bounds),
        "contiguous": list(found.contiguous),
    }


def to_json(plan: Plan) -> str:
    """``explain_data`` as text: keys sorted, lists in program order, so that equal plans have equal texts."""
    return json.dumps(explain_data(plan), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _conversion(found: Converted) -> dict[str, Any]:
    return (
        {
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
        | summed(found)
        | ({"overlap": found.overlap, "priced": found.priced} if found.overlap else {})
    )


def summed(found: Converted) -> dict[str, int]:
    """The bytes of what is summed, where these are others."""
    both = (action for action in (found.forward, found.backward) if Action(action).communicates)
    sizes = {found.sent(action) for action in both} - {found.nbytes}
    return {"summed": found.summed} if sizes else {}


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
