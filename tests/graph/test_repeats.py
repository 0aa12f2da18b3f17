"""A graph with copied layers equals the graph of the whole trace; what differs between layers is traced."""

import functools

import pytest
import torch
from torch import nn

from placement.graph import capture as module
from placement.graph.capture import capture
from placement.graph.repeats import Repeats


class Inner(nn.Module):
    def __init__(self, width, index):
        super().__init__()
        self.index = index
        self.lin = nn.Linear(width, width)
        self.drop = nn.Dropout(0.25)
        self.idle = nn.Identity()

    def forward(self, x):
        return self.idle(self.drop(torch.relu(self.lin(x))))


class Layer(nn.Module):
    def __init__(self, width, index):
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(width)
        self.inner = Inner(width, index)

    def forward(self, x, *, mask=None):
        y = self.inner(self.norm(x))
        return x + (y if mask is None else y * mask)


class ReadsIndex(Layer):
    def forward(self, x, *, mask=None):
        return super().forward(x, mask=mask) * (2.0 if self.index % 2 else 1.0)


class ReadsVars(Layer):
    def forward(self, x, *, mask=None):
        return super().forward(x, mask=mask) * vars(self)["index"]


class Counts(Layer):
    def __init__(self, width, index):
        super().__init__(width, index)
        self.seen = []

    def forward(self, x, *, mask=None):
        self.seen.append(1)
        return super().forward(x, mask=mask)


class InPlace(Layer):
    def forward(self, x, *, mask=None):
        y = super().forward(x, mask=mask) * 1.5
        y.add_(1.0)
        return y


class MakesTensors(Layer):
    """Export lifts a constant out of the layer that makes it."""

    def forward(self, x, *, mask=None):
        return super().forward(x, mask=mask) * torch.tensor(2.5)


class Partial(Layer):
    """Its activation is a partial of its own, as transformers make them."""

    def __init__(self, width, index):
        super().__init__(width, index)
        self.act = functools.partial(nn.functional.gelu, approximate="tanh")

    def forward(self, x, *, mask=None):
        return self.act(super().forward(x, mask=mask))


class Passes(Layer):
    """Returns what it was given, and a constant, beside its result."""

    def forward(self, x, *, mask=None):
        return super().forward(x, mask=mask), mask, 3


class Shared:
    """What layers share beside the tree of modules."""

    first, step = None, 0


class ReadsShared(Layer):
    held = Shared()

    def __init__(self, width, index):
        super().__init__(width, index)
        self.shared = self.held

    def forward(self, x, *, mask=None):
        return super().forward(x, mask=mask) * (1 + self.shared.step)


class KeepsTheFirst(ReadsShared):
    def forward(self, x, *, mask=None):
        y = self.inner(self.norm(x))
        if self.shared.first is None:
            self.shared.first = y
        return x + self.shared.first


class AddsWhatCameFirst(ReadsShared):
    def forward(self, x, *, mask=None):
        return super().forward(x, mask=mask) + Shared.first


class CountsInItsClass(Layer):
    calls = 0

    def forward(self, x, *, mask=None):
        type(self).calls += 1
        return super().forward(x, mask=mask) * self.calls


class InASlot(Layer):
    __slots__ = ("factor",)

    def __init__(self, width, index):
        super().__init__(width, index)
        self.factor = index + 1

    def forward(self, x, *, mask=None):
        return super().forward(x, mask=mask) * self.factor


class LastTwice(Layer):
    def forward(self, x, *, mask=None):
        return super().forward(x, mask=mask) * (2 if self is self.owner[0].layers[-1] else 1)


class AddsToAnArgument(Layer):
    def forward(self, x, total):
        y = super().forward(x)
        total.add_(y)
        return y


class UsesTheFirst(Layer):
    def forward(self, x, *, mask=None):
        return super().forward(x, mask=mask) + nn.functional.linear(x, self.source[0].inner.lin.weight)


