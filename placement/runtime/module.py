"""Emitted modules: parameters declared by their one-device shape, and how they are used."""

# ruff: noqa: SLF001 - the functions here are methods of Module, kept out of its names
# pyright: reportPrivateUsage=false

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from placement.runtime._torch import own_parameter
from placement.runtime.attention import attention as dropped_attention
from placement.runtime.cuts import Cut
from placement.runtime.errors import StateError
from placement.runtime.exchange import replicated
from placement.runtime.rng import Dropping, Random, Site, dropped

if TYPE_CHECKING:
    from collections.abc import Mapping

    from placement.runtime.axis import Axis
    from placement.runtime.reductions import Aliases

    On = (
        tuple[Axis, int]
        | tuple[Axis, int, int]
        | tuple[Axis, int, int, tuple[int, ...]]
        | tuple[Axis, int, int, tuple[int, ...], bool]
    )

# Where a value is cut: nowhere, on the only axis, or by axis name.
Cuts = Cut | dict[str, Cut] | None


@dataclass(frozen=True, slots=True)
class Declared:
    """A parameter or buffer by its one-device shape, before the mesh is known."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    cut: Cuts
    parameter: bool
    trainable: bool
    persistent: bool
    given: tuple[int, ...] | None = None  # the shape in a state dict; zeros follow it in ``shape``

    def made(self, shape: tuple[int, ...]) -> Tensor:
        """The tensor without data, of this rank's ``shape``."""
        data = torch.empty(shape, dtype=self.dtype, device="meta")
        return nn.Parameter(data, requires_grad=self.trainable) if self.parameter else data


class _Member:
    """Where instances of a class have the parameter, buffer or module of a name: in torch's own dicts.

    Found on the class it is there in one step; torch finds that there is no such attribute first. An attribute of an
    instance comes before it.
    """

    __slots__ = ("kept", "name")

    def __init__(self, kept: str, name: str) -> None:
        self.kept, self.name = kept, name

    def __get__(self, module: nn.Module | None, owner: type | None = None) -> Any:
        if module is None:
            return self
        try:
            return module.__dict__[self.kept][self.name]
        except KeyError:  # moved by somebody: torch looks for it, or says that there is none
            raise AttributeError(self.name) from None


@dataclass(frozen=True, slots=True)
class Tied:
    """The same parameter as another of the program, by dotted name."""

    name: str


def param(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    cut: Cuts = None,
    trainable: bool = True,
    given: tuple[int, ...] | None = None,
) -> Declared:
    """A parameter of one-device ``shape``; ``cut`` says where the axis shards it.

    One that no axis divides evenly is ``given`` in its own shape and padded with zeros to ``shape``.
    """
    return Declared(shape, dtype, cut, parameter=True, trainable=trainable, persistent=True, given=given)


def buffer(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    persistent: bool = True,
    cut: Cuts = None,
    given: tuple[int, ...] | None = None,
) -> Declared:
    """A buffer of one-device ``shape``, or ``given`` and padded; one that is not persistent is in no state dict."""
    return Declared(shape, dtype, cut, parameter=False, trainable=False, persistent=persistent, given=given)


def tied(name: str) -> Tied:
    """The parameter ``name`` of the program under a second name."""
    return Tied(name)


