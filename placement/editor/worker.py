"""The process that has the model: it plans specs, one after the other, as long as its input is open.

Apart from the server, so that a model which prints, hangs, exits or crashes does none of that to the editor, and so
that planning never delays an answer. Requests and answers are pickles, each after its length.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO

from placement.editor.knowledge import Answer, Effect, Known, Request
from placement.lang.check import check
from placement.lang.diagnostics import Diagnostic, PlacementError
from placement.lang.parser import load, read_include
from placement.lang.spec import Spec

if TYPE_CHECKING:
    from placement.models import Built
    from placement.report.facts import Facts
    from placement.solver.plan import Plan

LENGTH = 8  # bytes, big-endian


def main() -> None:
    """Answer requests until the input ends. The argument is JSON: the model's name, the mesh, the sizes."""
    # What a model prints goes to stderr: stdout is the channel, under a number that no model knows.
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    settings = json.loads(sys.argv[1])
    session = Session(settings["model"], settings["mesh"], settings["sizes"])
    while (request := receive(sys.stdin.buffer)) is not None:
        packed = pickle.dumps(session.answer(request))
        channel.write(len(packed).to_bytes(LENGTH, "big") + packed)
        channel.flush()


def receive(stream: BinaryIO) -> Request | None:
    """The next request, None at the end of the stream."""
    head = stream.read(LENGTH)
    if len(head) < LENGTH:
        return None
    return pickle.loads(stream.read(int.from_bytes(head, "big")))  # noqa: S301 - from the server that started us


class Session:
    """One model, loaded when the first spec that is sound by itself asks for it."""

    def __init__(self, model: str, mesh: Mapping[str, int] | None, sizes: Mapping[str, int]) -> None:
        self.name = model
        self.mesh = mesh
        self.sizes = sizes
        self.loaded: Built | PlacementError | None = None

    def answer(self, request: Request) -> Answer:
        """Plan the spec, or say why it cannot be planned."""
        model = self._model()
        known = Known() if isinstance(model, PlacementError) else _names(model)
        try:
            spec = load(request.file, read=reader(request.texts))
            found = check(spec)
            if any(fault.severity == "error" for fault in found):
                return Answer(found, known)
            if isinstance(model, PlacementError):
                return Answer((*found, *model.diagnostics), known)
            plan = self._plan(spec, model)
            from placement.report.findings import findings  # noqa: PLC0415 - loaded with the model

            found += findings(plan, os.path.basename(request.file))  # noqa: PTH119 - names stay text
        except PlacementError as error:
            return Answer(error.diagnostics, known)
        except Exception as error:  # noqa: BLE001 - whatever else planning raises is a bug of ours, and is told
            return Answer((_bug(error),), known)
        return Answer(found, _solved(known, plan, spec))

    def _plan(self, spec: Spec, model: Built) -> Plan:
        from placement import api, models  # noqa: PLC0415 - torch is needed by now

        dims = {str(n): tuple(map(str, line.dims)) for line in spec.inputs if line.dims is not None for n in line.names}
        example = models.resized(model.example, dims, self.sizes) if self.sizes else model.example
        return api.plan(model.model, self.mesh, spec, example=example, sizes=self.sizes)

    def _model(self) -> Built | PlacementError:
        if self.loaded is None:
            self.loaded = self._load()
        return self.loaded

    def _load(self) -> Built | PlacementError:
        from placement import models  # noqa: PLC0415 - a second of start-up

        try:
            return models.build(self.name, self.sizes, meta=True)
        except models.ModelNameError as error:
            return PlacementError([Diagnostic("PLC404", str(error))])
        except PlacementError as error:
            return error
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a model may raise anything
            text = f"{self.name} failed: {type(error).__name__}: {error}"
            return PlacementError([Diagnostic("PLC404", text, model_line=_last_line(error.__traceback__))])


def reader(texts: Mapping[str, str]) -> Callable[[str], bytes | str]:
    """Reads open documents as they are in the editor, other files from disk."""
    return lambda path: texts[path] if path in texts else read_include(path)


def _bug(error: Exception) -> Diagnostic:
    hint = "this is a bug in placement: please report it with the spec and the model"
    return Diagnostic("PLC901", f"internal error: {type(error).__name__}: {error}", hint=hint)


def _last_line(trace: TracebackType | None) -> str | None:
    place = None
    while trace is not None:
        place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


# -- what is known ----------------------------------------------------------------------------------


def _names(built: Built) -> Known:
    """What the model says of itself, planned or not."""
    import torch  # noqa: PLC0415 - loaded with the model

    shown: dict[str, str] = {}
    for tensors in (
        built.model.named_parameters(remove_duplicate=False),
        built.model.named_buffers(remove_duplicate=False),
    ):
        shown |= {name: str(list(tensor.shape)) for name, tensor in tensors}
    inputs = {
        name: str(list(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__
        for name, value in built.example.items()
    }
    modules = {path: type(module).__name__ for path, module in built.model.named_modules() if path}
    return Known(params=shown, modules=modules, inputs=inputs)


def _solved(known: Known, plan: Plan, spec: Spec) -> Known:
    from placement.report.facts import facts  # noqa: PLC0415 - needs torch
    from placement.report.names import Names  # noqa: PLC0415

    found = facts(plan)
    names = Names(plan)
    tied = {name: p.name for p in plan.graph.parameters for name in p.names}
    inputs = {i.name: names.placements(i.value, plan.produced[i.value]) for i in plan.graph.inputs}
    return dataclasses.replace(
        known,
        mesh=dict(found.mesh),
        outputs=_placed(found.outputs),
        strategies=sorted({s.implementation for s in plan.strategies.values() if s.implementation}),
        placed_params=_placed({name: found.params[of] for name, of in tied.items() if of in found.params}),
        placed_values=_placed(found.values),
        placed_inputs=_placed(inputs),
        effects=tuple(_effects(found, list(spec.sources))),
    )


def _placed(placements: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    return {name: ", ".join(f"{p} @ {axis}" for axis, p in by.items()) for name, by in placements.items()}


def _effects(found: Facts, files: list[str]) -> Iterable[Effect]:
    from placement.report.fold import blocks, summed  # noqa: PLC0415 - needs torch
    from placement.report.units import show_bytes  # noqa: PLC0415

    for block in blocks(found):
        for item in block.items:
            for row in item.rows if item.cause else ():
                yield Effect(
                    where=block.title,
                    alike=len(block.modules),
                    source=item.source,
                    target=item.target,
                    what=row.what,
                    axis=row.axis,
                    forward=row.forward,
                    backward=row.backward,
                    size=show_bytes(row.nbytes),
                    cause=_causes(item.cause, files),
                )
    for hook in summed(found):
        first = hook.members[0]
        yield Effect(
            where=hook.pattern,
            alike=len(hook.members),
            source="gradient",
            target="",
            what="summed once per backward",
            axis=", ".join(first.axes),
            forward="",
            backward="all_reduce",
            size=show_bytes(first.nbytes),
            cause=_causes(hook.cause, files),
        )


def _causes(told: Iterable[str], files: list[str]) -> tuple[tuple[str, int], ...]:
    """(file, line) of causes as a report tells them, which is without the folder that all files share."""
    found: list[tuple[str, int]] = []
    for cause in told:
        file, _, line = cause.rpartition(":")
        ends = (f"/{file}", f"\\{file}")
        whole = file if file in files else next((f for f in files if f.endswith(ends)), file)
        found.append((whole, int(line)))
    return tuple(found)


if __name__ == "__main__":
    main()
