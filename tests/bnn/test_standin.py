"""A forward runs on a stand-in: the net at its draws, and a BNN that stays as it was."""

import copy
import dataclasses
import gc
import types
import warnings
import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import spectral_norm
from torch.utils.checkpoint import checkpoint

import tyxe
from tests.oracles.bnns import NORMAL, mean_field
from tests.oracles.nets import ReadLast
from tests.soak.nets import NETS
from tyxe.bnn import base
from tyxe.guides import AutoNormal
from tyxe.util import call_with

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))


def wrapped(net: nn.Module) -> tyxe.PytorchBNN:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tyxe.TyxeWarning)
        return tyxe.PytorchBNN(net, NORMAL, partial(AutoNormal, init_scale=0.3))


def plain(bnn: tyxe.PytorchBNN, values: dict[str, Tensor], inputs: Any) -> tuple[Any, list[Tensor]]:
    """Return the output of a copy of the net with these parameters, and the gradients in them."""
    net = copy.deepcopy(bnn.net)
    parameters = dict(net.named_parameters())
    sites = [parameters[name.removeprefix("net.")].requires_grad_() for name in values]
    for parameter, value in zip(sites, values.values(), strict=True):
        parameter.data.copy_(value)
    output = call_with(net, inputs)
    return output.detach(), torch.autograd.grad(output.sin().sum(), sites, allow_unused=True)


def leaves(bnn: tyxe.PytorchBNN) -> dict[str, Tensor]:
    """Return a draw of each site, of which gradients can be asked."""
    torch.manual_seed(1)
    drawn = {name: own + 0.3 * torch.randn_like(own) for name, own in bnn._in_places().items()}
    return {name: value.requires_grad_() for name, value in drawn.items()}


def assert_is_the_net_at_its_draws(net: nn.Module, inputs: Any, tolerance: float = 1e-8) -> None:
    bnn = wrapped(net).eval()
    values = leaves(bnn)
    torch.manual_seed(2)
    expected, gradients = plain(bnn, values, inputs)
    # At other values before, of which nothing stays behind; in a fused layer, if it has one.
    bnn._run_net(bnn._in_places(), inputs)
    with torch.no_grad():
        torch.manual_seed(2)
        quick = bnn._run_net(values, inputs)
    torch.manual_seed(2)
    output = bnn._run_net(values, inputs)
    found = torch.autograd.grad(output.sin().sum(), [*values.values()], allow_unused=True)
    for one in (output, quick):
        torch.testing.assert_close(one, expected, rtol=tolerance, atol=tolerance)
    for one, other in zip(found, gradients, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=10 * tolerance, atol=10 * tolerance)


# --------------------------------------------------------------------------- links between parts


