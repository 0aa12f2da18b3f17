"""What ``lower`` lines set, by module."""

from __future__ import annotations

from placement.graph.ir import Graph
from placement.lang.diagnostics import Diagnostics
from placement.lang.spec import Setting, Spec


def lowerings(graph: Graph, spec: Spec, found: Diagnostics) -> dict[str, frozenset[str]]:
    """The modules for which lines set ``gathered = kept`` or the like, '' being the model itself.

    Reports a setting that two lines set to two values for one module (PLC304).
    """
    said: dict[tuple[str, str], Setting] = {}
    told: set[tuple[int, int]] = set()
    modules: dict[str, set[str]] = {}
    for line in spec.lowers:
        for setting in line.settings:
            matched = [path for path in graph.modules if line.pattern.matches(path)]
            modules.setdefault(str(setting), set()).update(matched)
            for path in matched:
                earlier = said.setdefault((path, str(setting.key)), setting)
                if earlier.value != setting.value and (id(earlier), id(setting)) not in told:
                    told.add((id(earlier), id(setting)))
                    where = f"'{path}'" if path else "the model"
                    text = f"the {setting.key} of {where} is '{setting.value}' here, '{earlier.value}' elsewhere"
                    notes = [f"the first one is at {earlier.span}"]
                    found.error("PLC304", text, setting.span, notes=notes)
    return {setting: frozenset(paths) for setting, paths in modules.items()}
