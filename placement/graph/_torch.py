"""Every private torch name that the compiler leans on. The runtime, which stands alone, has a file of its own."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import ast
import logging
import os
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, TypeGuard, cast

import sympy
import torch
import torch._dynamo.config
import torch.export._trace  # what a first export imports
import torch.nn.attention.flex_attention as flex
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

HigherOrderOperator = torch._ops.HigherOrderOperator
OpOverload = torch._ops.OpOverload

aten = torch.ops.aten
to_copy = aten._to_copy
unsafe_view = aten._unsafe_view


def is_overload(op: Any) -> TypeGuard[torch._ops.OpOverload]:
    """Whether ``op`` is one overload of a dispatcher op."""
    return isinstance(op, OpOverload)


def op_of(op: Any) -> Any:
    """The overload or packet that ``op`` stands for, None where it is no op.

    What ``torch.library.custom_op`` returns stands for its one overload.
    """
    op = getattr(op, "_opoverload", op)
    return op if is_overload(op) or isinstance(op, torch._ops.OpOverloadPacket) else None


def overload_for(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The overload that the call ``op(*args, **kwargs)`` reaches; None where ``op`` is no op."""
    op = op_of(op)
    if isinstance(op, torch._ops.OpOverloadPacket):
        return getattr(op, torch._C._jit_resolve_packet(op._qualified_op_name, *args, **kwargs))
    return op


def schema_name(op: Any) -> tuple[str, str]:
    """Namespace and name of an op: ``("aten", "add")``; two empty strings for what is no overload."""
    if not is_overload(op):
        return "", ""
    namespace, name = op._schema.name.split("::")
    return namespace, name


def overload_name(op: Callable[..., Any]) -> str:
    """``Tensor`` for ``aten.add.Tensor``, ``default`` where the schema names none."""
    return op._overloadname if is_overload(op) else ""


@cache
def schema_arguments(op: Callable[..., Any]) -> tuple[tuple[str, Any], ...]:
    """Names and defaults of an op's arguments, in order; empty for what is no overload."""
    return tuple((a.name, a.default_value) for a in op._schema.arguments) if is_overload(op) else ()


def storage_of(tensor: torch.Tensor) -> int:
    """What tells a tensor's storage from others while it lives, also one without data, which has no address."""
    return tensor.untyped_storage()._cdata


@cache
def gives_a_view(op: Callable[..., Any]) -> bool:
    """Whether what the op returns may look at its operand's storage: so says its schema, or it is one of a few."""
    unsaid = {"_unsafe_view", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes", "type_as", "data"}
    if not is_overload(op):
        return False
    shared = any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)
    return shared or schema_name(op)[1] in unsaid


@cache
def written_arguments(op: Callable[..., Any]) -> tuple[int, ...]:
    """The positions of the arguments that the op writes to."""
    arguments = op._schema.arguments if is_overload(op) else ()
    return tuple(i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


def transient_buffers(module: torch.nn.Module) -> frozenset[str]:
    """Names of the module's own buffers that are no part of its state dict."""
    return frozenset(module._non_persistent_buffers_set)


def expression(size: torch.SymInt | torch.SymFloat) -> sympy.Expr:
    """The sympy expression of a symbolic size."""
    return size.node.expr


def without_cache_of_fakes() -> AbstractContextManager[None]:
    """While this is entered, shapes of traced ops are worked out anew.

    torch remembers them by op and arguments. A program whose repeated layers are traced once has few ops that
    recur, and to remember costs more than to work out.
    """
    return torch._dynamo.config.patch(fake_tensor_cache_enabled=False)


@contextmanager
def silent_export() -> Generator[None]:
    """Without the pages that torch logs and prints of an export that fails: the diagnostic says what matters.

    With TORCH_LOGS in the environment, torch writes what it was asked for.
    """
    before, trace = logging.root.manager.disable, cast(Any, torch.export._trace)
    if not os.environ.get("TORCH_LOGS"):
        logging.disable(logging.CRITICAL)
        trace.print = lambda *_, **__: None  # it prints the graph so far
    try:
        yield
    finally:
        logging.disable(before)
        trace.__dict__.pop("print", None)


ONE_BLOCK = (flex._LARGE_SPARSE_BLOCK_SIZE, flex._LARGE_SPARSE_BLOCK_SIZE)
"""The block size of the BlockMask that torch makes where a call of ``flex_attention`` has none."""


def _one_block(query: torch.Tensor, _: torch.Tensor) -> flex.BlockMask:
    none = torch.zeros((1, 1, 1, 1), dtype=torch.int32, device=query.device)
    return flex.BlockMask((1, 1), none[0], none, *(None,) * 6, BLOCK_SIZE=ONE_BLOCK)


@contextmanager
def flex_replaced(
    attention: Callable[..., Any],
    over_scalars: Callable[..., Any],
    blocks: Callable[..., Any],
    block_mask: Callable[..., Any],
) -> Generator[None]:
    """While this is entered, torch's ``flex_attention`` and ``create_block_mask`` do their work with these.

    Both are imported by name wherever they are called, so they stay, and look up what they call themselves.
    ``attention`` is called as the op (with functions in place of graphs), ``over_scalars(function, prefix)`` as what
    makes of a function of scalars one of ranges, ``blocks(mask, ...)`` as what sums a mask up by blocks, ``block_mask``
    as what makes a BlockMask of that. What is compiled runs as it is.
    """
    by = {
        "_validate_device": lambda *_: None,  # on CPUs torch runs it without gradients alone
        "flex_attention_hop": attention,
        "_vmap_for_bhqkv": over_scalars,
        "_convert_mask_to_block_mask": blocks,
        "_create_sparse_block_from_block_mask": block_mask,
        "_create_empty_block_mask": _one_block,
    }
    names = flex.__dict__
    before = {name: names[name] for name in by}
    names.update(by)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        names.update(before)


def unpreservable(error: BaseException) -> torch.nn.Module | None:
    """The module that export failed at because of what a call of it took or gave: it cannot note a size, say."""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_name in ("pre_hook", "post_hook") and code.co_filename.endswith("/_export/wrappers.py"):
            return trace.tb_frame.f_locals.get("module")
        trace = trace.tb_next
    return None


def size_key(size: int | torch.SymInt) -> int | str:
    """What two equal sizes have in common: the number, or the text of the expression (comparing would add a guard)."""
    return str(size.node.expr) if isinstance(size, torch.SymInt) else size


def storage_key(tensor: torch.Tensor) -> int:
    """What two tensors on one storage have in common."""
    return tensor.untyped_storage()._cdata


def forward_hooks(module: torch.nn.Module) -> tuple[Callable[..., Any], ...]:
    """What runs before and after the module's own ``forward``."""
    return (*module._forward_pre_hooks.values(), *module._forward_hooks.values())


def gradient_hooks(owner: torch.nn.Module | torch.Tensor) -> bool:
    """Whether a hook of the module or parameter would run in backward."""
    names = ("_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks")
    return any(getattr(owner, name, None) for name in names)


def from_data(size: Any) -> bool:
    """Whether a number of the captured program comes out of a tensor's data."""
    return isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool) and bool(free_unbacked_symbols(size))