class Body(nn.Module):
    """Two layers, which other kinds of nets link to each other by what they set up."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.set_up()

    def set_up(self) -> None:
        pass

    def plainly(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.plainly(x)


class InList(Body):
    """Runs layers that are in a plain list as well."""

    def set_up(self) -> None:
        self.order = [self.first, torch.tanh, self.last]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.order:
            x = layer(x)
        return x


class Bound(Body):
    """Holds a method of its own, and so itself."""

    def set_up(self) -> None:
        self.run = self.plainly

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


class Holds(Body):
    """Holds parts in an object of its own, beside a parameter."""

    def set_up(self) -> None:
        self.pair = types.SimpleNamespace(layer=self.first, weight=self.last.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.pair.layer(x) @ self.pair.weight + self.last.bias


class Hooked(Body):
    """A hook is a method of a part, and reads its weights."""

    def set_up(self) -> None:
        self.first.register_forward_hook(self.shift)

    def shift(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output + self.last.bias.sin()


class Filled(Body):
    """Fills a list in its first forward, and then runs what is in it."""

    def set_up(self) -> None:
        self.order: list[nn.Module] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.order:
            self.order += [self.first, self.last]
        return self.order[1](torch.tanh(self.order[0](x)))


class Parent(Body):
    """A child that knows its parent, outside of the tree of submodules."""

    def set_up(self) -> None:
        self.child = Child(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.plainly(self.child(x))


class Child(nn.Linear):
    def __init__(self, parent: nn.Module) -> None:
        super().__init__(3, 3)
        object.__setattr__(self, "parent", parent)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.parent.first.weight.sum().sin()


class Replaced(Body):
    """An instance whose forward is a bound function."""

    def set_up(self) -> None:
        self.forward = partial(Body.forward, self)  # type: ignore[method-assign]


def test_recurrent_parts_in_eval_mode_keep_what_a_backward_needs(monkeypatch) -> None:
    # On a GPU cuDNN keeps it in train mode alone, in which the dropout has to be left out.
    found = []
    own = torch._VF.lstm

    def noted(*args: Any) -> Any:
        found.append(args[5:7])  # its rate, and whether it trains
        return own(*args)

    net = nn.LSTM(3, 4, num_layers=2, dropout=0.5)
    bnn, x = wrapped(net), torch.randn(5, 2, 3)
    expected = copy.deepcopy(net).eval()(x)[0]
    monkeypatch.setattr(torch._VF, "lstm", noted)
    bnn.eval()
    assert torch.equal(bnn._run_net(bnn._in_places(), x)[0], expected)
    assert net.dropout == 0.5
    bnn.train()
    bnn._run_net(bnn._in_places(), x)
    assert found == [(0.0, True), (0.5, True)]


RECURRENT = partial(ReadLast, nn.LSTM, 1, 3, 3)


def spectral() -> nn.Module:
    return nn.Sequential(spectral_norm(nn.Linear(3, 3)), nn.Linear(3, 2))


LINKED = [InList, Filled, Bound, Holds, Hooked, Parent, Replaced, spectral]
LINKED += [partial(ReadLast, nn.RNN, 1, 3, 3)]


@pytest.mark.parametrize("kind", LINKED)
def test_parts_that_reach_each_other_beside_the_tree_meet_the_draws(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    assert_is_the_net_at_its_draws(kind().double(), X.double())


SKIPPED = {"checkpointed, reentrant"}  # PyTorch's error, see test_pytorch.py


@pytest.mark.parametrize("name", sorted(NETS.keys() - SKIPPED))
def test_nets_of_all_kinds_are_those_at_their_draws(name: str) -> None:
    make, inputs = NETS[name]
    torch.manual_seed(0)
    assert_is_the_net_at_its_draws(make(3), inputs(), 1e-5)


class Compiled(Body):
    def set_up(self) -> None:
        self.first = torch.compile(self.first, backend="eager")


def test_compiled_parts_run_uncompiled_after_one_warning() -> None:
    net = Compiled()
    with pytest.warns(tyxe.TyxeWarning, match="compiled modules of the net run uncompiled"):
        bnn = tyxe.PytorchBNN(net, NORMAL, AutoNormal)
    values = leaves(bnn)
    w, b, v, c = values.values()
    found = bnn._run_net(values, (X,))
    torch.testing.assert_close(found, torch.tanh(X @ w.T + b) @ v.T + c)


def test_a_compiled_net_keeps_the_hook_that_picks_its_output() -> None:
    class Two(Body):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": super().forward(x)}

    net = torch.compile(Two(), backend="eager")
    with pytest.warns(tyxe.TyxeWarning, match="uncompiled"):
        bnn = tyxe.PytorchBNN(net, NORMAL, AutoNormal, output="logits")
    assert bnn(X).shape == (6, 3)


@pytest.mark.parametrize("mode", [True, False])
def test_scripted_parts_without_sites_are_shared(mode: bool) -> None:
    part = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).requires_grad_(False).train(mode)
    bnn = wrapped(nn.Sequential(torch.jit.script(part), nn.Linear(3, 2)))
    assert bnn._stand_in(leaves(bnn)).net[0] is bnn.net[0]
    assert torch.equal(bnn.predict(X, num_predictions=0), bnn.predict(X, num_predictions=0))
    assert all(part.training == mode for part in bnn.net[0].modules())


class Tokens(Body):
    """Holds what refers to no part: an object, a large tensor, a lookup."""

    def set_up(self) -> None:
        self.lookup, self.constant = {"a": [1, 2]}, torch.ones(3)
        self.kept = [self.lookup, self.constant]
        self.parts = [self.first, self.lookup, self.constant]

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [self.lookup, self.constant, *self.kept, *self.parts[1:]]
        return self.last(self.parts[0](x) * self.constant)


def test_what_holds_no_part_is_shared() -> None:
    bnn = wrapped(Tokens())
    bnn(X)
    own = [bnn.net.lookup, bnn.net.constant]
    assert all(one is other for one, other in zip(bnn.net.seen, 3 * own, strict=True))


def test_hooks_stay_the_users_objects() -> None:
    class Recorder(list[Tensor]):
        def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
            self.append(output)

    bnn, recorder = wrapped(Hooked()), Recorder()
    # Bound to a part, after the look at it: beside another of this kind, and by itself.
    later = [part.register_forward_hook(bnn.net.shift) for part in (bnn.net.first, bnn.net.last)]
    handle = bnn.net.last.register_forward_hook(recorder)
    values = leaves(bnn)
    found = bnn._run_net(values, (X,))
    assert torch.equal(recorder[0], found)
    w, b, v, c = values.values()
    expected = torch.tanh(X @ w.T + b + 2 * c.sin()) @ v.T + c + c.sin()
    torch.testing.assert_close(found, expected)
    for one in (handle, *later):
        one.remove()
    bnn(X)
    assert len(recorder) == 1


@pytest.mark.parametrize("kind", ["PytorchBNN", "VariationalBNN"])
def test_draws_of_a_prediction_share_one_stand_in(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bnn, made, plain = wrapped(Body()), [], base.StandIn
    if kind == "VariationalBNN":
        bnn = mean_field(Body(), tyxe.likelihoods.Categorical(6))
    bnn.eval().predict(X, num_predictions=3)
    monkeypatch.setattr(base, "StandIn", lambda *given: made.append(1) or plain(*given))
    assert bnn.predict(X, num_predictions=5).shape[-1] == 3
    assert made == [1]


# --------------------------------------------------------------------------- what a forward leaves


class Leaves(nn.Module):
    """Counts, keeps, replaces and makes things in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.count, self.gone = nn.Linear(3, 2), 0, "there"
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.last = self.layer(x)
        self.mean = 0.5 * self.mean + self.last.detach().mean(0)
        if not hasattr(self, "made"):
            self.made = nn.Linear(2, 2)
            self.order = [self.layer, self.made]
            del self.gone
        return self.made(self.order[0](x))


