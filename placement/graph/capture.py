"""A model and an example to a ``Graph``, by way of ``torch.export``.

The example's tensors are flattened so that inputs are positional, dims named on ``input`` lines become
symbols, and training-time behaviour is captured (dropout stays in the program with a live flag).
``export`` gives the program, the module of every op and what every module returned; ``normalize``
makes it functional and minimal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.utils import _pytree as pytree

from placement.graph import modes, normalize, refusals
from placement.graph._torch import (
    HigherOrderOperator,
    aten,
    checkable,
    expression,
    from_data,
    is_overload,
    schema_name,
    silent_export,
    size_guards,
    transient_buffers,
    unpreservable,
    without_cache_of_fakes,
    written_arguments,
)
from placement.graph.copies import Copier
from placement.graph.example import SMALLEST, Example, argument_names, capture_sizes, check_dims, key_text, resized
from placement.graph.flex import flex_captured, refuse_block_masks
from placement.graph.gradients import differentiable, own_backwards_refused, refuse_gradient_hooks
from placement.graph.ir import Call, Graph, Input, ModuleInfo, Node, Output, Parameter, Size, Symbol, Value, substitute
from placement.graph.lines import not_captured, raised_at, source_line
from placement.graph.repeats import MARK, RepeatError, Repeats
from placement.lang.diagnostics import Diagnostic, PlacementError

# Ops whose results do not depend on their operands' values, as autograd sees it.
_CONSTANT = {
    "detach", "ones_like", "zeros_like", "full_like", "empty_like", "new_ones", "new_zeros", "new_full", "new_empty",
}  # fmt: skip

_ROOT = "program"  # the attribute that holds the model while it is exported


@dataclass(slots=True)
class _Returned:
    """What the model returned while it was captured: (name, leaf) pairs and their structure."""

    leaves: tuple[tuple[str, Any], ...] = ()
    spec: Any = None


class _Root(torch.nn.Module):
    """Calls the model with flat tensors and notes the structure of what it returned.

    The note is an object of its own: export undoes assignments to a module's attributes.
    """

    def __init__(self, model: torch.nn.Module, example: Example, repeats: Repeats) -> None:
        super().__init__()
        self.program = model
        self._example = example
        self.repeats = repeats
        self.returned = _Returned()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.repeats.restart()
        output = self._example.call(self.program, tensors)
        paths, spec = pytree.tree_flatten_with_path(output)
        self.returned.spec = spec
        self.returned.leaves = tuple((".".join(map(key_text, path)) or "output", leaf) for path, leaf in paths)
        return tuple(leaf for _, leaf in paths if isinstance(leaf, torch.Tensor))


def capture(
    model: torch.nn.Module,
    example: Mapping[str, Any] | Sequence[Any],
    dims: Mapping[str, Sequence[str]] | None = None,
    *,
    copies: bool = True,
) -> Graph:
    """The global program of ``model`` called with ``example``.

    ``dims`` names the dims of inputs; named dims are dynamic unless the model itself fixes them. Layers that
    do the same again are traced once and copied, which ``copies=False`` forgoes: the graph is the same.
    Raises PlacementError (PLC401, PLC404, PLC407) where the model or the example cannot be captured.
    The model is left as it was.
    """
    flat = Example.of(model, example)
    refuse_block_masks(flat.constants)
    names = dict(dims or {})
    check_dims(flat, names)
    refuse_gradient_hooks(model)
    sizes = capture_sizes(flat, names)
    tensors = tuple(resized(t, names.get(n, ()), sizes) for n, t in zip(flat.names, flat.tensors, strict=True))

    def read(*, training: bool, copies: bool) -> tuple[Graph, Repeats]:
        with _as_in(model, training=training):
            repeats = Repeats(model, copies=copies)
            root = _Root(model, flat, repeats)
            with own_backwards_refused(), repeats.watching(), flex_captured(), without_cache_of_fakes():
                program = _export(root, tensors, flat, names)
        try:
            return _Reader(program, root, model, flat, names, sizes).graph(), repeats
        except (RepeatError, PlacementError):
            if not repeats.recordings:
                raise
            return read(training=training, copies=False)

    graph, repeats = read(training=True, copies=copies)
    evaluated = modes.difference(graph, repeats.asked, lambda: read(training=False, copies=copies)[0])
    return dataclasses.replace(graph, training_only=evaluated)


@contextlib.contextmanager
def _as_in(model: torch.nn.Module, *, training: bool) -> Generator[None]:
    """Training mode or eval mode, and no cache of past keys: what a training step runs."""
    flags = [(module, module.training) for module in model.modules()]
    configs = {id(c): c for c in (getattr(module, "config", None) for module in model.modules()) if c is not None}
    caching = [c for c in configs.values() if getattr(c, "use_cache", False)]  # an encoder and a decoder have their own
    model.train(training)
    before = [config.use_cache for config in caching]
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag
        for config, cache in zip(caching, before, strict=True):
            config.use_cache = cache


def _export(
    root: _Root, tensors: Sequence[torch.Tensor], example: Example, names: Mapping[str, Sequence[str]]
) -> torch.export.ExportedProgram:
    auto = torch.export.Dim.AUTO
    dynamic = tuple(dict.fromkeys(range(len(names.get(n, ()))), auto) for n in example.names)
    preserved = tuple(path for path, _ in root.named_modules() if path)
    failure: Exception | None = None
    while True:
        try:
            with warnings.catch_warnings(), silent_export(), torch.enable_grad():
                warnings.simplefilter("ignore")
                return torch.export.export(
                    root,
                    tuple(tensors),
                    dynamic_shapes=(dynamic,),
                    strict=False,
                    preserve_module_call_signature=preserved,
                )
        except PlacementError as error:  # raised while the model ran
            place = raised_at(error)
            found = [dataclasses.replace(one, model_line=one.model_line or place) for one in error.diagnostics]
            raise PlacementError(found) from error
        except TypeError as error:
            failure = error
            break
        except Exception as error:  # noqa: BLE001 - whatever the model or export raises becomes the diagnostic
            failure = error if failure is None or unpreservable(failure) else failure
            odd = unpreservable(error)  # what modules returned is worth another try, not a failure
            if not preserved:
                break
            kinds = () if odd is None else (type(odd),)
            preserved = tuple(path for path in preserved if kinds and not isinstance(root.get_submodule(path), kinds))
    raise PlacementError([not_captured(failure)]) from failure


class _Reader:
    """Reads an exported program into a Graph."""

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        root: _Root,
        model: torch.nn.Module,
        example: Example,
        names: Mapping[str, Sequence[str]],
        sizes: Mapping[str, int],
    ) -> None:
        self.program, self.root, self.model, self.example = program, root, model, example
        self.names, self.sizes = names, sizes
        self.values: dict[str, Value | tuple[Value | None, ...]] = {}
        self.renamed: dict[sympy.Basic, sympy.Symbol] = {}
        self.sized: dict[sympy.Expr, Size] = {}
        self.symbols: dict[str, Symbol] = {}
        self.inputs: tuple[Input, ...] = ()
        self.grad = True  # False while a no_grad region is read
        self.taken: dict[str, int] = {}
        self.copier = Copier(root.repeats, self._names)
        self.entered: dict[Any, set[torch.fx.Node]] = {}  # by recording that is open: what its call was given
        self.tensors: dict[str, Value] = {}  # parameters and buffers by all their names
        self.constants: dict[str, torch.Tensor] = {}

    def graph(self) -> Graph:
        placeholders = {n.name: n for n in self.program.graph.nodes if n.op == "placeholder"}
        self._name_symbols(placeholders)
        self.inputs = inputs = self._read_inputs(placeholders)
        parameters = self._read_parameters(placeholders)
        nodes = self._read_nodes(self.program.graph_module, ())
        returned = [self._value(a) for a in self._output_arguments()]
        rest = iter(returned)
        self._refuse_sizes()
        outputs = tuple(
            Output(next(rest), name) if isinstance(leaf, torch.Tensor) else Output(None, name, leaf)
            for name, leaf in self.root.returned.leaves
        )
        graph = Graph(
            inputs=inputs,
            parameters=parameters,
            nodes=tuple(nodes),
            outputs=outputs,
            symbols=tuple(self.symbols.values()),
            modules=self._read_modules(),
            in_spec=self.example.spec,
            out_spec=self.root.returned.spec,
            constant_inputs=self.example.constants,
            constants=self.constants,
            size_guards=self._size_guards(),
        )
        try:
            normal = normalize.normalize(graph)
        except PlacementError:
            refusals.refuse(graph)  # the op that is at fault says more than what it writes
            raise
        refusals.refuse(normal)
        return normal

    # -- sizes ----------------------------------------------------------------------------------

    def _name_symbols(self, placeholders: Mapping[str, torch.fx.Node]) -> None:
        ranges = self.program.range_constraints
        for name, node in zip(self.example.names, self._user_placeholders(placeholders), strict=True):
            tensor = node.meta["val"]
            for dim, size in zip(self.names.get(name, ()), tensor.shape, strict=False):
                if isinstance(size, int):
                    continue  # the model fixes this dim; the binder tells where it matters
                symbolic = expression(size)
                if symbolic.is_Integer:
                    continue  # as above: the export keeps its name for the number
                if not isinstance(symbolic, sympy.Symbol):
                    text = f"dim '{dim}' of input '{name}' must be of the form {symbolic} for this model"
                    raise PlacementError(
                        [Diagnostic("PLC403", text, hint=f"leave out the name '{dim}' to fix the size")]
                    )
                if symbolic in self.renamed:
                    continue
                symbol = sympy.Symbol(dim, integer=True, positive=True)
                self.renamed[symbolic] = symbol
                bounds = ranges.get(symbolic)
                self._add_symbol(dim, symbol, bounds)

    def _add_symbol(self, dim: str, symbol: sympy.Symbol, bounds: Any) -> None:
        lower = int(bounds.lower) if bounds is not None and isinstance(bounds.lower, sympy.Integer) else 1
        upper = int(bounds.upper) if bounds is not None and isinstance(bounds.upper, sympy.Integer) else None
        lower = 1 if lower <= SMALLEST else lower  # export's own lower bound is two; ours is what the model demands
        known = self.symbols.get(dim)
        if known is not None:
            lower = max(lower, known.lower)
            upper = min((u for u in (upper, known.upper) if u is not None), default=None)
        hint = next(t.shape[self.names[n].index(dim)] for n, t in self._named_tensors() if dim in self.names[n])
        self.symbols[dim] = Symbol(symbol, int(hint), lower, upper)

    def _dim_name(self, index: int, dim: int) -> str:
        """The name of a dim of the example's tensor, or its size where it has none."""
        return str(self.inputs[index].value.shape[dim])

    def _size_guards(self) -> tuple[str, ...]:
        """What branches on sizes took for granted; refused where no later call can be held to it."""
        guards = size_guards(self.program, self._dim_name)
        faults = [
            Diagnostic("PLC407", f"the model branches on sizes in a way that no call can check: {guard}")
            for guard in guards
            if not checkable(guard)
        ]
        if faults:
            raise PlacementError(faults)
        return guards

    def _refuse_sizes(self) -> None:
        faults = [
            Diagnostic("PLC407", f"output '{name}' is a size, not a tensor", hint="take it from an input's shape")
            for name, leaf in self.root.returned.leaves
            if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool)
        ]
        if faults:
            raise PlacementError(faults)

    def _named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in zip(self.example.names, self.example.tensors, strict=True):
            if name in self.names:
                yield name, tensor

    def _size(self, size: Any) -> Size:
        if isinstance(size, int):
            return size
        symbolic = expression(size) if isinstance(size, torch.SymInt | torch.SymFloat) else size
        if symbolic not in self.sized:
            renamed: Any = sympy.sympify(symbolic).xreplace(self.renamed)
            self.sized[symbolic] = int(renamed) if renamed.is_Integer else renamed
        return self.sized[symbolic]

    # -- inputs and parameters ------------------------------------------------------------------

    def _user_placeholders(self, placeholders: Mapping[str, torch.fx.Node]) -> list[torch.fx.Node]:
        return [placeholders[name] for name in self.program.graph_signature.user_inputs if isinstance(name, str)]

    def _read_inputs(self, placeholders: Mapping[str, torch.fx.Node]) -> tuple[Input, ...]:
        inputs = []
        for name, tensor, node in zip(
            self.example.names, self.example.tensors, self._user_placeholders(placeholders), strict=True
        ):
            value = self._define(node, _identifier(name), requires_grad=tensor.requires_grad)
            inputs.append(Input(value, name))
        return tuple(inputs)

    def _read_parameters(self, placeholders: Mapping[str, torch.fx.Node]) -> tuple[Parameter, ...]:
        signature = self.program.graph_signature
        aliases: dict[int, list[str]] = {}
        tensors: dict[str, torch.Tensor] = {}
        for source in (self.model.named_parameters, self.model.named_buffers):
            for name, tensor in source(remove_duplicate=False):
                aliases.setdefault(id(tensor), []).append(name)
                tensors[name] = tensor
        transient = {
            f"{path}.{name}".lstrip(".")
            for path, module in self.model.named_modules()
            for name in transient_buffers(module)
        }
        found: dict[int, Parameter] = {}
        targets = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        for placeholder, target in targets.items():
            name = target.removeprefix(f"{_ROOT}.")
            tensor = tensors[name]
            if id(tensor) in found:
                self.values[placeholder] = found[id(tensor)].value
                continue
            names = tuple(aliases[id(tensor)])
            is_buffer = not isinstance(tensor, torch.nn.Parameter)
            value = self._define(
                placeholders[placeholder], _identifier(names[0]), requires_grad=tensor.requires_grad and not is_buffer
            )
            found[id(tensor)] = Parameter(value, names, is_buffer, names[0] not in transient)
        for placeholder, target in signature.inputs_to_lifted_tensor_constants.items():
            value = self._define(placeholders[placeholder], _identifier(target), requires_grad=False)
            name = target.removeprefix(f"{_ROOT}.")
            self.constants[name] = self.program.constants[target]  # type: ignore[assignment]
            found[-len(found) - 1] = Parameter(value, (name,), True, False)
        for tensor_id, names in aliases.items():  # what forward does not use is still the user's
            if tensor_id not in found:
                tensor = tensors[names[0]]
                is_buffer = not isinstance(tensor, torch.nn.Parameter)
                grad = tensor.requires_grad and not is_buffer
                value = Value(self._fresh(_identifier(names[0])), tuple(tensor.shape), tensor.dtype, grad)
                found[tensor_id] = Parameter(value, tuple(names), is_buffer, names[0] not in transient)
        order = {name: index for index, name in enumerate(tensors)}
        self.tensors = {name: p.value for p in found.values() for name in p.names if name in tensors}
        return tuple(sorted(found.values(), key=lambda p: order.get(p.name, len(order))))

    def _define(self, node: torch.fx.Node, name: str, *, requires_grad: bool) -> Value:
        tensor = node.meta["val"]
        value = Value(self._fresh(name), tuple(map(self._size, tensor.shape)), tensor.dtype, requires_grad)
        self.values[node.name] = value
        return value

    def _fresh(self, name: str) -> str:
        """A name for an input, parameter or op that nothing else has: an input may be called like a parameter."""
        fresh = name
        while fresh in self.taken:
            fresh = f"{name}_{self.taken[name]}"
            self.taken[name] += 1
        self.taken[fresh] = 1
        return fresh

    def _names(self, op: Any, count: int) -> tuple[str, tuple[str, ...]]:
        """Names for a node and its ``count`` outputs, after the op."""
        name = self._fresh(schema_name(op)[1])
        return name, (name,) if count == 1 else tuple(self._fresh(f"{name}_{index}") for index in range(count))

    # -- nodes ----------------------------------------------------------------------------------

    def _read_nodes(self, module: torch.fx.GraphModule, outer: tuple[Call, ...]) -> list[Node]:
        nodes: list[Node] = []
        for node in module.graph.nodes:
            if node.op != "call_function":
                continue
            if any(given & set(node.all_input_nodes) for given in self.entered.values()) and node.target is not MARK:
                raise RepeatError  # what a recorded call was given came in another way too: copies may differ there
            if isinstance(node.target, HigherOrderOperator):
                nodes += self._inline(module, node, outer)
            elif not is_overload(node.target):
                self._read_python(node)
            elif node.target is MARK:
                nodes += self._read_mark(node, outer)
            else:
                nodes += self._read_op(node, outer)
        return nodes

    def _read_python(self, node: torch.fx.Node) -> None:
        """Arithmetic on sizes, and getitem of a node with several outputs."""
        if node.target.__name__ == "getitem" and node.args[0].name in self.values:  # type: ignore[union-attr]
            self.values[node.name] = self.values[node.args[0].name][node.args[1]]  # type: ignore[index, union-attr]

    def _read_mark(self, node: torch.fx.Node, outer: tuple[Call, ...]) -> list[Node]:
        """Where a recorded call begins, ends or recurs."""
        tensors, _, number, kind = node.args
        given = tuple(map(self._value, tensors))  # type: ignore[arg-type]
        if kind == "enter":
            self.entered[number] = set(node.all_input_nodes)
        elif kind == "leave":
            self.entered.pop(number, None)
        nodes, results = self.copier.mark(kind, number, given, self._stack(node) or outer, self.tensors)  # type: ignore[arg-type]
        self.values[node.name] = results
        return nodes

    def _read_op(self, node: torch.fx.Node, outer: tuple[Call, ...]) -> list[Node]:
        meta = node.meta.get("val")
        stack = self._stack(node) or outer
        source = source_line(node)
        if isinstance(meta, torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool):
            return []
        args = self._arguments(node.args)
        kwargs = {k: self._arguments(v) for k, v in node.kwargs.items()}
        operands = list(normalize.values_in((args, tuple(kwargs.values()))))
        before: list[Node] = []
        if not self.grad:
            before, stopped = self._detached(operands, stack, source)
            args = substitute(args, stopped)
            kwargs = {k: substitute(v, stopped) for k, v in kwargs.items()}
        constant = schema_name(node.target)[1] in _CONSTANT
        grad = self.grad and not constant and any(v.requires_grad for v in operands)
        if meta is None:
            if written_arguments(node.target):
                text = f"'{node.target}' writes to what it is given and returns nothing"
                raise PlacementError([Diagnostic("PLC407", text, model_line=source or None)])
            return []  # asserts about metadata and sizes
        outputs = meta if isinstance(meta, tuple | list) else (meta,)
        name, names = self._names(node.target, len(outputs))
        results = tuple(
            Value(named, tuple(map(self._size, tensor.shape)), tensor.dtype, grad and differentiable(tensor.dtype))
            if isinstance(tensor, torch.Tensor)
            else None
            for named, tensor in zip(names, outputs, strict=True)
        )
        self.values[node.name] = results[0] if not isinstance(meta, tuple | list) else results  # type: ignore[assignment]
        made = [*before, Node(name, node.target, args, kwargs, results, stack, source)]  # type: ignore[arg-type]
        for each in made:
            self.copier.met(each)
        return made

    def _detached(
        self, operands: Sequence[Value], stack: tuple[Call, ...], source: str
    ) -> tuple[list[Node], Callable[[Any], Any]]:
        """What a no_grad region reads, cut off from autograd: the emitted op has no region around it."""
        cut: dict[Value, Value] = {}
        nodes = []
        for value in operands:
            if differentiable(value.dtype) and value not in cut:  # one that needs no gradient may be written to first
                name, _ = self._names(aten.detach.default, 1)
                cut[value] = Value(name, value.shape, value.dtype, False)
                nodes.append(Node(name, aten.detach.default, (value,), {}, (cut[value],), stack, source))
        return nodes, lambda leaf: cut.get(leaf, leaf) if isinstance(leaf, Value) else leaf

    def _inline(self, module: torch.fx.GraphModule, node: torch.fx.Node, outer: tuple[Call, ...]) -> list[Node]:
        """The body of a region (no_grad, disabled autocast) in place of the region."""
        name = str(node.target)
        if name == "_export_tracepoint":  # export leaves its marks of module calls inside regions
            self.values[node.name] = tuple(self._value(a) for a in node.args)
            return []
        bodies = [a for a in node.args if isinstance(a, torch.fx.Node) and a.op == "get_attr"]
        enabled = [a for a in node.args if isinstance(a, bool)]
        if ("set_grad_enabled" not in name and not ("autocast" in name and False in enabled)) or len(bodies) != 1:
            text = f"'{name}' is not supported"
            raise PlacementError([Diagnostic("PLC407", text, model_line=source_line(node) or None)])
        body = getattr(module, str(bodies[0].target))
        operands = node.args[node.args.index(bodies[0]) + 1 :]
        inner = [n for n in body.graph.nodes if n.op == "placeholder"]
        for placeholder, operand in zip(inner, operands, strict=True):
            if isinstance(operand, torch.fx.Node) and operand.name in self.values:
                self.values[placeholder.name] = self.values[operand.name]
        before = self.grad
        if "set_grad_enabled" in name:
            self.grad = enabled[0]
        nodes = self._read_nodes(body, self._stack(node) or outer)
        self.grad = before
        out = next(n for n in body.graph.nodes if n.op == "output").args[0]
        self.values[node.name] = tuple(self._value(a) for a in out)  # type: ignore[misc, union-attr]
        return nodes

    def _arguments(self, tree: Any) -> Any:
        if isinstance(tree, tuple | list):
            return tuple(self._arguments(item) for item in tree)
        if isinstance(tree, torch.fx.Node):
            if tree.name in self.values:
                return self.values[tree.name]
            if from_data(tree.meta.get("val")):
                text = "a number is taken out of a tensor (.item(), or a size that depends on data)"
                hint = "keep it a tensor: x * t instead of x * t.item()"
                line = source_line(tree) or None
                raise PlacementError([Diagnostic("PLC407", text, hint=hint, model_line=line)])
            tree = tree.meta["val"]
        return self._size(tree) if isinstance(tree, torch.SymInt | torch.SymFloat) else tree

    def _value(self, argument: Any) -> Value:
        value = self.values[argument.name]
        if not isinstance(value, Value):
            raise TypeError(f"{argument.name} is not one tensor")
        return value

    def _stack(self, node: torch.fx.Node) -> tuple[Call, ...]:
        stack = []
        for path, _ in (node.meta.get("nn_module_stack") or {}).values():
            if path in ("", _ROOT) or not path.startswith(f"{_ROOT}."):
                continue
            name, _, index = path.removeprefix(f"{_ROOT}.").partition("@")
            stack.append(Call(name, int(index or 0)))
        return tuple(stack)

    def _output_arguments(self) -> list[torch.fx.Node]:
        output = next(n for n in self.program.graph.nodes if n.op == "output")
        return list(output.args[0])

    # -- modules --------------------------------------------------------------------------------

    def _read_modules(self) -> dict[str, ModuleInfo]:
        returned: dict[str, dict[int, tuple[Value, ...]]] = {}
        arguments: dict[str, dict[int, dict[str, Value]]] = {}
        for entry in self.program.module_call_graph:
            if not entry.fqn.startswith(_ROOT) or entry.signature is None:
                continue
            path, _, index = entry.fqn.removeprefix(_ROOT).removeprefix(".").partition("@")
            values = [self.values.get(getattr(a, "name", "")) for a in entry.signature.outputs]
            returned.setdefault(path, {})[int(index or 0)] = tuple(v for v in values if isinstance(v, Value))
            names = argument_names(entry.signature)
            given = zip(names, (self.values.get(getattr(a, "name", "")) for a in entry.signature.inputs), strict=False)
            arguments.setdefault(path, {})[int(index or 0)] = {n: v for n, v in given if isinstance(v, Value)}
        modules = {
            path: ModuleInfo(path, type(module), returned.get(path, {}), arguments.get(path, {}))
            for path, module in self.model.named_modules(remove_duplicate=False)
        }
        return self.copier.modules(modules)


def _identifier(name: str) -> str:
    return re.sub(r"\W", "_", name)
