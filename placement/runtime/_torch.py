"""Every private torch name that the runtime leans on, so that a torch update breaks one file."""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._api import _FromTorchTensor
from torch.nn.modules.module import _has_any_global_hook
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """``torch.compiler.disable`` with its argument's type: what torch.compile leaves as it is."""
    return torch.compiler.disable(function)  # pyright: ignore[reportReturnType]


def itself_eager(function: Callable[P, R]) -> Callable[P, R]:
    """What torch.compile runs as it is, while it compiles what is called there: the rest is one graph with no break."""
    return torch.compiler.disable(function, recursive=False)  # pyright: ignore[reportReturnType]


def constant(function: Callable[P, R]) -> Callable[P, R]:
    """What torch.compile calls once, while it compiles: a function of constants."""
    return torch.compiler.assume_constant_result(function)


def applied(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply(*args)``, without what that prepares for transforms of functorch where none is active."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # pyright: ignore[reportCallIssue]


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


def members_to(
    module: torch.nn.Module, path: str, met: dict[tuple[int, str], tuple[dict[str, Any], str, torch.nn.Module]]
) -> dict[str, Any] | None:
    """The parameters of the module at ``path`` under ``module``; None where one has its own names for its members.

    ``met`` gets the members that lead there, as (the module's members, the name, the one of this name).
    """
    for name in path.split(".") if path else ():
        members: Any = module._modules
        if members.get(name) is None:
            return None
        module = members[name]
        met[id(members), name] = members, name, module
    return module._parameters


def own_parameter(module: torch.nn.Module, name: str) -> torch.Tensor | None:
    """``module``'s parameter ``name``, in one step; None where it is no parameter of its own."""
    return module._parameters.get(name)


def place_here(made: torch.Tensor) -> None:
    """Let the function that ``made`` is of run in a backward pass as if the forward had called it now."""
    made.grad_fn._set_sequence_nr(torch.autograd._get_sequence_nr())  # pyright: ignore[reportOptionalMemberAccess]


def root_mean_square(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``F.rms_norm`` over the last dim, and what it multiplies each row with, in float32 at least."""
    return torch._fused_rms_norm(x, (x.shape[-1],), weight, eps)


def version(x: torch.Tensor) -> int:
    """How often ``x`` has been written in place."""
    return x._version


def demand(condition: torch.Tensor, message: str) -> None:
    """Fail where the scalar ``condition`` is false: at once on a CPU, else when the device comes to it."""
    torch._assert_async(condition, message)


def in_backward() -> bool:
    """Whether this thread runs a node of a backward pass (recomputation of a forward included)."""
    return torch._C._current_graph_task_id() != -1


def recomputing() -> bool:
    """As ``in_backward``, also where the rank's thread was started by a node of a backward pass."""
    return in_backward() or _started_in_backward.get()


_started_in_backward: ContextVar[bool] = ContextVar("_started_in_backward", default=False)


def backward_pass() -> int:
    """A number for the backward pass that this thread runs a node of, -1 where it runs none."""
    return torch._C._current_graph_task_id()


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


def add_each(into: list[torch.Tensor], added: list[torch.Tensor]) -> None:
    """Add tensors to others in place, in one call."""
    torch._foreach_add_(into, added)


def zero_each(tensors: list[torch.Tensor]) -> None:
    """Zero tensors in place, in one call."""
    torch._foreach_zero_(tensors)


def watched(leaf: torch.Tensor) -> bool:
    """Whether somebody is called with the gradient of ``leaf``."""
    return bool(leaf._backward_hooks)


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

    def shift(self, out: torch.Tensor, x: torch.Tensor) -> Waited:
        """``x`` to the next rank, and into ``out`` what the one before has: in the background."""
        rank, n = self.group.rank(), self.group.size()
        both = (
            dist.P2POp(dist.isend, x, group=self.group, group_peer=(rank + 1) % n),
            dist.P2POp(dist.irecv, out, group=self.group, group_peer=(rank - 1) % n),
        )
        return _Works(dist.batch_isend_irecv(list(both)))


class Waited(Protocol):
    """What has been started and can be waited for."""

    def wait(self) -> object:
        """Return when it is done, or when what follows on the device will find it done."""


class _Works(tuple["dist.Work", ...]):
    """Several as one."""

    __slots__ = ()

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self:
            work.wait()


class TracedGroup:
    """A process group as a graph of torch.compile knows it, by name. Results are for ``arrived``."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.name = group.group_name
        self.size = group.size()

    def all_reduce(self, x: torch.Tensor, op: str) -> torch.Tensor:
        """The ranks' sum or maximum."""
        return torch.ops._c10d_functional.all_reduce(x, op, self.name)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors one after the other."""
        return torch.ops._c10d_functional.all_gather_into_tensor(x, self.size, self.name)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the own one of n blocks of ``x``."""
        return torch.ops._c10d_functional.reduce_scatter_tensor(x, "sum", self.size, self.name)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """The own one of the n blocks that each rank has."""
        sizes = [x.shape[0] // self.size] * self.size
        return torch.ops._c10d_functional.all_to_all_single(x, sizes, sizes, self.name)

    @staticmethod
    def arrived(x: torch.Tensor) -> torch.Tensor:
        """A result, once it is whole: to be used in its place."""
        return torch.ops._c10d_functional.wait_tensor(x)


@dataclass(frozen=True, slots=True)
class ThreadState:
    """What torch keeps per thread and a rank's thread must share with the caller's.

    Grad and inference mode, autocast, saved-tensor hooks, function and dispatch modes, the
    accelerator's stream, and whether it runs a node of a backward pass.
    """

    backward: bool
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
            backward=recomputing(),
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
        _started_in_backward.set(self.backward)
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


class Placing:
    """``DTensor.from_local`` on one mesh, with what it works out of each kind of block remembered."""

    _REMEMBERED = 64

    def __init__(self, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> None:
        self.mesh, self.placements = mesh, placements
        self._specs: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self, local: torch.Tensor, shape: torch.Size | None = None, stride: tuple[int, ...] | None = None
    ) -> DTensor:
        """The tensor of which ``local`` is this rank's part; of ``shape`` and ``stride`` where blocks are not equal."""
        kind = local.shape, local.stride(), local.dtype, local.device, shape, stride
        spec = self._specs.get(kind)
        if spec is not None:
            return applied(_Placed, local, spec)
        made = DTensor.from_local(local, self.mesh, self.placements, run_check=False, shape=shape, stride=stride)
        if len(self._specs) >= self._REMEMBERED:
            self._specs.clear()
        if made.device == local.device:
            self._specs[kind] = made._spec
        return made


class _Placed(_FromTorchTensor):
    """As torch's own, of a layout that is known."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: Any) -> DTensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.forward_input_placements = spec.placements
        ctx.forward_input_device_mesh = spec.mesh
        ctx.grad_placements = None
        ctx.set_materialize_grads(False)
        return DTensor(local.view_as(local), spec, requires_grad=local.requires_grad)  # pyright: ignore[reportCallIssue]

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _FromTorchTensor.backward(ctx, grad)[:2]


class Flash(Protocol):
    """A fused kernel of attention, forward and backward, of [batch, heads, tokens, size].

    A mask of numbers, to be added to the scores, is not for all: see ``masks``. A row that it hides wholly gives 0.
    """

    masks: ClassVar[bool]

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        causal: bool,
        mask: torch.Tensor | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The result, and for each query the logarithm of its weights' sum."""
        ...

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        result: torch.Tensor,
        total: torch.Tensor,
        causal: bool,
        mask: torch.Tensor | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of query, key and value; ``result`` and ``total`` may be of more keys than these."""
        ...


class _OnCPU:
    """The kernel of CPUs: every floating-point dtype, fewer heads of keys than of queries."""

    masks: ClassVar[bool] = True

    @staticmethod
    def forward(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        causal: bool,
        mask: torch.Tensor | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return op(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)

    @staticmethod
    def backward(
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        result: torch.Tensor,
        total: torch.Tensor,
        causal: bool,
        mask: torch.Tensor | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, result, total, 0.0, causal, attn_mask=mask, scale=scale
        )


class _OnCUDA:
    """The kernel of NVIDIA's devices: narrow dtypes, sizes of a head that are multiples of 8 up to 256."""

    masks: ClassVar[bool] = False

    @staticmethod
    def forward(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        causal: bool,
        mask: torch.Tensor | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert mask is None
        found = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)
        return found[0], found[1]

    @staticmethod
    def backward(
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        result: torch.Tensor,
        total: torch.Tensor,
        causal: bool,
        mask: torch.Tensor | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert mask is None
        unused = torch.empty(0, dtype=torch.int64)  # the state of dropout, and of sequences of unequal lengths
        given = (grad, query, key, value, result, total.contiguous(), None, None, query.shape[2], key.shape[2])
        op = torch.ops.aten._scaled_dot_product_flash_attention_backward
        return op(*given, 0.0, causal, unused, unused, scale=scale)


def flash_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Flash | None:
    """The fused kernel that takes these, None where there is none for them."""
    size = query.shape[-1]
    if size != value.shape[-1] or not query.numel() or not key.numel():
        return None
    if query.device.type == "cpu":
        return _OnCPU()
    narrow = query.dtype in (torch.float16, torch.bfloat16) and size % 8 == 0 and size <= 256
    return _OnCUDA() if query.device.type == "cuda" and torch.version.cuda is not None and narrow else None
