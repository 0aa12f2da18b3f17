"""What is seen of a model while it is traced: layers that do the same thing again, which are traced once.

Tracing costs milliseconds an op, and a decoder is one layer many times over. While a model is traced, the
first call of a layer is recorded: which attributes of its modules it read, and what came in and went out. A
later call, of the same layer or of another of its class, is not traced if all of that is alike: the program
then holds one ``mark`` op in its place, for which the reader puts the recorded nodes, with the other layer's
parameters. Where anything that was read differs, the index of the layer say, the call is traced as it is.
"""

from __future__ import annotations

import enum
import functools
import inspect
import types
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from placement.graph._torch import forward_hooks, size_key, storage_key
from placement.graph.ir import Call
from placement.graph.modes import settled

_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout, enum.Enum)
_TENSORS = ("_parameters", "_buffers")
_MACHINERY = frozenset(vars(torch.nn.Module())) - {"training"}  # what torch itself keeps on every module


@torch.library.custom_op("placement::mark", mutates_args=())
def _mark(tensors: Sequence[torch.Tensor], like: Sequence[torch.Tensor], number: int, kind: str) -> list[torch.Tensor]:
    """Stands in a traced program where a recorded call begins (``enter``), ends (``leave``) or recurs (``again``).

    Its results have the metadata of ``like``. It never runs on data.
    """
    del tensors, like
    raise NotImplementedError(f"the mark '{kind}' {number} of a trace was run")


@_mark.register_fake
def _(_: Sequence[torch.Tensor], like: Sequence[torch.Tensor], __: int, ___: str) -> list[torch.Tensor]:
    return [torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device) for t in like]


def _no_backward(*_: Any) -> None:
    raise NotImplementedError("the backward of a mark of a trace was run")


_mark.register_autograd(_no_backward)

MARK = torch.ops.placement.mark.default
"""``mark(tensors, like, number, kind)``: ``number`` counts recordings, for ``again`` it counts copies."""


class RepeatError(Exception):
    """A copy would be a false account of the program: it is to be traced without copies."""


@dataclass(slots=True, eq=False)
class Recording:
    """A call that was traced. ``key`` is None where no later call can be held against it."""

    number: int
    module: torch.nn.Module
    call: Call
    key: list[Any] | None = None
    reads: set[tuple[str, str]] = field(default_factory=set)  # (path below the module, attribute)
    outputs: tuple[Any, ...] = ()  # leaves of what it returned
    spec: Any = None
    looks_out: bool = False  # it read another module of the model


@dataclass(frozen=True, slots=True, eq=False)
class Again:
    """A call that is a copy of a recorded one."""

    recording: Recording
    call: Call


