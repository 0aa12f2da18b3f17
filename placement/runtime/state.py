"""Between a program's local tensors and the one-device state: by original name, in original order."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from placement.runtime.axis import Step
from placement.runtime.cuts import whole_shape
from placement.runtime.errors import StateError
from placement.runtime.main_grads import gradient
from placement.runtime.slices import Sliced, own_block

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from placement.runtime.program import Program


def tensors(program: Program) -> dict[str, Tensor]:
    """All parameters and buffers by name, tied ones under each of their names."""
    return {**_parameters(program), **_named(program.named_buffers(remove_duplicate=False))}


def _parameters(program: Program) -> dict[str, Tensor]:
    return _named(program.named_parameters(remove_duplicate=False))


def _named(found: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """By the names that they have without what torch.compile puts around a module."""
    return {name.replace("_orig_mod.", ""): tensor for name, tensor in found}


def full_state_dict(program: Program) -> dict[str, Tensor]:
    """See ``Program.full_state_dict``."""
    program.refuse_meta()
    kept = _persistent(program)
    done: dict[int, Tensor] = {}
    full: dict[str, Tensor] = {}
    for name, tensor in tensors(program).items():
        if name in kept:
            if id(tensor) not in done:
                done[id(tensor)] = gathered(program, name, tensor)
            full[name] = done[id(tensor)]
    return full


def full_gradients(program: Program) -> dict[str, Tensor | None]:
    """See ``Program.full_gradients``."""
    refuse_waiting(program)
    done: dict[int, Tensor | None] = {}
    full: dict[str, Tensor | None] = {}
    for name, parameter in _parameters(program).items():
        if id(parameter) not in done:
            grad = gradient(parameter)
            done[id(parameter)] = None if grad is None else gathered(program, name, grad)
        full[name] = done[id(parameter)]
    return full


def refuse_waiting(program: Program) -> None:
    """Raise where gradients are not final."""
    if names := program.waiting():
        raise StateError(
            f"gradients of {len(names)} parameters ({names[0]} first) lack what backwards under no_sync() "
            "contributed: they are summed in the next backward outside"
        )


def gathered(program: Program, name: str, local: Tensor) -> Tensor:
    """The one-device copy of a local tensor that lies as the parameter ``name`` does."""
    full = local.detach()
    for axis, cut in reversed(program.layout_of(name)):
        full = axis.run(Step("all_gather", cut), full)
    full = full[tuple(slice(0, size) for size in program.full_shape(name, local))]  # without what it was padded with
    return full.clone() if full.data_ptr() == local.data_ptr() else full.contiguous()


def load_full_state_dict(program: Program, given: Mapping[str, Sliced], *, strict: bool) -> None:
    """See ``Program.load_full_state_dict``."""
    own = tensors(program)
    groups: dict[int, list[str]] = {}
    for name, tensor in own.items():
        groups.setdefault(id(tensor), []).append(name)
    problems = _problems(program, given, own, groups, strict=strict)
    if problems:
        raise StateError("the state dict does not fit the program:\n" + "\n".join(f"  {line}" for line in problems))
    for names in groups.values():
        named = [name for name in names if name in given]
        if named:
            _load(program, names, given[named[0]])


def _problems(
    program: Program,
    given: Mapping[str, Sliced],
    own: Mapping[str, Tensor],
    groups: Mapping[int, list[str]],
    *,
    strict: bool,
) -> list[str]:
    problems: list[str] = []
    kept = _persistent(program)
    if strict:
        problems += [f"unknown: {name}{_near(name, own)}" for name in given if name not in own]
        missing = [ns[0] for ns in groups.values() if any(n in kept for n in ns) and not any(n in given for n in ns)]
        problems += [f"missing: {name}{_near(name, [n for n in given if n not in own])}" for name in missing]
    for names in groups.values():
        named = [name for name in names if name in given]
        shape = program.full_shape(names[0], own[names[0]])
        for name in named:
            if tuple(given[name].shape) != shape:
                problems.append(f"shape: {name} is {list(given[name].shape)}, the program has {list(shape)}")
            elif not _same(given[name], given[named[0]]):
                problems.append(f"tied: {named[0]} and {name} are one parameter, but differ")
    return problems


def _same(a: Sliced, b: Sliced) -> bool:
    if a is b or tuple(a.shape) != tuple(b.shape):
        return True  # a shape that differs is a problem of its own
    whole = tuple(slice(0, size) for size in a.shape)
    first, second = a[whole], b[whole]
    return first.is_meta or second.is_meta or torch.equal(first, second)


def _near(name: str, names: Mapping[str, object] | list[str]) -> str:
    near = difflib.get_close_matches(name, list(names), n=2, cutoff=0.7)
    return f" (near: {', '.join(near)})" if near else ""


def _load(program: Program, names: list[str], full: Sliced) -> None:
    """Give the tensor of ``names`` its block of ``full``: in place, or in every owner if it had no data."""
    old, layout = tensors(program)[names[0]], program.layout_of(names[0])
    part = own_block(full, layout, whole_shape(old.shape, layout)).detach()
    missing = [size - have for size, have in zip(old.shape, part.shape, strict=True)]
    if any(missing):
        part = F.pad(part, [n for more in reversed(missing) for n in (0, more)])
    if not old.is_meta:
        with torch.no_grad():
            old.copy_(part)
        return
    data = torch.empty(old.shape, dtype=old.dtype, device=program.device).copy_(part)
    new = nn.Parameter(data, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else data
    for name in names:
        path, _, attribute = name.rpartition(".")
        setattr(program.get_submodule(path), attribute, new)


def _persistent(program: Program) -> set[str]:
    """Names that a one-device state dict has."""
    return set(_named(program.state_dict(keep_vars=True).items()))
