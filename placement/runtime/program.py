"""The root of an emitted program: put on a mesh, called under guards, reduced once per backward."""

# ruff: noqa: SLF001 - a program binds the modules under it

from __future__ import annotations

import copy
import inspect
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Partial, Placement, Shard

from placement.runtime import state
from placement.runtime._torch import Placing, eager, itself_eager
from placement.runtime.axis import Axis, MeshAxis
from placement.runtime.cuts import Cut, block, local_shape, whole_shape
from placement.runtime.errors import MeshError, SizeError, StateError
from placement.runtime.gathers import gathered_again
from placement.runtime.guards import Guard, Spec
from placement.runtime.lengths import Padded, spare
from placement.runtime.main_grads import zero_main_grads
from placement.runtime.module import Module, Tied
from placement.runtime.outputs import mapped
from placement.runtime.reductions import Reducer
from placement.runtime.simulate import SimulatedMesh

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping

    from torch.distributed.device_mesh import DeviceMesh

    from placement.runtime.lengths import Lengths
    from placement.runtime.simulated import Simulated
    from placement.runtime.slices import Sliced


class Program(Module):
    """The root of an emitted program. Subclasses state their interface as class attributes.

    ``axes``: size by axis name. ``groups``: axes that do things together, by the name of the group. ``inputs``: by
    dotted name (dims, cut), (dims, cut, kind) or (dims, cut, kind, gradient), dims being one-device sizes, names of
    dynamic dims or None, kind one of int, float, bool, complex, gradient whether one may be asked for. ``outputs``:
    None for replicated, "P" for a term per rank, or a cut; of several axes by axis name. ``lengths``: by output and
    dim, the size that is returned where ``forward`` gives more. ``divides``: a number that each named dim is a multiple
    of inside; ``uneven``: how one that is not is padded in a call, or why it is refused. ``requires``: what the model's
    branches took for granted of dynamic dims, as Python. ``training_only``: lines of the model that make eval mode
    another program, '' if there are none; this one then refuses ``eval()``. ``gathers``: whether parameters are used
    through ``gathered``. ``draws``: whether ops draw random numbers. ``hooks``: by axis or group, the parameters used
    through ``summed``: those whose gradients are summed together, the ones first that are used last. ``reduces``: by
    name, an axis or group and the dtype in which what is done over it by that name is summed. ``same_blocks``: whether
    ranks compare the sizes of sharded inputs at each call (one small gather), so as to refuse instead of hanging.
    """

    axes: ClassVar[Mapping[str, int]] = {}
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    reduces: ClassVar[Mapping[str, tuple[str, torch.dtype]]] = {}
    inputs: ClassVar[Mapping[str, Spec]] = {}
    outputs: ClassVar[Mapping[str, Any]] = {}
    lengths: ClassVar[Mapping[str, Mapping[int, int]]] = {}
    divides: ClassVar[Mapping[str, int]] = {}
    uneven: ClassVar[Mapping[str, Padded | str]] = {}
    hooks: ClassVar[Mapping[str, tuple[tuple[str, ...], ...]]] = {}
    requires: ClassVar[tuple[str, ...]] = ()
    training_only: ClassVar[str] = ""
    gathers: ClassVar[bool] = False
    draws: ClassVar[bool] = False
    same_blocks: ClassVar[bool] = True

    def __init__(self, /, **members: Any) -> None:
        super().__init__(**members)
        self.restore: Callable[[Any], Any] | None = None
        self._axes: dict[str, Axis] = {}
        self._groups: dict[str, Axis] = {}
        self._summing: dict[str, Axis] = {}
        self._layouts: dict[str, tuple[tuple[Axis, Cut], ...]] = {}
        self._given: dict[str, tuple[int, ...]] = {}  # by name, where zeros follow what a state dict has
        self._reducers: list[Reducer] = []
        self._guard: Guard | None = None
        self._loaded = False
        self._on_mesh = False
        self._places: dict[tuple[str, int], Placing | None] = {}  # of outputs

    # -- binding ---------------------------------------------------------------------------------

    def on(self, mesh: DeviceMesh | SimulatedMesh, reduce_dtype: torch.dtype | None = None) -> Program | Simulated:
        """Put the program on a mesh: local shapes, and each axis an attribute of every module.

        On a ``DeviceMesh`` this rank's program is returned; on a simulated one, a module that holds a copy
        per rank. ``reduce_dtype`` is the dtype that sums are done in, where ``reduces`` says no other.

        Raises:
            MeshError: an axis is missing or has another size, or the axes are in another order.
            SizeError: an axis does not divide a parameter's dim.
        """
        self._check_order(tuple(mesh.sizes) if isinstance(mesh, SimulatedMesh) else mesh.mesh_dim_names or ())
        if isinstance(mesh, SimulatedMesh):
            from placement.runtime.simulated import Simulated  # noqa: PLC0415 - it builds on this module

            return Simulated(self, mesh, reduce_dtype)
        single = {name: MeshAxis(mesh, name, reduce_dtype) for name in self.axes}
        groups = {name: MeshAxis(mesh, name, reduce_dtype, axes) for name, axes in self.groups.items()}
        return self.bound(single, groups)

    def _check_order(self, names: tuple[str, ...]) -> None:
        """Blocks of blocks, and the ranks of a group, count in mesh order: another one would permute rows."""
        own = [name for name, size in self.axes.items() if size > 1 and name in names]
        if own != [name for name in names if name in own]:
            raise MeshError(
                f"the program's axes are {', '.join(self.axes)}, outermost first; the mesh has {', '.join(names)}"
            )

    def bound(self, axes: Mapping[str, Axis], groups: Mapping[str, Axis] | None = None) -> Program:
        """Put the program on given axes and groups of axes; see ``on``."""
        for name, size in self.axes.items():
            if name not in axes:
                raise MeshError(f"the program needs an axis {name!r}; the mesh has {', '.join(axes) or 'none'}")
            if axes[name].size != size:
                raise MeshError(f"axis {name!r} has size {axes[name].size}; the program was emitted for {size}")
        self._axes = {name: axes[name] for name in self.axes}
        self._groups = dict(groups or {})
        for name, (axis, dtype) in self.reduces.items():
            if name in self._axes or name in self._groups:
                raise MeshError(f"{name!r} is an axis, and cannot be one with sums in another dtype")
            self._summing[name] = self._axis(axis).summing(dtype)
        for path, module in self.named_modules():
            if isinstance(module, Module):
                self._bind(path, module)
        for path, module in self.named_modules():
            if isinstance(module, Module):
                for name, tie in module._tied.items():
                    module.register_parameter(name, self._resolved(tie))
                    self._layouts[_dotted(path, name)] = self._layouts.get(tie.name, ())
                    if tie.name in self._given:
                        self._given[_dotted(path, name)] = self._given[tie.name]
        self._check_outputs()
        self._on_mesh = all(isinstance(axis, MeshAxis) for axis in self._axes.values())
        self._places = {}
        self._reducers = [Reducer(self._axis(name), buckets, self) for name, buckets in self.hooks.items()]
        for reducer in self._reducers:
            for name in (name for bucket in reducer.buckets for name in bucket):
                self.tensor(name)  # a hook that names nothing fails here, not in training
        inputs = {name: (spec[0], self.layout(spec[1]), *spec[2:]) for name, spec in self.inputs.items()}
        signature = inspect.signature(self.forward)
        self._guard = Guard(
            inputs, self.divides, signature, self.requires, self.axes, self.uneven, same_blocks=self.same_blocks
        )
        return self

    def _bind(self, path: str, module: Module) -> None:
        module._aliases = self._aliases
        module._path, module._random, module._draws = path, self._random, self.draws
        for name, axis in {**self._axes, **self._groups, **self._summing}.items():
            if hasattr(module, name):
                raise MeshError(f"axis {name!r} cannot have the name of a member of {path or 'the root'}")
            setattr(module, name, axis)
        for name, declared in module._declared.items():
            full = _dotted(path, name)
            layout = self._layouts[full] = self.layout(declared.cut)
            shape = declared.shape
            if declared.given is not None:
                self._given[full] = declared.given
            for axis, cut in layout:
                shape = local_shape(shape, cut, axis.size, f"{full} on axis {axis.name!r}")
            module._register(name, declared, shape)

    def _resolved(self, tie: Tied) -> nn.Parameter:
        parameter = self.tensor(tie.name)
        if parameter is None:
            raise StateError(f"tied to {tie.name}, which owns no data: name the parameter that does")
        return parameter

    def _axis(self, name: str) -> Axis:
        for known in (self._groups, self._summing):
            if name in known:
                return known[name]
        if name not in self._axes:
            raise MeshError(f"no axis {name!r}: the program has {', '.join(self._axes) or 'none'}")
        return self._axes[name]

    def tensor(self, name: str) -> Any:
        """The parameter or buffer ``name`` as it is now, be it a Parameter or what a wrapper put in its place."""
        path, _, attribute = name.rpartition(".")
        return getattr(self.get_submodule(path), attribute)

    @property
    def mesh_axes(self) -> Mapping[str, Axis]:
        """The axes by name, once on a mesh."""
        return self._axes

    @property
    def device(self) -> torch.device:
        """Where tensors are loaded to."""
        return next((axis.device for axis in self._axes.values()), torch.device("cpu"))

    @property
    def guard(self) -> Guard:
        """What each call is held to."""
        if self._guard is None:
            raise MeshError("the program is on no mesh: call .on(mesh) first")
        return self._guard

    def layout(self, cut: Any) -> tuple[tuple[Axis, Any], ...]:
        """Where a value is cut (or partial), as pairs (axis, cut), outermost first."""
        if cut is None:
            return ()
        if isinstance(cut, dict):
            return tuple((self._axes[name], how) for name, how in cut.items() if how is not None)
        if len(self._axes) != 1:
            raise MeshError(f"{cut} without an axis, in a program of axes {', '.join(self._axes) or 'none'}")
        return tuple((axis, cut) for axis in self._axes.values())

    def _check_outputs(self) -> None:
        for name, spec in self.outputs.items():
            for axis, cut in self.layout(spec):
                if isinstance(axis, MeshAxis) and isinstance(cut, Cut) and cut.parts != 1:
                    raise SizeError(f"output {name!r} on axis {axis.name!r}: no DTensor has the layout {cut}")
            cuts = Counter(cut.dim for axis, cut in self.layout(spec) if isinstance(axis, MeshAxis) and cut != "P")
            if any(cuts[dim] > 1 for dim in self.lengths.get(name, ())):
                raise SizeError(f"output {name!r}: no DTensor has blocks on several axes that do not divide its size")

    def own_inputs(self, **whole: Any) -> dict[str, Any]:
        """Of one-device inputs by name what this rank's call takes: its blocks, in the order that the spec says.

        Whatever is no tensor, or is cut by no ``input`` line, is given back as it is.

        Raises:
            MeshError: the program is on no mesh.
            SizeError: an axis does not divide a dim.
        """
        layout = self.guard.layout

        def own(name: str, tensors: list[Tensor]) -> Tensor:
            (x,) = tensors
            for axis, cut in layout(name) if name in self.inputs else ():
                x = block(x, cut, axis.size, axis.rank, f"input {name!r} on axis {axis.name!r}")
            return x

        return mapped(own, [whole])

    # -- calling ---------------------------------------------------------------------------------

    @itself_eager
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``forward`` under the guards, with reductions shared by all parameters."""
        args, kwargs, lengths = self._open(args, kwargs)
        try:
            if self.gathers:
                with gathered_again():
                    result = super().__call__(*args, **kwargs)
            else:
                result = super().__call__(*args, **kwargs)
        finally:
            if self.draws:
                self._random.end()
            self._aliases.clear()
        return self._finished(result, lengths)

    @eager
    def _open(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Lengths]:
        """Refuse what the program was not made for; alias the parameters that share a reduction.

        Returns the arguments as ``forward`` needs them, and the lengths that are others inside.
        """
        guard = self.guard
        self.refuse_meta()
        arguments = guard.arguments(args, kwargs)
        lengths = guard.check(arguments, local=True)
        if lengths:
            bound = guard.signature.bind_partial()
            bound.arguments.update(guard.lengthened(arguments, lengths))
            args, kwargs = bound.args, bound.kwargs
        for reducer in self._reducers:
            reducer.open(self._aliases)
        if self.draws:
            self._random.begin(training=self.training, lengths=lengths)
        return args, kwargs, lengths

    def train(self, mode: bool = True) -> Program:
        """As torch's. Raises StateError for eval mode where the model does something else in it."""
        if not mode and self.training_only:
            text = f"the model does something else in eval mode ({self.training_only}): compile computes what it trains"
            raise StateError(text)
        super().train(mode)
        return self

    def refuse_meta(self) -> None:
        """Raise where a parameter or buffer has no data yet."""
        if self._loaded:
            return
        if missing := self.meta_tensors():
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise StateError(f"no data in {', '.join(missing[:3])}{more}: load_full_state_dict loads it")
        self._loaded = True

    @eager
    def _finished(self, result: Any, lengths: Lengths) -> Any:
        """The result as a caller on a DeviceMesh gets it: sharded and partial outputs are DTensors."""
        if not self._on_mesh:
            return result

        def wrapped(name: str, tensors: list[Tensor]) -> Tensor:
            (x,) = tensors
            more = spare(name, self.uneven, lengths) if lengths else {}
            x, whole = self._own_length(name, x, more) if more or name in self.lengths else (x, {})
            if (name, x.ndim) not in self._places:
                self._places[name, x.ndim] = self._placed(name, x.ndim)
            placed = self._places[name, x.ndim]
            return x if placed is None else placed(x, **whole)

        result = mapped(wrapped, [result])
        return result if self.restore is None else self.restore(result)

    def _placed(self, name: str, ndim: int) -> Placing | None:
        """Where an output of so many dims lies, None where every rank has all of it."""
        layout = {axis.name: how for axis, how in self.layout(self.outputs.get(name))}
        places: dict[str, Placement] = {
            axis: Partial() if layout[axis] == "P" else Shard(layout[axis].dim % ndim)
            for axis in self._axes  # in mesh order, as a DTensor has them
            if axis in layout
        }
        return Placing(_submesh(self._axes, places), tuple(places.values())) if places else None

    def _own_length(self, name: str, local: Tensor, more: Mapping[int, int]) -> tuple[Tensor, dict[str, Any]]:
        """An output without what its dims are padded with, and the whole's shape and stride as a DTensor has them."""
        cuts = [(axis, cut) for axis, cut in self.layout(self.outputs[name]) if cut != "P"]
        whole = whole_shape(local.shape, cuts)
        own = {**self.lengths.get(name, {}), **{dim: whole[dim] - extra for dim, extra in more.items()}}
        for dim, size in own.items():
            cutting = [axis for axis, cut in cuts if cut.dim == dim]
            if len(cutting) > 1 or any(-(-size // axis.size) != local.shape[dim] for axis in cutting):
                raise SizeError(f"output {name!r}: no DTensor has dim {dim} of {size} in blocks of {local.shape[dim]}")
            before = sum(axis.rank * local.shape[dim] for axis, cut in cuts if cut.dim == dim)  # of one axis at most
            whole[dim], local = size, local.narrow(dim, 0, min(max(size - before, 0), local.shape[dim]))
        return local, {"shape": torch.Size(whole), "stride": torch.empty(whole, device="meta").stride()}

    # -- gradients and state ---------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Gradient accumulation: reductions of backwards in here wait for the next backward outside."""
        before = [reducer.deferred for reducer in self._reducers]
        for reducer in self._reducers:
            reducer.deferred = True
        try:
            yield
        finally:
            for reducer, deferred in zip(self._reducers, before, strict=True):
                reducer.deferred = deferred

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; a parameter's ``main_grad`` is zeroed in place."""
        super().zero_grad(set_to_none)
        zero_main_grads(self)

    def waiting(self) -> list[str]:
        """Parameters whose gradients lack what backwards under ``no_sync`` contributed."""
        return [name for reducer in self._reducers for name in reducer.waiting()]

    def layout_of(self, name: str) -> tuple[tuple[Axis, Cut], ...]:
        """Where the parameter or buffer ``name`` is cut, outermost axis first."""
        return self._layouts.get(name, ())

    def full_shape(self, name: str, local: Tensor) -> tuple[int, ...]:
        """The shape that a one-device state dict has for the parameter or buffer ``name``, which is ``local`` here."""
        if name in self._given:
            return self._given[name]
        return tuple(whole_shape(local.shape, self.layout_of(name)))

    def meta_tensors(self) -> list[str]:
        """Names of parameters and buffers that have no data yet."""
        return [name for name, tensor in state.tensors(self).items() if tensor.is_meta]

    def full_state_dict(self) -> dict[str, Tensor]:
        """Copies of the one-device parameters and persistent buffers, by original name, on every rank."""
        return state.full_state_dict(self)

    def full_gradients(self) -> dict[str, Tensor | None]:
        """Copies of the one-device gradients by parameter name, on every rank; None where there is none.

        Raises:
            StateError: backwards under ``no_sync`` wait for one outside.
        """
        return state.full_gradients(self)

    def load_full_state_dict(self, given: Mapping[str, Tensor | Sliced], *, strict: bool = True) -> None:
        """Load one-device tensors by original name; each rank keeps its blocks.

        What is read piece by piece, as from a file, need only have a ``shape`` and take slices: no rank reads more
        of it than its own blocks.
        Parameters without data get some, on the axis's device; others are written in place. One name of a tied
        group is enough. Buffers outside the state dict are loaded if named.

        Raises:
            StateError: a name is missing or unknown (if ``strict``), or a shape differs. Nothing is changed.
        """
        state.load_full_state_dict(self, given, strict=strict)


def _dotted(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _submesh(axes: Mapping[str, Axis], names: Iterable[str]) -> DeviceMesh:
    """The mesh of the named axes, in their order."""
    chosen = [axis for axis in (axes[name] for name in names) if isinstance(axis, MeshAxis)]
    return chosen[0].mesh if len(chosen) == 1 else chosen[0].whole[tuple(axis.name for axis in chosen)]


def clone(program: Program) -> Program:
    """A copy that has not been put on a mesh."""
    return copy.deepcopy(program)