def test_what_a_forward_sets_is_the_nets() -> None:
    net = Leaves()
    bnn = wrapped(net)
    for _ in range(3):
        bnn(X)
    assert bnn.net.count == 3
    assert bnn.net.last.shape == (6, 2)
    assert not hasattr(bnn.net, "gone")
    assert bnn.net.mean.any()
    assert bnn.net.order == [bnn.net.layer, bnn.net.made]
    values = leaves(bnn)
    w, b = values.values()
    torch.testing.assert_close(bnn._run_net(values, X), bnn.net.made(X @ w.T + b))


class Fails(Body):
    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        raise KeyboardInterrupt if x.sum() > 1e6 else ValueError
        return found


def snapshot(bnn: nn.Module) -> Any:
    modules = [*bnn.named_modules()]
    return (
        {name: value.clone() for name, value in bnn.net.state_dict().items()},
        {name: module.training for name, module in modules},
        [(name, id(p), p.requires_grad) for name, p in bnn.named_parameters()],
        {name: [*module._forward_hooks.values()] for name, module in modules},
        [sorted(vars(module)) for _, module in modules],
        torch.get_rng_state(),
    )


def assert_equal(one: Any, other: Any) -> None:
    tensors, *others, rng = one
    assert all(map(torch.equal, tensors.values(), other[0].values()))
    assert others == list(other[1:-1])
    assert torch.equal(rng, other[-1])


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(NETS.keys() - SKIPPED)), st.booleans(), st.booleans())
def test_forwards_leave_a_bnn_as_it_was(name: str, lazy: bool, train: bool) -> None:
    make, inputs = NETS[name]
    torch.manual_seed(0)
    bnn, batch = wrapped(make(3)).train(train), inputs()
    values = {name: value.detach() for name, value in leaves(bnn).items()}
    with bnn._predicting():
        bnn._run_net(values, batch)  # what a first forward sets stays
        before = snapshot(bnn)
        with tyxe.poutine.report() if lazy else nullcontext():
            bnn._run_net(values, batch)
    assert_equal(snapshot(bnn), before)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(sorted(NETS.keys() - SKIPPED)),
    st.sampled_from([ValueError, KeyboardInterrupt]),
    st.randoms(use_true_random=False),
)
def test_errors_inside_of_nets_of_all_kinds_leave_a_bnn_as_it_was(
    name: str, error: type[BaseException], chance: Any
) -> None:
    make, inputs = NETS[name]
    torch.manual_seed(0)
    bnn, batch, stops = wrapped(make(3)).eval(), inputs(), []
    values = {name: value.detach() for name, value in leaves(bnn).items()}
    called: list[nn.Module] = []

    def hook(part: nn.Module, *_: Any) -> None:
        called.append(part)
        if len(called) in stops:
            raise error

    for part in bnn.net.modules():
        part.register_forward_hook(hook)
    bnn._run_net(values, batch)  # what a first forward sets stays
    stops.append(chance.randint(1, len(called)))
    called.clear()
    before = snapshot(bnn)
    with pytest.raises(error):
        bnn._run_net(values, batch)
    assert_equal(snapshot(bnn), before)


