"""What ``lower`` lines set, by module."""

from __future__ import annotations

from collections.abc import Mapping

from placement.graph.ir import Graph
from placement.lang.diagnostics import Diagnostics
from placement.lang.spec import Setting, Spec
from placement.solver.overlap import ASYNC, NONE
from placement.solver.sums import owners


def lowerings(graph: Graph, spec: Spec, found: Diagnostics) -> dict[str, frozenset[str]]:
    """The modules for which lines set ``gathered = kept`` or the like, '' being the model itself.

    Reports a setting that two lines set to two values for one module, or for the modules of one parameter (PLC304).
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
                    text = f"the {setting.key} of {_told(path)} is '{setting.value}' here, '{earlier.value}' elsewhere"
                    notes = [f"the first one is at {earlier.span}"]
                    found.error("PLC304", text, setting.span, notes=notes)
    _tied_apart(graph, said, found)
    for (path, key), setting in said.items():
        kept = said.get((path, "gathered"))
        if key == "overlap" and kept is not None and kept.value == "kept" and setting.value not in (NONE, ASYNC):
            text = f"what is gathered in {_told(path)} is kept, and in pieces ({setting.value}) nothing is"
            hint = "take one of the two out"
            found.error("PLC304", text, setting.span, hint=hint, notes=[f"it is kept by {kept.span}"])
    return {setting: frozenset(paths) for setting, paths in modules.items()}


def _told(path: str) -> str:
    return f"'{path}'" if path else "the model"


def _tied_apart(graph: Graph, said: Mapping[tuple[str, str], Setting], found: Diagnostics) -> None:
    """Parameters that are tied, and whose gradients two lines have summed in two dtypes."""
    told: set[tuple[int, int]] = set()
    for parameter in graph.parameters:
        settings: list[tuple[str, Setting]] = []
        for name in parameter.names:
            paths = ((path, "reduce") for path in (*owners(name), ""))
            settings += [(name, said[key]) for key in paths if key in said][:1]
        for name, setting in settings[1:]:
            first, earlier = settings[0]
            if earlier.value != setting.value and (id(earlier), id(setting)) not in told:
                told.add((id(earlier), id(setting)))
                text = f"the reduce of '{name}' is '{setting.value}' here, '{earlier.value}' elsewhere"
                notes = [f"'{first}' and '{name}' are one parameter: the model ties them"]
                notes.append(f"the first one is at {earlier.span}")
                found.error("PLC304", text, setting.span, notes=notes)
