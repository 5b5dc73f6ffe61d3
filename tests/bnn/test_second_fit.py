"""A compiled step outlives its fit, and what a program cannot see makes a new one."""

import copy
import logging
import pickle
import threading
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from decimal import Decimal
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_hooks

import tyxe
from tests.oracles.bnns import NORMAL
from tests.oracles.nets import ReadLast
from tyxe.bnn.compiled import Description
from tyxe.guides import AutoNormal
from tyxe.poutine import flipout, local_reparameterization, selective_scale
from tyxe.priors import DictPrior, IIDPrior

pytestmark = pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")

X, Y = torch.randn(12, 3), torch.arange(12) % 2
SGD, NONE = partial(torch.optim.SGD, lr=1e-3), nullcontext()


class Slotted:
    __slots__ = ("rate",)

    def __init__(self) -> None:
        self.rate = 1.0


def scaled(x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
    return by * x


class Net(nn.Module):
    """A net with a rate, a number, a tensor that is no buffer, and more beside its tensors."""

    shift, pair = 0.0, [1.0]
    log, lock = logging.getLogger("net"), threading.Lock()

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.2))
        self.head = nn.Linear(4, 2)
        self.factor, self.options = 1.0, {"shift": 0.5}
        self.constant, self.array = torch.ones(2), np.ones(1)
        self.slots, self.function = Slotted(), scaled
        self.numbers = [np.float32(1), np.int64(1), np.bool_(True), Decimal(1)]
        self.queue, self.space = deque([1.0]), SimpleNamespace(by=1.0)
        self.act, self.terms = partial(nn.functional.leaky_relu, negative_slope=0.9), 1.0
        self.register_buffer("offset", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.factor * self.head(self.body(x)) + self.options["shift"] + self.shift
        found = self.function(self.act(found)) * self.terms * float(self.array[0]) * self.slots.rate
        for number in (*self.numbers, *self.queue, self.space.by):
            found = found * float(number)
        return found * self.constant * self.pair[0] + self.offset


def make() -> tyxe.VariationalBNN:
    torch.manual_seed(0)
    guide = partial(AutoNormal, init_scale=0.1)
    likelihood = tyxe.likelihoods.Categorical(12)
    return tyxe.VariationalBNN(Net(), NORMAL, likelihood, guide)


def fit(bnn: Any, handler: Any = NONE, **options: Any) -> list[float]:
    torch.manual_seed(1)
    data = [(X.to(bnn.net.head.weight.dtype), Y)] * 3
    with handler:
        return bnn.fit(data, SGD, 1, **{"compile": True, **options}).loss


def test_a_second_fit_compiles_nothing_even_for_new_numbers(traced: list[Any]) -> None:
    """A program is given all tensors: parameters and buffers."""
    bnn, plain = make(), make()
    fit(bnn)
    assert len(traced) == 1
    plain.load_state_dict(bnn.state_dict())
    found = []
    for one, compiles in ((bnn, True), (plain, False)):
        with torch.no_grad():
            one.net.offset.add_(1.0)
            for number in one.net_prior.buffers():
                number.add_(0.5)
            next(one.net_guide.parameters()).mul_(2.0)
        found.append(torch.tensor(fit(one, compile=compiles)))
    assert len(traced) == 1
    torch.testing.assert_close(*found)


PLAIN = Net.forward


@pytest.fixture(autouse=True)
def one_net(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let changes of the function and the class end with their test."""
    monkeypatch.setattr(scaled, "__defaults__", (1.0,))
    monkeypatch.setattr(Net, "pair", [1.0])
    monkeypatch.setattr(Net, "forward", PLAIN)


OTHER = type("Other", (Net,), {"shift": 1.0})
OTHER_ACT = partial(nn.functional.leaky_relu, negative_slope=0.5)
CHANGES: dict[str, Callable[[Any], object]] = {
    "dropout rate": lambda b: setattr(b.net.body[2], "p", 0.5),
    "number": lambda b: setattr(b.net, "factor", 2.0),
    "number in a dictionary": lambda b: b.net.options.update(shift=1.0),
    "tensor that is no buffer": lambda b: b.net.constant.mul_(2.0),
    "another such tensor": lambda b: setattr(b.net, "constant", torch.zeros(2)),
    "kind of layer": lambda b: b.net.body.__setitem__(1, nn.ReLU()),
    "structure": lambda b: b.net.body.append(nn.ReLU()),
    "hook": lambda b: b.net.head.register_forward_hook(lambda _, i, output: 2 * output),
    "hook before": lambda b: b.net.body.register_forward_pre_hook(lambda _, i: (2 * i[0],)),
    "mode": lambda b: b.net.body[2].eval(),
    "partial": lambda b: setattr(b.net, "act", OTHER_ACT),
    "attribute named as one of ours": lambda b: setattr(b.net, "terms", 3.0),
    "array in place": lambda b: b.net.array.__setitem__(0, 2.0),
    "slot": lambda b: setattr(b.net.slots, "rate", 2.0),
    "number of NumPy": lambda b: b.net.numbers.__setitem__(0, np.float32(2)),
    "whole number of NumPy": lambda b: b.net.numbers.__setitem__(1, np.int64(2)),
    "truth value of NumPy": lambda b: b.net.numbers.__setitem__(2, np.bool_(False)),
    "decimal number": lambda b: b.net.numbers.__setitem__(3, Decimal(2)),
    "queue": lambda b: b.net.queue.append(2.0),
    "namespace": lambda b: setattr(b.net.space, "by", 2.0),
    "class": lambda b: setattr(b.net, "__class__", OTHER),
    "list of the class in place": lambda b: Net.pair.__setitem__(0, 2.0),
    "attribute of the class": lambda b: setattr(Net, "pair", [3.0]),
    "method of the class": lambda b: setattr(Net, "forward", lambda *given: PLAIN(*given)),
    "default of a function": lambda b: setattr(b.net.function, "__defaults__", (2.0,)),
    "forward": lambda b: setattr(b.net, "forward", partial(Net.forward, b.net)),
    "kind of prior": lambda b: b.update_prior(IIDPrior(dist.Laplace(0.0, 1.0))),
    "shapes of the prior": lambda b: b.update_prior(
        DictPrior(b.net_guide.get_detached_distributions())
    ),
    "likelihood": lambda b: setattr(b.likelihood, "dataset_size", 24),
    "guide": lambda b: setattr(b.net_guide, "max_scale", 0.5),
    "what is trained": lambda b: b.net_guide.locs["head.bias"].requires_grad_(False),
    "pruned weights": lambda b: tyxe.guides.prune_(b.net_guide, keep=0.5),
    "dtype": lambda b: b.double(),
}
HANDLERS: list[Callable[[], Any]] = [
    local_reparameterization,
    nullcontext,
    flipout,
    partial(selective_scale, scale=0.5, expose=["head.bias"]),
    partial(selective_scale, scale=0.25, expose=["head.bias"]),
]


def test_shapes_of_a_new_fit_take_the_place_of_earlier_ones(
    traced: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tyxe.program.MOST_PROGRAMS", 2)
    bnn = make()
    for size, count in ((12, 1), (6, 2), (4, 3), (4, 3), (12, 4)):
        bnn.fit([(X[:size], Y[:size])] * 3, SGD, 1, compile=True)
        assert len(traced) == count


@pytest.mark.parametrize("start", range(4))
def test_what_a_program_cannot_see_makes_a_new_one(start: int, traced: list[Any]) -> None:
    bnn = make()
    fit(bnn)
    for name in [*CHANGES][start::4]:  # each change on top of others
        known = len(traced)
        CHANGES[name](bnn)
        for _ in range(2):
            fit(bnn)
            assert len(traced) == known + 1, name


def test_loggers_that_come_elsewhere_change_nothing(traced: list[Any]) -> None:
    """A logger leads to all others of the process."""
    bnn = make()
    fit(bnn)
    logging.getLogger("net.another")
    fit(bnn)
    assert len(traced) == 1


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU])
def test_draws_of_a_recurrent_layer_change_nothing(cell: Any, traced: list[Any]) -> None:
    net = ReadLast(cell, 1, 4, 2)
    bnn = tyxe.VariationalBNN(net, NORMAL, tyxe.likelihoods.Categorical(12), AutoNormal)
    for _ in range(3):
        bnn.fit([(X, Y)] * 3, SGD, 1, compile=True)
        bnn.predict(X, num_predictions=2)
    assert len(traced) == 1


def test_another_handler_makes_a_new_one(traced: list[Any]) -> None:
    bnn = make()
    for count, handler in enumerate(HANDLERS, 1):
        for _ in range(2):
            fit(bnn, handler())
            assert len(traced) == count


def test_a_hook_of_all_modules_makes_a_new_one(traced: list[Any]) -> None:
    bnn, before = make(), module_hooks.register_module_forward_pre_hook
    fit(bnn)
    for count, register in enumerate((module_hooks.register_module_forward_hook, before), 2):
        hook = register(lambda *_: None)
        try:
            fit(bnn)
        finally:
            hook.remove()
        assert len(traced) == count


def test_copies_and_states_have_no_programs_and_autocast_makes_a_new_one(traced: list[Any]) -> None:
    bnn = make()
    fit(bnn)
    for other in (copy.deepcopy(bnn), pickle.loads(pickle.dumps(bnn))):
        assert other._runtime.steps is None
    fit(other)
    assert len(traced) == 2
    fit(bnn, autocast=torch.bfloat16)
    assert len(traced) == 3
    assert not any("program" in name for name in bnn.state_dict())


def test_what_is_described_may_be_filled_meanwhile() -> None:
    """As a cache of the net is by a prediction in another thread."""
    cache: dict[str, Any] = {}

    class Fills(list[int]):
        def __iter__(self) -> Any:
            cache[f"{len(cache)}"] = 1
            return super().__iter__()

    cache["first"] = Fills([1])
    described = Description(set())(cache)
    assert described == Description(set())({"first": Fills([1])})
    assert len(cache) == 3