class Repeats:
    """The recordings and copies of one trace of ``model``, numbered as the marks in the program are."""

    def __init__(self, model: torch.nn.Module, *, copies: bool = True) -> None:
        modules = dict(model.named_modules()) if copies else {}
        self._paths = {_identity(module): path for path, module in modules.items()}
        self._states = {_identity(module): _state(module) for module in modules.values()}
        self._candidates = {_identity(module): module for module in _candidates(modules.values())}
        self._trees = {i: list(m.named_modules(remove_duplicate=False)) for i, m in self._candidates.items()}
        self._kinds = {kind: _class_state(kind) for kind in {type(module) for module in modules.values()}}
        self._same: dict[tuple[int, int], bool] = {}
        self.restart()

    def restart(self) -> None:
        """Forget what was seen: the model is being traced from its start."""
        self.recordings: list[Recording] = []
        self.copies: list[Again] = []
        self.traced: dict[str, int] = {}  # how often each candidate was traced, by path
        self.asked: set[tuple[str, int]] = set()  # lines of models' own that asked whether a module is in training
        self._calls: dict[int, int] = {}
        self._copied: set[int] = set()
        self._running: set[int] = set()
        self._open: list[tuple[Recording, Mapping[int, str]]] = []
        self.failed = False

    @property
    def paths(self) -> tuple[str, ...]:
        """The modules whose calls may be copied."""
        return tuple(self._paths[i] for i in self._candidates)

    @contextmanager
    def watching(self) -> Generator[None]:
        """While this is entered, calls are recorded and copied. The classes are left as they were."""
        classes = dict.fromkeys(type(m) for m in self._candidates.values())

        def read(module: torch.nn.Module, name: str) -> Any:
            if name in ("training", "__dict__"):
                self._ask()
            if self._open:
                self._note(module, name)
            return object.__getattribute__(module, name)

        before = vars(torch.nn.Module).get("__getattribute__")
        own = {kind: vars(kind).get("forward") for kind in classes}
        wrapped = {kind: self._wrapped(kind.forward) for kind in classes}
        torch.nn.Module.__getattribute__ = read  # type: ignore[method-assign]
        for kind, forward in wrapped.items():
            kind.forward = forward
        try:
            yield
        finally:
            if before is None:
                del torch.nn.Module.__getattribute__
            else:
                torch.nn.Module.__getattribute__ = before  # type: ignore[method-assign]
            for kind, forward in own.items():
                if forward is None:
                    del kind.forward
                else:
                    kind.forward = forward

    def _ask(self) -> None:
        frame = inspect.currentframe()
        for _ in range(2):  # this method and the hook that calls it
            frame = frame.f_back if frame else None
        own = frame and not frame.f_globals.get("__name__", "").startswith(("torch.", "placement."))
        if frame and own and not settled(frame):
            self.asked.add((frame.f_code.co_filename, frame.f_lineno))

    def _note(self, module: torch.nn.Module, name: str) -> None:
        if name in _TENSORS or name == "_modules":
            return  # these are compared whatever was read
        if name == "__dict__" and _asked_by_torch():
            return
        identity = _identity(module)
        for recording, inside in self._open:
            path = inside.get(identity)
            if path is not None:
                recording.reads.add((path, name))
            elif identity in self._states and not _asked_by_torch("torch."):
                recording.looks_out = True

    # -- one call ---------------------------------------------------------------------------------

    def _wrapped(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def wrapper(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            identity = _identity(module)
            if identity not in self._candidates or identity in self._running:  # another's, or reached by super()
                return forward(module, *args, **kwargs)
            self._running.add(identity)
            try:
                return self._call(self._candidates[identity], functools.partial(forward, module), args, kwargs)
            finally:
                self._running.discard(identity)

        return wrapper

    def _call(
        self, module: torch.nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        identity = _identity(module)
        index = self._calls.get(identity, 0)
        self._calls[identity] = index + 1
        call = Call(self._paths[identity], index)
        key = _key(leaves, spec)
        for recording in self.recordings:
            if key is not None and recording.key == key and self._alike(recording, module):
                return self._again(recording, call, module, leaves)
        if identity in self._copied:
            self.failed = True  # export counts the calls below it that it sees, and has not seen the copies
        recording = Recording(len(self.recordings), module, call)
        self.recordings.append(recording)
        self.traced[call.path] = self.traced.get(call.path, 0) + 1
        return self._record(recording, forward, leaves, spec, key)

    def _record(
        self, recording: Recording, forward: Callable[..., Any], leaves: list[Any], spec: Any, key: list[Any] | None
    ) -> Any:
        inside = {_identity(m): path for path, m in reversed(self._trees[_identity(recording.module)])}
        given = _marked(leaves, recording.number, "enter")
        args, kwargs = pytree.tree_unflatten(given, spec)
        self._open.append((recording, inside))
        try:
            output = forward(*args, **kwargs)
        finally:
            self._open.pop()
        outputs, recording.spec = pytree.tree_flatten(output)
        recording.outputs = tuple(outputs)
        told = all(isinstance(leaf, (torch.Tensor, *_PLAIN)) for leaf in outputs)
        kept = not recording.looks_out and self._kept(recording.module)
        if told and kept and not _hooked(recording.module) and _key(given, spec) == key:
            recording.key = key
        return pytree.tree_unflatten(_marked(outputs, recording.number, "leave"), recording.spec)

    def _kept(self, module: torch.nn.Module) -> bool:
        """Whether the module, those below and what their classes share are as they were before the trace."""
        below = list(module.modules())
        shared = all(kind in self._kinds and _equal(self._kinds[kind], _class_state(kind)) for kind in map(type, below))
        return shared and not any(_changed(self._states[_identity(m)], m) for m in below)

    def _again(self, recording: Recording, call: Call, module: torch.nn.Module, leaves: list[Any]) -> Any:
        number = len(self.copies)
        self.copies.append(Again(recording, call))
        self._copied.update(map(_identity, module.modules()))
        for outer, inside in self._open:  # what the copy would have read
            prefix = inside.get(_identity(module))
            if prefix is not None:
                outer.reads.update((".".join(filter(None, (prefix, path))), name) for path, name in recording.reads)
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        like = [leaf for leaf in recording.outputs if isinstance(leaf, torch.Tensor)]
        made = iter(_mark(given, like, number, "again"))
        outputs = [_as(leaf, next(made)) if isinstance(leaf, torch.Tensor) else leaf for leaf in recording.outputs]
        return pytree.tree_unflatten(outputs, recording.spec)

    # -- comparison -------------------------------------------------------------------------------

    def _alike(self, recording: Recording, module: torch.nn.Module) -> bool:
        """Whether ``module`` would do what the recorded one did, on alike arguments."""
        pair = _identity(recording.module), _identity(module)
        if not self._kept(module):
            return False
        if pair[0] == pair[1]:
            return True
        if pair not in self._same:
            self._same[pair] = _same_structure(self._trees[pair[0]], self._trees[pair[1]])
        if not self._same[pair] or _hooked(module):
            return False
        left, right = dict(self._trees[pair[0]]), dict(self._trees[pair[1]])
        if any(_in_slot(type(right[path]), name) for path, name in recording.reads):
            return False
        return all(
            _equal_at(self._states[_identity(left[path])], self._states[_identity(right[path])], name)
            for path, name in recording.reads
        )


def _identity(module: torch.nn.Module) -> int:
    """The same for a module and for what stands in for it while a model with shared modules is traced."""
    return id(_attributes(module))


def _attributes(module: torch.nn.Module) -> dict[str, Any]:
    """``vars(module)``, which does not count as read."""
    return object.__getattribute__(module, "__dict__")


def _asked_by_torch(where: str = torch.nn.Module.__module__) -> bool:
    """Whether the attribute being read is read by torch; left alone, by Module's own look-up of attributes."""
    frame = inspect.currentframe()
    for _ in range(3):  # this function, the note and the hook that calls it
        frame = frame.f_back if frame else None
    return frame is not None and frame.f_globals.get("__name__", "").startswith(where)


def _candidates(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Modules with children: one of several alike siblings, or an element of a list (which may be called twice)."""
    found: dict[int, torch.nn.Module] = {}
    for module in modules:
        kinds: dict[type, list[torch.nn.Module]] = {}
        for child in module.children():
            if next(child.children(), None) is not None and "forward" not in vars(child):
                kinds.setdefault(type(child), []).append(child)
        for alike in kinds.values():
            if len(alike) > 1 or isinstance(module, torch.nn.ModuleList):
                found.update((id(child), child) for child in alike)
    return list(found.values())


def _state(module: torch.nn.Module) -> dict[str, Any]:
    """The module's attributes as they are now."""
    return {k: _now(v) for k, v in _attributes(module).items() if k not in (*_TENSORS, "_modules")}


def _class_state(kind: type) -> dict[tuple[type, str], Any]:
    """Numbers, texts and containers that the class holds for all its modules."""
    bases = kind.__mro__[: kind.__mro__.index(torch.nn.Module)]
    held = {(base, name): value for base in bases for name, value in vars(base).items()}
    return {k: _now(v) for k, v in held.items() if isinstance(v, (list, set, dict, *_PLAIN))}


@functools.cache
def _in_slot(kind: type, name: str) -> bool:
    """Whether a module of the class keeps the attribute outside of its dict."""
    return isinstance(inspect.getattr_static(kind, name, None), types.MemberDescriptorType)


def _now(value: Any) -> Any:
    """What can be held against a later state of ``value``: containers are copied, objects with their attributes."""
    if type(value) in (list, set):
        return type(value)(value)
    if isinstance(value, dict):
        return dict(value)
    whole = callable(value) or isinstance(value, (torch.Tensor, types.ModuleType, *_PLAIN))
    return value if whole or not hasattr(value, "__dict__") else (value, dict(vars(value)))


def _changed(before: Mapping[str, Any], module: torch.nn.Module) -> bool:
    after = _state(module)
    names = (before.keys() | after.keys()) - _MACHINERY - {"forward"}
    return not all(_equal_at(before, after, name) for name in names)


def _hooked(module: torch.nn.Module) -> bool:
    """Whether a call of a module below would run a hook that is not torch's own; a copy would not run it."""
    below = (m for m in module.modules() if m is not module)
    return not all(getattr(hook, "__module__", "").startswith("torch.") for m in below for hook in forward_hooks(m))


def _equal_at(left: Mapping[str, Any], right: Mapping[str, Any], name: str) -> bool:
    if name == "__dict__":
        return False  # all attributes were read
    if name not in left or name not in right:
        return (name in left) == (name in right)  # an attribute of the class, which they share
    return _equal(left[name], right[name])


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.nn.Module | torch.nn.Parameter):
        return False  # kept beside the tree of modules: which of its places it has cannot be told
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, _PLAIN):
        return left == right
    if isinstance(left, dict):
        return list(left) == list(right) and all(_equal(left[k], right[k]) for k in left)
    if isinstance(left, functools.partial):
        return left.func is right.func and _equal((left.args, left.keywords), (right.args, right.keywords))
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(_equal, left, right))
    return isinstance(left, set | frozenset) and left == right


def _same_structure(left: list[tuple[str, torch.nn.Module]], right: list[tuple[str, torch.nn.Module]]) -> bool:
    """Whether two trees have the same modules and tensors at the same places, and no module in common."""
    ours, theirs = [m for _, m in left], [m for _, m in right]
    if [(path, type(m)) for path, m in left] != [(path, type(m)) for path, m in right]:
        return False
    if _pattern(ours) != _pattern(theirs) or set(map(id, ours)) & set(map(id, theirs)):
        return False
    return _tensors(ours) == _tensors(theirs)


def _tensors(modules: Iterable[torch.nn.Module]) -> list[Any]:
    """Names and metadata of all parameters and buffers, and which of them are one."""
    named = [(table, name, tensor) for m in modules for table in _TENSORS for name, tensor in getattr(m, table).items()]
    metadata = [
        (table, name, None if t is None else (type(t), t.shape, t.stride(), t.dtype, t.device, t.requires_grad))
        for table, name, t in named
    ]
    return [metadata, _pattern([t for *_, t in named if t is not None])]


def _pattern(things: Iterable[Any]) -> list[int]:
    """For each thing the position at which it stands first."""
    first: dict[int, int] = {}
    return [first.setdefault(id(thing), i) for i, thing in enumerate(things)]


def _key(leaves: Sequence[Any], spec: Any) -> list[Any] | None:
    """What the trace of a call may depend on besides its module; None where that cannot be told."""
    if not all(isinstance(leaf, (torch.Tensor, torch.SymInt, *_PLAIN)) for leaf in leaves):
        return None
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    shown = [
        (tuple(map(size_key, t.size())), tuple(map(size_key, t.stride())), t.dtype, t.device, t.requires_grad)
        for t in tensors
    ]
    others = [
        None if isinstance(v, torch.Tensor) else size_key(v) if isinstance(v, torch.SymInt) else (type(v), v)
        for v in leaves
    ]
    first: dict[Any, int] = {}
    storages = [first.setdefault(storage_key(t), i) for i, t in enumerate(tensors)]
    modes = [torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")]
    return [spec, shown, others, _pattern(tensors), storages, modes]


def _marked(leaves: Sequence[Any], number: int, kind: str) -> list[Any]:
    """The leaves with every tensor passed through a mark."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    made = dict(zip(_pattern(tensors), _mark(tensors, tensors, number, kind), strict=True)) if tensors else {}
    positions = iter(_pattern(tensors))
    return [_as(leaf, made[next(positions)]) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _as(tensor: torch.Tensor, marked: torch.Tensor) -> torch.Tensor:
    """The mark's result with the flag of what it stands for: autograd thinks that it needs a gradient."""
    return marked.detach() if marked.requires_grad and not tensor.requires_grad else marked
