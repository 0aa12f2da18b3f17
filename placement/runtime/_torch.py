"""Every private torch name that the runtime leans on, so that a torch update breaks one file."""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.modules.module import _has_any_global_hook
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from torch.distributed.device_mesh import DeviceMesh


P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """``torch.compiler.disable`` with its argument's type: what torch.compile leaves as it is."""
    return torch.compiler.disable(function)  # pyright: ignore[reportReturnType]


def hooked(module: torch.nn.Module) -> bool:
    """Whether calling ``module`` calls hooks, its own or those of all modules."""
    own = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(own or _has_any_global_hook())


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """What autocast computes products of ``x`` in; None outside of it."""
    if not torch._C._is_any_autocast_enabled():  # asked at each call: this is the cheapest way
        return None
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def parameter_at(module: torch.nn.Module, path: Sequence[str]) -> torch.Tensor | None:
    """The parameter at ``path`` under ``module``, in few steps; None where a module has its own names for members."""
    try:
        for name in path[:-1]:
            module = module._modules[name]  # pyright: ignore[reportAssignmentType] - None has no _modules
        return module._parameters[path[-1]]
    except (AttributeError, KeyError):
        return None


def version(x: torch.Tensor) -> int:
    """How often ``x`` has been written in place."""
    return x._version


def demand(condition: torch.Tensor, message: str) -> None:
    """Fail where the scalar ``condition`` is false: at once on a CPU, else when the device comes to it."""
    torch._assert_async(condition, message)


def in_backward() -> bool:
    """Whether this thread runs a node of a backward pass (recomputation of a forward included)."""
    return torch._C._current_graph_task_id() != -1


def accumulates(node: Any) -> bool:
    """Whether the running backward pass adds what ``node`` gets to a leaf's ``.grad``.

    It does not where the node is no leaf's, under ``torch.autograd.grad``, and for leaves left out of
    ``backward(inputs=...)``.
    """
    if not hasattr(node, "variable"):
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # how torch says that this is ``torch.autograd.grad``
        return False


def after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the running backward pass has accumulated all its gradients."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _options(kind: Any, op: dist.ReduceOp.RedOpType | None = None) -> dict[bool, Any]:
    """What a group is told of a collective, by whether it is waited for later."""
    made: dict[bool, Any] = {}
    for later in (False, True):
        made[later] = kind()
        made[later].asyncOp = later
        if op is not None:
            made[later].reduceOp = op
    return made


class Group:
    """A process group's own methods: those of torch.distributed check at each call what is known here.

    All give what is to be waited for, also where it is not for ``later``: some transports return before they are done.
    """

    _reducing: ClassVar = {
        "sum": _options(distributed_c10d.AllreduceOptions, dist.ReduceOp.SUM),
        "max": _options(distributed_c10d.AllreduceOptions, dist.ReduceOp.MAX),
    }
    _gathering: ClassVar = _options(distributed_c10d.AllgatherOptions)
    _scattering: ClassVar = _options(distributed_c10d.ReduceScatterOptions, dist.ReduceOp.SUM)
    _exchanging: ClassVar = _options(distributed_c10d.AllToAllOptions)

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def all_reduce(self, x: torch.Tensor, op: str, *, later: bool) -> dist.Work:
        """The ranks' sum or maximum, in place."""
        return self.group.allreduce([x], self._reducing[op][later])

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, *, later: bool) -> dist.Work:
        """The ranks' tensors one after the other, in ``out``."""
        return self.group.all_gather_single(out, x, self._gathering[later])

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, *, later: bool) -> dist.Work:
        """The sum of the own one of n blocks of ``x``, in ``out``."""
        return self.group.reduce_scatter_single(out, x, self._scattering[later])

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor, *, later: bool) -> dist.Work:
        """The own one of the n blocks that each rank has, in ``out``."""
        return self.group.all_to_all_single(out, x, [], [], self._exchanging[later])


@dataclass(frozen=True, slots=True)
class ThreadState:
    """What torch keeps per thread and a rank's thread must share with the caller's.

    Grad and inference mode, autocast, saved-tensor hooks, function and dispatch modes, the
    accelerator's stream.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    cache: bool
    saved: tuple[Callable[..., Any], Callable[..., Any]] | None
    modes: tuple[Any, ...]
    stream: torch.Stream | None

    @classmethod
    def capture(cls) -> ThreadState:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        devices = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple((d, torch.get_autocast_dtype(d)) for d in devices if torch.is_autocast_enabled(d)),
            cache=torch.is_autocast_cache_enabled(),
            saved=torch._C._autograd._top_saved_tensors_default_hooks(False),
            modes=(*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()),
            stream=None if accelerator is None else torch.accelerator.current_stream(),
        )

    @contextmanager
    def applied(self) -> Generator[None]:
        """This thread in the captured thread's state."""
        with ExitStack() as stack:
            if self.stream is not None:
                torch.accelerator.set_stream(self.stream)
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype, cache_enabled=self.cache))
            if self.saved is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.saved))
            for mode in self.modes:
                stack.enter_context(mode)
            yield


def flattened(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    """Several axes of a mesh as one, ranks in row-major order: made once for a mesh, by all of its ranks."""
    sub = mesh if axes == mesh.mesh_dim_names else mesh[axes]
    return sub._flatten("_".join(axes))