class Module(nn.Module):
    """A module of an emitted program. It has no public names of its own: a model may use any for its members.

    Members become what they are: modules, lists and dicts of modules, ``param``, ``buffer``, ``tied``;
    anything else is a plain attribute. Parameters have no data until a state dict is loaded. Once the program is
    on a mesh, each axis is an attribute under its name.
    """

    def __init__(self, /, **members: Any) -> None:
        super().__init__()
        self._declared: dict[str, Declared] = {}
        self._tied: dict[str, Tied] = {}
        self._aliases: Aliases = {}
        self._path = ""  # in the program, which also shares its random state with all its modules
        self._random = Random()
        self._draws = True  # as the program says, once it is on a mesh
        for name, member in members.items():
            self._add(name, member)

    def _add(self, name: str, member: Any) -> None:
        known = getattr(type(self), name, None)
        if known is not None and not isinstance(known, _Member):
            raise ValueError(f"{type(self).__name__} cannot have a member {name!r}: its class has one")
        if isinstance(member, Declared):
            self._declared[name] = member
            self._register(name, member, member.shape)
            self._kept_in("_parameters" if member.parameter else "_buffers", name)
        elif isinstance(member, Tied):
            self._tied[name] = member
            self.register_parameter(name, None)
            self._kept_in("_parameters", name)
        elif isinstance(member, (list, tuple)) and all(isinstance(m, nn.Module) for m in member):
            self._add_module(name, nn.ModuleList(member))
        elif isinstance(member, dict) and all(isinstance(m, nn.Module) for m in member.values()):
            self._add_module(name, nn.ModuleDict(member))
        elif isinstance(member, nn.Module):
            self._add_module(name, member)
        else:
            setattr(self, name, member)

    def _add_module(self, name: str, module: nn.Module) -> None:
        self.add_module(name, module)
        self._kept_in("_modules", name)

    def _kept_in(self, kept: str, name: str) -> None:
        if type(self) is not Module:  # whose classes have members of their own
            setattr(type(self), name, _Member(kept, name))

    def _register(self, name: str, declared: Declared, shape: tuple[int, ...]) -> None:
        tensor = declared.made(shape)
        if isinstance(tensor, nn.Parameter):
            self.register_parameter(name, tensor)
        else:
            self.register_buffer(name, tensor, persistent=declared.persistent)


def _on(cuts: tuple[On, ...]) -> tuple[tuple[Axis, Cut], ...]:
    return tuple((axis, Cut(*cut)) for axis, *cut in cuts)  # pyright: ignore[reportArgumentType] - a list of unlike items


def summed(module: Module, name: str, axis: Axis) -> Tensor:
    """The parameter ``name`` used I → R on ``axis``: its gradient is summed over the ranks.

    In a call of the program all such parameters share one reduction. In a call of this module alone
    each has its own.
    """
    parameter = own_parameter(module, name)
    if parameter is None:
        owner, _, attribute = name.rpartition(".")
        parameter = getattr(module.get_submodule(owner) if owner else module, attribute)
    found = module._aliases.get((axis.name, id(parameter)))
    # By identity: a wrapper may have put another tensor in the parameter's place for this call.
    if found is not None and found[0] is parameter and torch.is_grad_enabled():
        # A compiled graph gives all its gradients at its end.
        if not torch.compiler.is_compiling() and not found[2].used:
            found[2].use()
        return found[1]
    return replicated(parameter, axis)


def _key(module: Module, site: Site) -> Tensor | int:
    """What names the mask of op ``site`` in the running call, which has a key only where the program says so."""
    if not module._draws:
        raise StateError(f"{module._path or 'the root'} draws random numbers in a program that has no draws = True")
    return module._random.key(module._path, site)


def dropout(
    module: Module, x: Tensor, p: float, site: Site, *cuts: On, lengths: Mapping[int, str] | None = None
) -> Tensor:
    """``F.dropout`` in training, ``x`` else; the mask is that of op ``site`` of this module, see ``rng``.

    I → I, R → R without cuts: every rank drops the same. S → S with the axes that ``x`` is cut on, outermost first,
    each as (axis, dim), with what more a ``Cut`` has after it: each rank has its block of the one-device mask. Nothing
    is sent. ``lengths`` names dims that may be longer than the caller has them: masks are those of his.
    """
    if not module.training:
        return x
    spare = module._random.spare(lengths) if lengths else None
    return dropped(x, p, _key(module, site), _on(cuts), spare)


def attention(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    site: Site,
    *cuts: On,
    lengths: Mapping[int, str] | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``F.scaled_dot_product_attention`` with dropout in training; the cuts are those of ``query``.

    The probabilities [batch, heads, queries, keys] are dropped as those of one device, see ``dropout``.
    """
    mask: dict[str, Any] = {
        "attn_mask": attn_mask,
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": enable_gqa,
    }
    if not module.training or dropout_p == 0:
        return F.scaled_dot_product_attention(query, key, value, **mask)
    spare = module._random.spare(lengths) if lengths else None
    return dropped_attention(query, key, value, dropout_p, _key(module, site), _on(cuts), spare, **mask)


def drops(
    module: Module, dropout_p: float, site: Site, *cuts: On, lengths: Mapping[int, str] | None = None
) -> Dropping | None:
    """The probabilities that ``attention`` would drop, for ``ring_attention``; None where it would drop none."""
    if not module.training or dropout_p == 0:
        return None
    spare = module._random.spare(lengths) if lengths else {}
    return Dropping(dropout_p, _key(module, site), _on(cuts), spare)