class Stack(nn.Module):
    def __init__(self, kind, *, layers=3, width=4):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.layers = nn.ModuleList(kind(width, i) for i in range(layers))

    def forward(self, x):
        return self.run(self.embed(x))

    def run(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Masked(Stack):
    """Every other layer gets a mask."""

    def run(self, x):
        mask = (x.detach() > 0).to(x.dtype)
        for index, layer in enumerate(self.layers):
            x = layer(x, mask=mask if index % 2 else None)
        return x


class Passing(Stack):
    def run(self, x):
        mask = (x.detach() > 0).to(x.dtype)
        for layer in self.layers:
            x, mask, factor = layer(x, mask=mask)
        return x * factor


class Looped(Stack):
    def run(self, x):
        for layer in (*self.layers, *self.layers):
            x = layer(x)
        return x


class LoopedThenOther(Stack):
    """The last call of the first layer is unlike the others."""

    def run(self, x):
        x = self.layers[0](self.layers[0](x))
        return self.layers[0](x, mask=x.detach())


class FromOutside(Stack):
    """A module inside of a copied layer is called by the model, too."""

    def run(self, x):
        return self.layers[1].inner(super().run(x))


class Block(Stack):
    def forward(self, x):
        return self.run(x)


class Nested(nn.Module):
    """Lists in lists: copies inside of recordings, recordings copied."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.blocks = nn.ModuleList(Block(Layer, layers=2) for _ in range(3))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


class UnderNoGrad(Stack):
    def run(self, x):
        with torch.no_grad():
            y = super().run(x)
        return super().run(x + y)


class Stepping(Stack):
    """The model tells each layer where it is."""

    def run(self, x):
        Shared.first = x
        for index, layer in enumerate(self.layers):
            ReadsShared.held.step = layer.index = index
            x = layer(x)
        self.put_back()
        return x

    def put_back(self):
        Shared.first, ReadsShared.held.step, CountsInItsClass.calls = None, 0, 0
        vars(ReadsShared.held).pop("first", None)
        for layer in self.layers:
            layer.index = 0


class Starting(Stepping):
    def run(self, x):
        x = Stack.run(self, x)
        self.put_back()
        return x


class Rounds(Stepping):
    def run(self, x):
        for index in range(2):
            for layer in self.layers:
                layer.index = index
                x = layer(x)
        self.put_back()
        return x


class Totalling(Stack):
    def run(self, x):
        total = torch.zeros_like(x)
        for layer in self.layers:
            x = layer(x, total)
        return x + total


def telling(stack):
    stack.put_back()
    return stack


def owned(stack):
    for layer in stack.layers:
        layer.owner = [stack]
    return stack


def sourced(stack):
    source = [stack.layers[0]]
    for layer in stack.layers:
        layer.source = source
    return stack


def frozen(stack):
    stack.layers[1].inner.lin.weight.requires_grad_(False)
    return stack


def tied(stack):
    stack.layers[1].inner.lin.weight = stack.layers[0].inner.lin.weight
    return stack


def shared(stack):
    for layer in stack.layers[1:]:
        layer.inner = stack.layers[0].inner
    return stack


def hooked(stack):
    for layer in stack.layers:
        layer.inner.register_forward_hook(lambda m, args, out: out * (m.index + 1))
    return stack


def hooked_itself(stack):
    for layer in stack.layers:
        layer.register_forward_hook(lambda m, args, out: out * (m.index + 1))
    return stack


def replaced(stack):
    stack.layers[1].inner.forward = lambda x: x * 3
    return stack


def other(stack):
    stack.layers[1].inner.lin = nn.Linear(4, 4, bias=False)
    return stack


CASES = {  # how to make the model, and how many calls are copies
    "alike": (lambda: Stack(Layer), 2),
    "in place": (lambda: Stack(InPlace), 2),
    "a partial each": (lambda: Stack(Partial), 2),
    "reads its index": (lambda: Stack(ReadsIndex), 0),
    "reads its dict": (lambda: Stack(ReadsVars), 0),
    "changes itself": (lambda: Stack(Counts), 0),
    "every other masked": (lambda: Masked(Layer, layers=4), 2),
    "passes arguments through": (lambda: Passing(Passes), 2),
    "called in a loop": (lambda: Looped(Layer), 5),
    "nested": (Nested, 1 + 2),
    "one frozen": (lambda: frozen(Stack(Layer, layers=4)), 2),
    "tied across layers": (lambda: tied(Stack(Layer)), 2),
    "one module in all": (lambda: shared(Stack(Layer)), 0),
    "hooks inside": (lambda: hooked(Stack(Layer)), 0),
    "hooks on the layer": (lambda: hooked_itself(Stack(Layer)), 2),
    "one replaced forward": (lambda: replaced(Stack(Layer)), 1),
    "one without a bias": (lambda: other(Stack(Layer)), 1),
}
AGAIN = {  # traced a second time, without copies
    "unlike after a copy": lambda: LoopedThenOther(Layer),
    "called from outside": lambda: FromOutside(Layer),
}


def shown(graph):
    infos = [f"{path} {info.returned} {info.arguments}" for path, info in graph.modules.items()]
    stacks = [f"{node.name} {node.stack} {node.source}" for node in graph.nodes]
    return [*str(graph).splitlines(), *infos, *stacks]


@pytest.fixture
def traces(monkeypatch):
    made = []

    class Noted(Repeats):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(module, "Repeats", Noted)
    return made


DIMS = {"x": ("batch", "seq")}
EXAMPLE = {"x": torch.tensor([[1, 4, 10], [0, 1, 7]])}


@pytest.mark.parametrize("name", CASES)
def test_a_graph_with_copies_is_the_graph_of_the_whole_trace(name, traces):
    make, copies = CASES[name]
    model = make()
    attributes = [list(vars(m)) for m in model.modules()]
    forwards = [(type(m), type(m).forward) for m in model.modules()]
    whole = capture(model, EXAMPLE, DIMS, copies=False)
    once = len(traces)
    short = capture(model, EXAMPLE, DIMS)
    assert shown(short) == shown(whole)
    assert len(traces) == 2 * once  # none was made anew without copies
    assert len(traces[once].copies) == copies
    assert [list(vars(m)) for m in model.modules()] == attributes
    assert all(kind.forward is forward for kind, forward in forwards)
    assert "__getattribute__" not in vars(nn.Module)


@pytest.mark.parametrize(
    "make",
    [
        lambda: telling(Stepping(ReadsIndex)),
        lambda: telling(Rounds(ReadsIndex)),
        lambda: telling(Stepping(ReadsShared)),
        lambda: telling(Stepping(AddsWhatCameFirst)),
        lambda: telling(Starting(KeepsTheFirst)),
        lambda: telling(Starting(CountsInItsClass)),
        lambda: Stack(InASlot),
        lambda: owned(Stack(LastTwice)),
        lambda: sourced(Stack(UsesTheFirst)),
        lambda: Totalling(AddsToAnArgument),
    ],
)
def test_layers_told_apart_by_what_is_outside_of_them(make):
    model = make()
    assert shown(capture(model, EXAMPLE, DIMS)) == shown(capture(model, EXAMPLE, DIMS, copies=False))


@pytest.mark.parametrize("name", AGAIN)
def test_what_copies_would_tell_wrongly_is_traced_again(name, traces):
    model = AGAIN[name]()
    whole, short = capture(model, EXAMPLE, DIMS, copies=False), capture(model, EXAMPLE, DIMS)
    assert shown(short) == shown(whole)
    assert len(traces) == 3


def test_copies_under_no_grad(traces):
    model = UnderNoGrad(Layer)
    assert shown(capture(model, EXAMPLE, DIMS)) == shown(capture(model, EXAMPLE, DIMS, copies=False))
    assert traces[0].copies


def test_a_constant_that_a_layer_makes_is_made_once(traces):
    model = Stack(MakesTensors)
    whole, short = capture(model, EXAMPLE, DIMS, copies=False), capture(model, EXAMPLE, DIMS)
    assert len(traces[1].copies) == 2
    assert [(n.op, n.stack) for n in short.nodes] == [(n.op, n.stack) for n in whole.nodes]
    assert (len(short.constants), len(whole.constants)) == (1, 3)


def test_a_layer_whose_input_needs_no_gradient_is_traced_apart(traces):
    model = Stack(Layer, layers=4)
    model.embed.requires_grad_(False)
    capture(model, EXAMPLE, DIMS)
    assert [r.call.path for r in traces[0].recordings] == ["layers.0", "layers.1"]
    assert [a.call.path for a in traces[0].copies] == ["layers.2", "layers.3"]