@pytest.mark.parametrize(("scale", "error"), [(1.0, ValueError), (1e9, KeyboardInterrupt)])
def test_exceptions_and_interrupts_leave_a_bnn_as_it_was(scale: float, error: Any) -> None:
    bnn = wrapped(Fails())
    values, before = leaves(bnn), snapshot(bnn)
    with pytest.raises(error):
        bnn._run_net(values, (scale * X.abs(),))
    assert_equal(snapshot(bnn), before)


@dataclasses.dataclass
class Output:
    logits: Tensor


class BoundAndCheckpointed(Bound):
    """Holds itself, and returns a tensor in an object of a user's."""

    def forward(self, x: Tensor) -> Any:
        return Output(checkpoint(self.run, x, use_reentrant=False))


class AndItsInput(Bound):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.run, x, use_reentrant=False), x


def test_copies_stay_as_long_as_the_graph_of_an_output_of_any_kind_or_of_another_net() -> None:
    first, second = wrapped(BoundAndCheckpointed()), wrapped(AndItsInput())
    output, between = second(first(X).logits)
    (output.sum() + between.sum()).backward()
    assert all(p.grad is not None for bnn in (first, second) for p in bnn.net_guide.parameters())


@pytest.mark.parametrize("kind", [Body, Bound, Parent, RECURRENT])
def test_draws_go_with_the_graph_and_need_no_garbage_collector(kind: type[nn.Module]) -> None:
    bnn, drawn = wrapped(kind()), []
    bnn(X).sum().backward()
    gc.collect()
    gc.disable()
    try:
        for has_graph in (True, True, False, False):
            values = leaves(bnn)
            with torch.set_grad_enabled(has_graph):
                loss = bnn._run_net(values, (X,)).sum()
            if has_graph:
                loss.backward()
            drawn += [weakref.ref(value) for value in values.values()]
            del values, loss
        assert all(one() is None for one in drawn)
    finally:
        gc.enable()


# --------------------------------------------------------------------------- tensors that nets keep


class Keeps(Body):
    """Keeps what its forward has computed, by itself and in containers."""

    def set_up(self) -> None:
        self.features, self.kept = None, {}

    def forward(self, x: Tensor) -> Tensor:
        self.features = torch.tanh(self.first(x))
        self.kept = {"features": [self.features]}
        return self.last(self.features)


def trained(net: nn.Module) -> nn.Module:
    net(X).sum().backward()
    return net


def pruned() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    nn.utils.prune.l1_unstructured(net[0], "weight", amount=0.5)
    return net


KEEPING = {
    "features": lambda: trained(Keeps()),
    "weight_norm": lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 3)),
    "pruned": pruned,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("name", KEEPING)
def test_nets_that_keep_tensors_of_a_graph_are_copied(name: str) -> None:
    net = KEEPING[name]()
    bnn, expected = wrapped(net), net(X).detach()
    assert torch.equal(bnn.to_module()(X), expected)
    bnn(X).sum().backward()
    copies = [copy.deepcopy(bnn).to_module(), *(bnn.to_module() for _ in range(2))]
    assert all(torch.equal(one(X), expected) for one in copies)
    assert bnn.to_ensemble(2)(X).shape == (2, *expected.shape)
    if name == "features":
        other = copy.deepcopy(bnn).net
        assert other.kept["features"][0] is other.features
        assert not other.features.requires_grad
        assert bnn.net.features.requires_grad  # as for losses of it