def draws_numbers(op: Callable[..., Any]) -> bool:
    """Whether the op draws from a random generator of torch's."""
    return is_overload(op) and torch.Tag.nondeterministic_seeded in op.tags


_SIZE = re.compile(r"L\['tensors'\]\[(\d+)\]\.size\(\)\[(\d+)\]")
_SMALLEST = re.compile(r"\W*(2 <= \w+|1 < \w+|1 != \w+|\w+ >= 2|\w+ > 1|\w+ != 1|0 <= \w+|1 <= \w+|\w+ [!>]=? 0)\W*")


_SPELLED = (("Abs(", "abs("), ("math.ceil(", "ceil("), ("math.floor(", "floor("), ("torch.sym_float(", "float("))


_RELATIONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: sympy.Eq, ast.NotEq: sympy.Ne, ast.Lt: sympy.Lt, ast.LtE: sympy.Le, ast.Gt: sympy.Gt, ast.GtE: sympy.Ge,
}  # fmt: skip


_CHECKED = (
    ast.Expression, ast.Constant, ast.Name, ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.Call,
    ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.expr_context,
)  # fmt: skip


def checkable(guard: str) -> bool:
    """Whether a call's sizes can be held against the guard: arithmetic, and functions that a program knows."""
    nodes = list(ast.walk(ast.parse(guard, mode="eval")))
    called = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
    return called <= {"min", "max", "abs", "ceil", "floor", "float"} and all(
        isinstance(node, _CHECKED) for node in nodes
    )


def _always(text: str) -> bool:
    """Whether the guard, a comparison, holds whatever the sizes are. Python's own ``!=`` would compare expressions."""
    tree = ast.parse(text, mode="eval").body
    if not isinstance(tree, ast.Compare) or len(tree.ops) != 1 or not checkable(text):
        return False
    names = {n.id: sympy.Symbol(n.id, integer=True, positive=True) for n in ast.walk(tree) if isinstance(n, ast.Name)}
    functions = {"max": sympy.Max, "min": sympy.Min, "abs": sympy.Abs, "ceil": sympy.ceiling, "floor": sympy.floor}
    known: dict[str, Any] = {**names, **functions, "float": sympy.sympify}
    sides = [ast.unparse(side) for side in (tree.left, tree.comparators[0])]
    try:
        left, right = (sympy.sympify(side, locals=known) for side in sides)  # pyright: ignore[reportCallIssue]
    except TypeError:  # an operator on bits, which sympy has not
        return False
    return _RELATIONS[type(tree.ops[0])](left, right) in (True, sympy.true)


def size_guards(program: torch.export.ExportedProgram, name_of: Callable[[int, int], str]) -> tuple[str, ...]:
    """What the model's branches on sizes took for granted, as Python over ``name_of(input, dim)``.

    Guards that only keep a size from 0 or 1 come from torch, which special-cases them; the ops do not.
    """
    found: dict[str, None] = {}
    for guard in getattr(program, "_guards_code", None) or ():
        text = _SIZE.sub(lambda match: name_of(int(match[1]), int(match[2])), guard)
        for theirs, ours in _SPELLED:
            text = text.replace(theirs, ours)
        if "L[" not in text and not _SMALLEST.fullmatch(text) and not _always(text):
            found[text] = None
    return tuple(found)
